"""Frames that need no answer: the streams whose still frames are given their last answer, marked with its age.

A stream repeats where its requests ask for it (`edgesplit_skip_still`), or where it has a name and the operator set it.
Bounded in streams and in bytes of answers. A frame leaves the device because of this only where it would have without.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from edgesplit.answers.answer_rule import AnswerRule, infer_answer_rule, parse_answer_rule
from edgesplit.errors import DeadlineExceeded, InferenceFailed, LinkError, UsageError
from edgesplit.oip.report import Report
from edgesplit_agent.policy.frame_difference import thumbnail
from edgesplit_agent.policy.still_calibration import DELTA
from edgesplit_agent.serving.request import Answer, Request
from edgesplit_agent.serving.still_stream import Look, StillCounts, StillStream

log = logging.getLogger(__name__)

AUDIT_SHARE = 0.02
"""Probability that a frame is drawn for audit; drawn before anything about it is known."""
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
        audit_share: float = AUDIT_SHARE,
        delta: float = DELTA,
        draw: Callable[[], float] = random.random,
        streams: int = STREAMS,
        held_bytes: int = HELD_BYTES,
    ) -> None:
        """`allowed`: share of answers that may differ, for named streams that say nothing; 0: they are not repeated."""
        self._allowed = allowed
        self._audit_share = audit_share
        self._delta = delta
        self._draw = draw
        self._streams = streams
        self._held_bytes = held_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._ended: dict[str, StillCounts] = {}
        """By model: what was counted in streams that are forgotten."""

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
        draws_audit = self._draw() < self._audit_share
        with entry.lock:
            look = entry.stream.look(frame, request.began, draws_audit)
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
                "calibrated": entry.stream.calibrated, "audit_share": self._audit_share, "alarm": entry.stream.alarm,
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
                stream = StillStream(rule, allowed, self._delta)
                entry = self._entries[key] = _Entry(stream, request.release.digest)
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
            log.warning("%s: %s; frames are drawn for audit with probability %g", name, now, self._audit_share)
        with self._lock:
            while self._entries and sum(each.stream.held_bytes for each in self._entries.values()) > self._held_bytes:
                self._end(next(iter(self._entries)))

    def _end(self, key: tuple[str, str]) -> None:
        """Forget a stream but not what it counted. The lock is held."""
        counts = self._entries.pop(key).stream.counts
        self._ended[key[0]] = self._ended.get(key[0], StillCounts()).plus(counts)


def _rule(request: Request, is_default: bool) -> AnswerRule | None:
    """What an answer of the model is; None where nobody says so and the stream did not ask for repeated answers."""
    outputs = request.release.outputs
    if request.options.answer:
        return parse_answer_rule(request.options.answer, outputs)
    rule = infer_answer_rule(outputs)
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
        repeated_age_s=max(LEAST_AGE_S, now - earlier.at), latency_s=now - request.began,
        reason=f"the frame differs by {look.distance:.2%}, less than {look.threshold:.2%}: its answer is repeated",
    )  # fmt: skip
    return Answer(earlier.answer.outputs, repeated)


def _name(model: str, stream: str) -> str:
    return f"stream {stream[:40]!r} of {model}" if stream else f"frames of {model}"
