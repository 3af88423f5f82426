"""Frames that need no answer: the streams whose still frames are given their last answer, marked with its age.

A stream repeats where its requests ask for it (`edgesplit_skip_still`), or where it has a name and the operator set it.
Bounded in streams and in bytes of answers. What a stream found out survives the end of the stream, of its release and
of the agent (`still_states`). A frame leaves the device because of this only where it would have without.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from edgesplit.answers.answer_rule import AnswerRule, parse_answer_rule
from edgesplit.errors import DeadlineExceeded, InferenceFailed, LinkError, UsageError
from edgesplit.mqtt import messages
from edgesplit.oip.report import Report
from edgesplit_agent.policy.frame_difference import thumbnail
from edgesplit_agent.policy.still_calibration import DELTA, SPACING_S
from edgesplit_agent.serving.request import Answer, Request
from edgesplit_agent.serving.still_states import MAX_STATES, States, StateWriter, read_states
from edgesplit_agent.serving.still_stream import Look, StillCounts, StillStream

log = logging.getLogger(__name__)

STREAMS = 64
"""Maximum number of streams."""
HELD_BYTES = 32 * 2**20
"""Maximum bytes of answers that are kept."""
ALARM_S = 3600.0
"""Seconds for which an alarm is a condition of the device."""
LEAST_AGE_S = 1e-6
"""Age of the answer of a request that arrived at the same time: 0 would say that it is not repeated."""


@dataclass
class _Entry:
    """A stream of one release's answers, and its lock."""

    stream: StillStream
    release: str
    """Digest of the release."""
    alarmed_at: float = 0.0
    """When its last alarm was; 0: never."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class StillFrames:
    """The streams of this device. Thread-safe."""

    def __init__(
        self,
        allowed: float = 0.0,
        *,
        spacing_s: float = SPACING_S,
        file: Path | None = None,
        delta: float = DELTA,
        draw: Callable[[], float] = random.random,
        streams: int = STREAMS,
        held_bytes: int = HELD_BYTES,
    ) -> None:
        """`allowed`: share of answers that may differ, for named streams that say nothing; 0: they are not repeated.
        `spacing_s`: least seconds between frames that count in a calibration. `file`: where states are kept."""
        self._allowed = allowed
        self._spacing_s = spacing_s
        self._delta = delta
        self._draw = draw
        self._streams = streams
        self._held_bytes = held_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._ended: dict[str, StillCounts] = {}
        """By model: what was counted in streams that are forgotten."""
        self._taken: dict[str, StillCounts] = {}
        """By model: what telemetry has had."""
        self._kept: States = read_states(file) if file is not None else {}
        """States of streams that are not in use."""
        self._writer = StateWriter(file, self._states, dict(self._kept)) if file is not None else None

    def start(self) -> None:
        """Keep states from now on."""
        if self._writer is not None:
            self._writer.start()

    def stop(self) -> None:
        """Write what is to be kept."""
        if self._writer is not None:
            self._writer.stop()

    def answer(self, request: Request, run: Callable[[Request], Answer]) -> Answer:
        """The last answer of the request's stream where its frame is still, else what `run` answers.

        UsageError where the request asks for repeated answers and it is not known what this model's answer is.
        """
        entry = self._entry_of(request)
        if entry is None or entry.stream.state == "off":
            return run(request)
        frame = thumbnail(request.inputs, request.release.manifest.input_spec)
        if frame is None:
            return run(request)
        taken_at_s = request.options.taken_at_s
        with entry.lock:
            draws_audit = self._draw() < entry.stream.audit_probability
            look = entry.stream.look(frame, request.began, draws_audit, taken_at_s)
            if request.options.refuse_unsure and look.repeats is not None and look.repeats.answer.report.unsure:
                look = replace(look, repeats=None)
            if look.repeats is not None and not look.is_audit:
                entry.stream.on_repeated()
                return _repeated(request, look)
        try:
            answer = run(request)
        except (LinkError, DeadlineExceeded, InferenceFailed):
            if look.repeats is None or request.left_s <= 0:
                raise
            return _unaudited(request, entry, look)
        if answer.report.stale:  # the model could not answer, and this is not what it says to the frame
            return answer if look.repeats is None else _unaudited(request, entry, look)
        self._on_answered(request, entry, look, answer)
        return answer

    def forget(self, model: str) -> None:
        """Drop the streams of a model that is served no longer, or by another release."""
        with self._lock:
            for key in [key for key in self._entries if key[0] == model]:
                self._end(key)

    def counts(self) -> dict[str, StillCounts]:
        """What was counted since the start, by model."""
        with self._lock:
            totals = dict(self._ended)
            for (model, _), entry in self._entries.items():
                totals[model] = totals.get(model, StillCounts()).plus(entry.stream.counts)
        return totals

    def take_window(self) -> dict[str, messages.StillCounts]:
        """By model with such streams: what was counted since the last call."""
        totals = self.counts()
        windows: dict[str, messages.StillCounts] = {}
        with self._lock:
            streams = [(model, entry.stream.allowed) for (model, _), entry in self._entries.items()]
            for model, total in totals.items():
                counted = total.since(self._taken.get(model, StillCounts()))
                allowed = max((share for name, share in streams if name == model), default=0.0)
                if allowed or counted != StillCounts():
                    windows[model] = messages.StillCounts(
                        repeated=counted.repeated, audited_same=counted.same, changed=counted.changed,
                        unaudited=counted.unaudited, alarms=counted.alarms, allowed=allowed,
                    )  # fmt: skip
            self._taken = totals
        return windows

    def alarms(self) -> tuple[str, ...]:
        """The last alarm of each stream that had one within `ALARM_S`, in words."""
        since = perf_counter() - ALARM_S
        with self._lock:
            entries = [(key, entry) for key, entry in self._entries.items() if entry.stream.alarm]
        return tuple(f"{_name(*key)}: {entry.stream.alarm}" for key, entry in entries if entry.alarmed_at >= since)

    def status(self) -> list[dict[str, Any]]:
        """The streams for people and tools, as JSON values."""
        with self._lock:
            entries = list(self._entries.items())
        return [
            {
                "model": model, "stream": name, "state": entry.stream.state, "detail": entry.stream.progress,
                "allowed": entry.stream.allowed, "answer": entry.stream.rule.to_text(),
                "calibrated": entry.stream.calibrated, "audit_share": entry.stream.audit_probability,
                "alarm": entry.stream.alarm,
                "repeated": entry.stream.counts.repeated, "same": entry.stream.counts.same,
                "changed": entry.stream.counts.changed, "unaudited": entry.stream.counts.unaudited,
            }
            for (model, name), entry in entries
        ]  # fmt: skip

    def _entry_of(self, request: Request) -> _Entry | None:
        """The request's stream, created at its first frame; None where its frames are all answered."""
        options = request.options
        is_default = options.skip_still is None
        allowed = (self._allowed if options.stream else 0.0) if options.skip_still is None else options.skip_still
        if not allowed or request.is_background:
            return None
        rule = _rule(request, is_default)
        if rule is None:
            return None
        key = (request.model, options.stream)
        with self._lock:
            entry = self._entries.get(key)
            wanted = (rule, allowed, request.release.digest)
            if entry is not None and (entry.stream.rule, entry.stream.allowed, entry.release) != wanted:
                self._end(key)
                entry = None
            if entry is None:
                digest = request.release.digest
                kept = self._kept.pop((request.model, digest, options.stream), None)
                stream = StillStream(rule, allowed, self._delta, spacing_s=self._spacing_s, kept=kept)
                entry = self._entries[key] = _Entry(stream, digest)
            self._entries.move_to_end(key)
            while len(self._entries) > self._streams:
                self._end(next(iter(self._entries)))
        return entry

    def _on_answered(self, request: Request, entry: _Entry, look: Look, answer: Answer) -> None:
        stream, name = entry.stream, _name(request.model, request.options.stream)
        with entry.lock:
            before, alarm = stream.state, stream.alarm
            try:
                stream.on_answered(look, answer)
            except UsageError as error:  # the rule does not fit what the model answers
                stream.stop(str(error))
            after, now = stream.state, stream.alarm
        if before != after:
            log.info("%s: %s; %s", name, stream.progress, stream.calibrated)
        if now != alarm:
            entry.alarmed_at = perf_counter()
            log.warning("%s: %s", name, now)
        if self._writer is not None and (before, alarm) != (after, now):
            self._writer.write_soon()
        with self._lock:
            while self._entries and sum(each.stream.held_bytes for each in self._entries.values()) > self._held_bytes:
                self._end(next(iter(self._entries)))

    def _end(self, key: tuple[str, str]) -> None:
        """Forget a stream's frames, but neither what it counted nor what it found out. The lock is held."""
        entry = self._entries.pop(key)
        model, name = key
        self._ended[model] = self._ended.get(model, StillCounts()).plus(entry.stream.counts)
        with entry.lock:
            self._kept[model, entry.release, name] = entry.stream.to_keep()
        while len(self._kept) > MAX_STATES:
            del self._kept[next(iter(self._kept))]

    def _states(self) -> States:
        """All states that are kept, those in use last."""
        with self._lock:
            states, entries = dict(self._kept), list(self._entries.items())
        for (model, name), entry in entries:
            with entry.lock:
                states[model, entry.release, name] = entry.stream.to_keep()
        return states


def _rule(request: Request, is_default: bool) -> AnswerRule | None:
    """What an answer of the model is; None where it is not said and the stream did not ask for repeated answers."""
    outputs = request.release.outputs
    if request.options.answer:
        return parse_answer_rule(request.options.answer, outputs)
    rule = request.release.answer_rule
    if rule is None and not is_default:
        raise UsageError(
            f"when do two answers of {request.model} differ? Say so with edgesplit_answer: class:OUTPUT, boxes:LAYOUT"
            " or close:0.01"
        )
    return rule


def _unaudited(request: Request, entry: _Entry, look: Look) -> Answer:
    """The repeated answer in place of an audit that failed: the frame is still, so it does not need the model."""
    with entry.lock:
        entry.stream.on_unaudited()
        entry.stream.on_repeated()
    return _repeated(request, look)


def _repeated(request: Request, look: Look) -> Answer:
    """The answer that the frame repeats, with a report of its own."""
    if look.repeats is None:
        raise ValueError("the frame is not still")
    earlier, now = look.repeats, perf_counter()
    report = earlier.answer.report
    repeated = Report(
        release=report.release, row=report.row, split_after=report.split_after, emulated=report.emulated,
        repeated_age_s=max(LEAST_AGE_S, now - earlier.at), latency_s=now - request.began, variant=report.variant,
        accuracy=report.accuracy, score=report.score, escalated=report.escalated, unsure=report.unsure,
        reason=f"the frame differs by {look.distance:.2%}, less than {look.threshold:.2%}: its answer is repeated",
    )  # fmt: skip
    return Answer(earlier.answer.outputs, repeated)


def _name(model: str, stream: str) -> str:
    return f"stream {stream[:40]!r} of {model}" if stream else f"frames of {model}"
