"""Cascades: the first variant's local row answers where it is sure, else the second variant is asked; and their audits.

A request is answered within its own deadline: the first answer is kept while the second variant is asked, and given,
marked as unsure, where that one cannot be asked in time. Audits run after the answer was given, on threads of their
own, of each cascade one at a time. What is decided is in `policy.escalation` and `policy.cascade_audit`. See
docs/decisions/0069-cascades.md. With an early exit the first variant is the model's own first layers, and the second
one all of it, which goes on behind them (0070-early-exits.md).
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any
from uuid import uuid4

import msgspec

from edgesplit.answers.answer_rule import AnswerRule, parse_answer_rule
from edgesplit.answers.comparison import answers_differ
from edgesplit.answers.score import SCORE_KINDS, UNSURE, score
from edgesplit.cascade import MOST_SCORE, format_score, score_text
from edgesplit.errors import DeadlineExceeded, EdgeError, InferenceFailed, LinkError, Unsure, UsageError
from edgesplit.lazy_import import np
from edgesplit.mqtt.messages import CascadeCounts
from edgesplit.mqtt.telemetry import ROW_REASON_CHARS
from edgesplit.oip.options import InferOptions
from edgesplit.oip.report import Report
from edgesplit.plan import Plan, Row
from edgesplit.quantities import format_percentage
from edgesplit.runtime import Tensor
from edgesplit.terminal_text import shorten
from edgesplit_agent.policy.audit_budget import AuditLimits
from edgesplit_agent.policy.cascade_audit import CascadeAudit, CascadeTotals, Draw
from edgesplit_agent.policy.escalation import (
    CascadeRows,
    cascade_rows,
    finite_score,
    may_answer_first,
    may_answer_unsure,
)
from edgesplit_agent.releases.loaded_release import LoadedRelease, rule_of_variant
from edgesplit_agent.serving.early_exit import kept_boundary
from edgesplit_agent.serving.local_executor import Live
from edgesplit_agent.serving.request import Answer, Request
from edgesplit_agent.serving.thread_pool import BoundedThreads
from edgesplit_agent.state.cascade_store import CascadeStore
from edgesplit_agent.worker.host import WorkerLost

log = logging.getLogger(__name__)

ALARM_S = 3600.0
"""Seconds for which an alarm is a condition of the device."""
STORE_S = 600.0
"""Seconds between two writes of a state to disk; one that was tightened is written at once."""
AUDIT_DEADLINE_S = 10.0
"""Deadline of an audit; no request waits for it."""
AUDIT_THREADS = 2
"""Audits of all models at a time; each cascade has one at a time."""
NOT_IN_TIME = (LinkError, DeadlineExceeded, InferenceFailed)
"""Errors of a second variant that cannot be asked, or not in time."""


@dataclass(frozen=True)
class CascadeSteps:
    """What the engine does for a cascade."""

    run_first: Callable[[Request, Row], tuple[Answer, Live]]
    """Answers by that local row, and returns all tensors too. The answer's energy is not recorded yet."""
    answer: Callable[[Request], Answer]
    """Answers by the row that is selected among `request.plan`'s."""
    answer_unseen: Callable[[Request], Answer]
    """The same for a request that no application made, and that counts as none."""
    with_energy: Callable[[Request, Row, Answer], Answer]
    """Records the energy of an answer by that row."""
    can_ask: Callable[[Request, Plan], bool]
    """Whether power and link allow an audit by one of the plan's rows."""
    after_answer: Callable[[Callable[[], None]], None]
    """Calls a function once the answer has been given."""


@dataclass(eq=False)
class _Entry:
    """The cascade of one release."""

    audit: CascadeAudit
    release: str
    """Digest of the release."""
    rule: AnswerRule | None
    """What an answer is; None where the cascade's rule does not fit the outputs: then none is sure."""
    rows_of: tuple[Plan, CascadeRows | None]
    """The rows of that plan: it is another one once the device has measured its own speed."""
    exit_slices: tuple[str, ...] = ()
    alarmed_at: float = -ALARM_S
    stored_at: float = field(default_factory=perf_counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def rows(self, plan: Plan) -> CascadeRows | None:
        """The cascade's rows in that plan."""
        if self.rows_of[0] is not plan:
            self.rows_of = (plan, cascade_rows(plan, self.exit_slices))
        return self.rows_of[1]


@dataclass(frozen=True)
class _First:
    """The first variant's answer."""

    answer: Answer
    score: float


@dataclass(frozen=True)
class _Frame:
    """A request that a cascade answers."""

    request: Request
    entry: _Entry
    rows: CascadeRows
    draw: Draw
    threshold: float


class Cascades:
    """The cascades of this device, by model. Thread-safe."""

    def __init__(
        self,
        steps: CascadeSteps,
        store: CascadeStore,
        limits: AuditLimits,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._steps = steps
        self._store = store
        self._limits = limits
        self._draw = draw
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._totals: dict[str, CascadeTotals] = {}
        self._reported: dict[str, CascadeTotals] = {}
        """Totals at the end of the last telemetry window."""
        self._threads = BoundedThreads(AUDIT_THREADS, "auditing")

    def serve(self, model: str, release: LoadedRelease) -> None:
        """Serve a model by this release from now on; its cascade, if it has one, goes on with what is on disk."""
        entry = self._new_entry(model, release)
        with self._lock:
            before = self._entries.pop(model, None)
            if entry is not None:
                self._entries[model] = entry
        self._store_states([before] if before is not None else [])

    def drop(self, model: str) -> None:
        """Serve a model no longer."""
        with self._lock:
            before = self._entries.pop(model, None)
        self._store_states([before] if before is not None else [])

    def stop(self) -> None:
        """Write what was learnt to disk."""
        self._threads.stop()
        with self._lock:
            entries = list(self._entries.values())
        self._store_states(entries)

    def answer(self, request: Request) -> Answer:
        """The answer by the release's cascade, or by the selected row where it has none or the request wants a more
        accurate variant. Raises Unsure too, where the request refuses an unsure answer."""
        entry = self._entries.get(request.model)
        if entry is None or entry.release != request.release.digest:  # the release was replaced meanwhile
            entry = self._new_entry(request.model, request.release) if request.release.plan.cascade else None
        rows = entry.rows(request.release.plan) if entry is not None else None
        if entry is None or rows is None or not may_answer_first(rows, request.options.least_accuracy):
            return self._steps.answer(request)
        frame = self._frame(request, entry, rows)
        try:
            return self._by_cascade(frame)
        except BaseException as error:
            if frame.draw == "drawn" and not isinstance(error, Unsure):
                with entry.lock:
                    entry.audit.on_lost()
            raise

    def status(self, model: str) -> dict[str, Any] | None:
        """A model's cascade for people and tools, as JSON values; None where it has none."""
        entry = self._entries.get(model)
        if entry is None:
            return None
        with entry.lock:
            audit, cascade, counts = entry.audit, entry.audit.cascade, entry.audit.totals
            share = counts.changed / counts.audited if counts.audited else None
            return {
                "first": cascade.first, "second": cascade.second, "answer": cascade.answer,
                "score": score_text(cascade),
                "threshold": audit.threshold, "planned_threshold": cascade.threshold, "escalates_all": audit.is_off,
                "allowed": cascade.changed.at_most, "promise": cascade.changed.text,
                "audit_share": cascade.audit_share, "measured": share, "alarm": audit.alarm, "sure": counts.sure,
                "escalated": counts.escalated, "unsure": counts.unsure, "audited": counts.audited,
                "changed": counts.changed, "unaudited": counts.unaudited, "alarms": counts.alarms,
                "answered": dict(counts.answered),
            }  # fmt: skip

    def thresholds(self) -> dict[str, float]:
        """The threshold in force, by model."""
        with self._lock:
            return {model: entry.audit.threshold for model, entry in self._entries.items()}

    def totals(self) -> dict[str, CascadeTotals]:
        """What was counted since the start, by model; also of models that are no longer served by a cascade."""
        with self._lock:
            return dict(self._totals)

    def close_windows(self) -> dict[str, CascadeCounts]:
        """What was counted since the last call, by model that is served by a cascade now."""
        with self._lock:
            entries = dict(self._entries)
        counts = {}
        for model, entry in entries.items():
            with entry.lock:
                before = self._reported.get(model, CascadeTotals())
                counts[model] = entry.audit.counts_since(before)
                self._reported[model] = entry.audit.totals.copy()
        return counts

    def reason(self, model: str, asked: str) -> str:
        """Why a model's requests are answered where they are. `asked` says it of those that its cascade escalates, and
        of all where it has none."""
        with self._lock:
            entry, before = self._entries.get(model), self._reported.get(model, CascadeTotals())
        if entry is None:
            return asked
        with entry.lock:
            cascade, now = entry.audit.cascade, entry.audit.totals.copy()
        sure, total = now.sure - before.sure, now.requests - before.requests
        if not total:  # nothing since the last report: what came before it
            sure, total = now.sure, now.requests
        if not total:
            return asked
        text = f"{cascade.first} on this device is sure of {format_percentage(round(sure / total, 3))} of the requests"
        rest = f", else {cascade.second} is asked: {asked}" if asked and sure < total else ""
        return shorten(text + rest, ROW_REASON_CHARS)

    def alarms(self) -> tuple[str, ...]:
        """The last alarm of each cascade that had one within `ALARM_S`, in words."""
        since = perf_counter() - ALARM_S
        with self._lock:
            entries = list(self._entries.items())
        return tuple(f"{model}: {entry.audit.alarm}" for model, entry in entries if entry.alarmed_at > since)

    def _new_entry(self, model: str, release: LoadedRelease) -> _Entry | None:
        plan = release.plan
        rows = cascade_rows(plan, release.exit_slices)
        if rows is None:
            return None
        with self._lock:
            totals = self._totals.setdefault(model, CascadeTotals())
        audit = CascadeAudit(rows.cascade, self._store.load(release.digest), totals, self._limits)
        if audit.threshold != rows.cascade.threshold:
            log.warning("%s: audits had raised the threshold to %.4g, and it stays", model, audit.threshold)
        return _Entry(audit, release.digest, _rule(release, rows), (plan, rows), release.exit_slices)

    # One request

    def _frame(self, request: Request, entry: _Entry, rows: CascadeRows) -> _Frame:
        """The frame, drawn for audit or not before anything about it is known."""
        is_audited = entry.rule is not None and not request.is_background and entry.audit.cascade.audit_share > 0
        number = self._draw() if is_audited else 1.0
        with entry.lock:
            can_ask = partial(self._steps.can_ask, request, rows.second)
            draw = entry.audit.draw(number, perf_counter(), can_ask) if is_audited else "no"
            return _Frame(request, entry, rows, draw, entry.audit.threshold)

    def _by_cascade(self, frame: _Frame) -> Answer:
        failure: InferenceFailed | None = None
        first: _First | None = None
        try:
            first = self._run_first(frame)
        except InferenceFailed as error:
            failure = error
            log.warning("%s: %s failed: %s", frame.request.model, frame.rows.cascade.first, error)
        if first is not None and _is_sure(frame, first):
            return self._on_sure(frame, first)
        try:
            answer = self._ask_second(frame)
        except NOT_IN_TIME as error:
            if first is None:
                if not isinstance(failure, WorkerLost):
                    raise failure or error from None
                first = self._run_first(frame)  # its supervisor has started another one
                if _is_sure(frame, first):
                    return self._on_sure(frame, first)
            return self._on_unsure(frame, first, error)
        return self._on_escalated(frame, first, answer)

    def _run_first(self, frame: _Frame) -> _First:
        answer, live = self._steps.run_first(frame.request, frame.rows.first)
        return _First(answer, _score(frame, live))

    def _ask_second(self, frame: _Frame) -> Answer:
        """The second variant's answer, within what is left of the request's time, or of the plan's where that is
        shorter: the first answer waits."""
        request, plan = frame.request, frame.rows.second
        whole = request.deadline
        try:
            request.variant_plan = plan
            request.deadline = min(whole, request.began + plan.deadline_s) if plan.deadline_s else whole
            return self._steps.answer(request)
        finally:
            request.variant_plan, request.deadline = None, whole

    def _on_sure(self, frame: _Frame, first: _First) -> Answer:
        entry, why = frame.entry, f"{frame.rows.cascade.first} is sure: {_score_text(frame, first)}"
        answer = self._given(frame, first, msgspec.structs.replace(first.answer.report, reason=why))
        with entry.lock:
            entry.audit.on_sure(first.score, frame.draw)
        if frame.draw == "drawn":
            outputs = _copies(answer.outputs)
            self._steps.after_answer(partial(self._start_audit, _audit_request(frame), outputs, frame))
        return answer

    def _on_escalated(self, frame: _Frame, first: _First | None, answer: Answer) -> Answer:
        name, report = frame.rows.cascade.first, answer.report
        why = f"{name} was unsure, {_score_text(frame, first)}" if first is not None else f"{name} failed"
        marked = msgspec.structs.replace(
            report, escalated=True, score=first.score if first is not None else None,
            predicted_s=report.predicted_s + _predicted_before_s(frame, first),
            reason=shorten(f"{why}; {report.reason}", ROW_REASON_CHARS),
        )  # fmt: skip
        with frame.entry.lock:
            frame.entry.audit.on_escalated()
        self._on_not_sure(frame)
        return Answer(answer.outputs, marked)

    def _on_unsure(self, frame: _Frame, first: _First, error: EdgeError) -> Answer:
        cascade, options = frame.rows.cascade, frame.request.options
        is_refused = options.refuse_unsure or not may_answer_unsure(frame.rows, options.least_accuracy)
        why = (
            f"{cascade.first} is unsure, {_score_text(frame, first)}, and {cascade.second} could not be asked in time:"
            f" {error}"
        )
        with frame.entry.lock:
            frame.entry.audit.on_unsure(is_given=not is_refused)
        self._on_not_sure(frame)
        if is_refused:
            raise Unsure(why) from error
        reason = shorten(why, ROW_REASON_CHARS)
        return self._given(frame, first, msgspec.structs.replace(first.answer.report, unsure=True, reason=reason))

    def _given(self, frame: _Frame, first: _First, report: Report) -> Answer:
        """The first variant's answer with this report, at this moment."""
        latency_s = perf_counter() - frame.request.began
        marked = msgspec.structs.replace(report, score=first.score, latency_s=latency_s)
        return self._steps.with_energy(frame.request, frame.rows.first, Answer(first.answer.outputs, marked))

    # Audits

    def _on_not_sure(self, frame: _Frame) -> None:
        """A drawn frame was not answered surely, so it cannot have been changed."""
        if frame.draw == "drawn":
            self._steps.after_answer(partial(self._start_conclusion, frame))

    def _start_conclusion(self, frame: _Frame) -> None:
        self._start(frame.entry, partial(self._conclude, frame, False, None))

    def _start_audit(self, request: Request, outputs: Mapping[str, Tensor], frame: _Frame) -> None:
        request.release.lease()
        if not self._start(frame.entry, partial(self._audit, request, outputs, frame), is_sure=True):
            request.release.end_lease()

    def _start(self, entry: _Entry, work: Callable[[], None], is_sure: bool = False) -> bool:
        """Start the work that ends a drawn frame, on the audits' thread; where that is not free, the frame is lost for
        the test."""
        if self._threads.start(work):
            return True
        with entry.lock:
            (entry.audit.on_unaudited if is_sure else entry.audit.on_lost)()
        return False

    def _audit(self, request: Request, outputs: Mapping[str, Tensor], frame: _Frame) -> None:
        """Ask the second variant for a frame that the first one has answered."""
        differs: bool | None = None
        moved_bytes = 0
        try:
            answer = self._steps.answer_unseen(request)
            moved_bytes = answer.report.up_bytes + answer.report.down_bytes
            if frame.entry.rule is not None:
                differs = answers_differ(frame.entry.rule, outputs, answer.outputs)
        except EdgeError as error:
            log.debug("%s: a frame could not be audited: %s", request.model, error)
        finally:
            request.release.end_lease()
            if differs is None:
                with frame.entry.lock:
                    frame.entry.audit.on_unaudited(moved_bytes)
        if differs is not None:
            self._conclude(frame, differs, moved_bytes)

    def _conclude(self, frame: _Frame, differs: bool, moved_bytes: int | None) -> None:
        """Tell the test what became of a drawn frame."""
        entry, model = frame.entry, frame.request.model
        with entry.lock:
            is_alarm = entry.audit.on_outcome(differs, moved_bytes)
            if is_alarm:
                entry.alarmed_at = perf_counter()
            alarm, share = entry.audit.alarm, entry.audit.cascade.audit_share
        found = "not sure" if moved_bytes is None else "changed" if differs else "same"
        log.debug("%s: audited a frame that was drawn with probability %g: %s", model, share, found)
        if is_alarm:
            log.warning("%s: %s; frames are drawn for audit with probability %g", model, alarm, share)
        if is_alarm or perf_counter() - entry.stored_at >= STORE_S:
            self._store_states([entry])

    def _store_states(self, entries: list[_Entry]) -> None:
        for entry in entries:
            with entry.lock:
                state, entry.stored_at = entry.audit.state, perf_counter()
            if state.test.observed or state.test.alarms:
                self._store.store(entry.release, state)


def _rule(release: LoadedRelease, rows: CascadeRows) -> AnswerRule | None:
    try:
        if rows.cascade.score not in SCORE_KINDS:
            raise UsageError(f"score {rows.cascade.score[:40]!r} is none of {', '.join(SCORE_KINDS)}")
        return parse_answer_rule(rows.cascade.answer, release.outputs)
    except UsageError as error:
        log.error("%s: every answer is escalated, because the cascade does not fit: %s", release.manifest.model, error)
        return None


def _is_sure(frame: _Frame, first: _First) -> bool:
    with frame.entry.lock:
        return frame.entry.audit.is_sure(first.score)


def _score(frame: _Frame, live: Live) -> float:
    """How sure the first variant is, by its own outputs and labels: among the family's classes a background, which is
    none of them, would be missing from the sum of probabilities; and boxes below the threshold are not given."""
    cascade, manifest, rule = frame.rows.cascade, frame.request.release.manifest, frame.entry.rule
    if rule is None:
        return finite_score(UNSURE)
    variant = manifest.variant(cascade.first)
    try:
        if variant is not None and variant.answer:
            own: AnswerRule = rule_of_variant(variant)
        else:
            labels = variant.labels if variant is not None else ()
            own = msgspec.structs.replace(rule, outputs=manifest.outputs_of(cascade.first), labels=labels)
        return finite_score(score(cascade.score, own, live, cascade.score_output))  # type: ignore[arg-type]
    except UsageError as error:
        log.debug("%s: no score: %s", frame.request.model, error)
        return finite_score(UNSURE)


def _score_text(frame: _Frame, first: _First | None) -> str:
    given = f"score {format_score(first.score)}" if first is not None else "no score"
    needed = f"{format_score(frame.threshold)} needed" if frame.threshold < MOST_SCORE else "none is enough now"
    return f"{given}, {needed}"


def _predicted_before_s(frame: _Frame, first: _First | None) -> float:
    """Predicted seconds of the first answer, where they are not among those of the second one's row."""
    return first.answer.report.predicted_s if first is not None and frame.request.computed is None else 0.0


def _audit_request(frame: _Frame) -> Request:
    """The frame as a request of the audits, which goes on behind an early exit."""
    asked = frame.request
    computed = kept_boundary(asked.release, asked.computed) if asked.computed is not None else None
    inputs = _copies(asked.inputs) if computed is None else computed.live
    audit = Request(
        f"audit-{uuid4().hex}", asked.model, asked.release, inputs, perf_counter() + AUDIT_DEADLINE_S,
        asked.target, options=InferOptions(hedge="never"), is_background=True,
    )  # fmt: skip
    audit.variant_plan, audit.computed = frame.rows.second, computed
    return audit


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in memory of their own: the application may use the frame's again."""
    return {name: np.array(tensor) for name, tensor in tensors.items()}
