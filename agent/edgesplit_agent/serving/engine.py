"""The serving engine: admits requests, selects the row, runs the device's part, and has the rest offloaded.

Guarantees, per request id: one answer or one typed error, before the deadline, whatever offload target, link and models
do. The queue for the processor is in `device_queue`, the race of target and local tail in `offload_race`, the state of
a target in `offload.target`, answering each id once in `idempotency`.
"""

from __future__ import annotations

import difflib
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import TypeVar

import msgspec

from edgesplit import plan, variant_choice
from edgesplit.errors import (
    DeadlineExceeded,
    InfeasibleLimits,
    InferenceFailed,
    LinkError,
    NotFound,
    Unsure,
    UsageError,
)
from edgesplit.observability import trace_context
from edgesplit.observability.tracing import TRACING_OFF, Tracer
from edgesplit.offload_client.circuit_breaker import CircuitBreaker
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.oip import protocol as oip
from edgesplit.oip.options import NONE, Hedge, InferOptions
from edgesplit.oip.report import Report
from edgesplit.plan import Conditions, Plan, Row
from edgesplit.runtime import Tensor
from edgesplit.terminal_text import printable
from edgesplit_agent.offload.target import (
    IDLE_PROBE_S,
    INITIAL_LINK,
    TIMEOUTS,
    OffloadTarget,
    TargetSnapshot,
    TargetTimeouts,
)
from edgesplit_agent.policy.audit_budget import AUDIT_LIMITS, AuditLimits
from edgesplit_agent.policy.hedge_budget import HedgeBudget, max_sending_cost, processor_cost, sending_cost
from edgesplit_agent.policy.hedge_timing import DELIVERY_MARGIN_S, slices_duration_s
from edgesplit_agent.policy.row_reason import RowReasons
from edgesplit_agent.policy.row_selection import RowChoice, RowSelector, SelectionContext, select_row
from edgesplit_agent.policy.still_calibration import SPACING_S
from edgesplit_agent.power.energy_model import actual_joules
from edgesplit_agent.power.monitor import PowerMonitor
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.serving.accounting import RequestAccounting
from edgesplit_agent.serving.cascade import Cascades, CascadeSteps
from edgesplit_agent.serving.device_queue import DeviceQueue
from edgesplit_agent.serving.device_speed import DeviceSpeed
from edgesplit_agent.serving.direct_access import DirectAccess, IsSettled, LaneConditions
from edgesplit_agent.serving.early_exit import exit_outputs
from edgesplit_agent.serving.idempotency import IdempotencyCache, request_key
from edgesplit_agent.serving.local_executor import Live, LocalExecutor
from edgesplit_agent.serving.offload_race import OffloadRace, build_answer
from edgesplit_agent.serving.queue_policy import TOTAL_ROOM_FACTOR
from edgesplit_agent.serving.request import Answer, Computed, Prediction, Request, served_name
from edgesplit_agent.serving.request_trace import RequestTrace
from edgesplit_agent.serving.stale_cache import StaleAnswerCache
from edgesplit_agent.serving.still_frames import StillFrames
from edgesplit_agent.serving.thread_pool import BoundedThreads
from edgesplit_agent.state.cascade_store import CascadeStore
from edgesplit_agent.telemetry.request_record import RequestObserver, RequestRecord
from edgesplit_agent.worker.host import WorkerLost

__all__ = ["DEADLINE_S", "INITIAL_LINK", "Answer", "Engine", "Settings", "predictions", "suggest_models"]

log = logging.getLogger(__name__)

DEADLINE_S = 2.0
"""Deadline in seconds of a request that names none."""
LONGEST_DEADLINE_S = 3600.0
"""Longest deadline accepted, in seconds."""
IN_FLIGHT = 32
"""Default limit of requests in flight per model (running, waiting or offloaded); all models together have twice as
many."""


@dataclass(frozen=True)
class Settings:
    """Operator settings of the engine."""

    in_flight: int = IN_FLIGHT
    idle_probe_s: float = IDLE_PROBE_S
    timeouts: TargetTimeouts = TIMEOUTS
    margin_s: float = DELIVERY_MARGIN_S
    hedge: Hedge = "auto"
    lanes: bool = True
    """Applications may send requests to a model's worker directly where there is nothing to decide per request."""
    hedge_budget: float | None = None
    """Optional hedges may cost this ratio of answering everything locally; None: what the power mode allows."""
    skip_still: float = 0.0
    """Share of the answers of a named stream that may change where those of still frames are repeated; 0: none are."""
    audits: AuditLimits = AUDIT_LIMITS
    """What the audits of cascades may cost."""
    still_spacing_s: float = SPACING_S
    """Least seconds between the frames that count for that promise."""
    still_file: Path | None = None
    """Where calibrations of streams are kept; None: they end with the process."""


RowSelection = Callable[[TargetSnapshot, bool], "RowChoice | None"]
"""Selects a row for a target as it is now; True: again for the same request, because no place could be reserved."""
Observer = TypeVar("Observer", bound=RequestObserver)
OffloadClientFor = Callable[[LoadedRelease], "OffloadClient | None"]
"""The offload client for a release; None: the device's own offload target."""


class Engine:
    """Serves the models of this device. Thread-safe."""

    def __init__(
        self,
        device_class: str,
        remote: OffloadClient | None,
        *,
        settings: Settings | None = None,
        client_for: OffloadClientFor | None = None,
        tracer: Tracer = TRACING_OFF,
        power: PowerMonitor | None = None,
        is_settled: IsSettled = lambda model: True,
        cascade_store: CascadeStore | None = None,
    ) -> None:
        """`is_settled` tells whether no release of a model is on trial."""
        self._tracer = tracer
        self._is_settled = is_settled
        self._settings = settings or Settings()
        self._client_for = client_for or (lambda release: None)
        self._lock = threading.Lock()
        self._serving: dict[str, LoadedRelease] = {}
        self._power = power or PowerMonitor()
        self.selector = RowSelector(lambda: self._power.mode)
        self.reasons = RowReasons(self.selector)
        self._started = self._stopped = False
        self.own_target = OffloadTarget(remote, self._settings.idle_probe_s, self._settings.timeouts)
        self._foreign_targets: dict[OffloadClient, OffloadTarget] = {}
        self._target_of: dict[LoadedRelease, OffloadTarget] = {}
        room = self._settings.in_flight
        self.queue = DeviceQueue(room)
        self._offload_threads = BoundedThreads(2 * TOTAL_ROOM_FACTOR * room, "asking")
        self._device_threads = BoundedThreads(2 * TOTAL_ROOM_FACTOR * room, "answering")
        margin_s = self._settings.margin_s
        self._executor = LocalExecutor(self.queue, self._device_threads, margin_s, self._record_late_runs)
        budget = self._settings.hedge_budget
        self.hedge_budget = HedgeBudget(lambda: self._power.mode.hedge_ratio if budget is None else budget)
        self._offload_race = OffloadRace(
            device_class, self._executor, self.queue, self._device_threads, self._offload_threads, self.hedge_budget,
            self._settings.hedge, margin_s,
        )  # fmt: skip
        self.accounting = RequestAccounting()
        self.accounting.add(DeviceSpeed(self._targets, self._power))
        self.idempotency: IdempotencyCache[Answer] = IdempotencyCache(
            size_of=lambda answer: sum(tensor.nbytes for tensor in answer.outputs.values())
        )
        self.stale_answers = StaleAnswerCache()
        self.still_frames = StillFrames(
            self._settings.skip_still, spacing_s=self._settings.still_spacing_s, file=self._settings.still_file
        )
        steps = CascadeSteps(
            self._run_first, self._answer, self._answer_unseen, self._with_energy, self._can_audit,
            self.accounting.defer,
        )  # fmt: skip
        self.cascades = Cascades(steps, cascade_store or CascadeStore(), self._settings.audits)
        self.direct = DirectAccess(
            lambda model: self._leased(model)[0], self._lane_conditions, self.accounting, self._power.energy,
            self.selector.record_joules, lambda: self.conditions.device_slowdown,
        )  # fmt: skip

    # Life cycle and status

    def start(self) -> None:
        """Start watching the links."""
        with self._lock:
            self._started = True
            targets = self._targets()
        for target in targets:
            target.start()
        self.still_frames.start()

    def stop(self) -> None:
        """End all lanes and close the offload connections; requests that wait for a target finish locally. Every
        request that has finished is recorded."""
        with self.direct.ended(), self._lock:
            self._stopped = True
            targets = self._targets()
        for target in targets:
            target.stop()
        self._offload_threads.stop()
        self._device_threads.stop()
        self.still_frames.stop()
        self.accounting.deliver()
        self.cascades.stop()

    def serve(self, model: str, release: LoadedRelease) -> None:
        """Serve `model` by this release from now on; requests that are running finish with theirs."""
        remote = self._client_for(release)
        with self.direct.ended(), self._lock:
            previous = self._serving.get(model)
            self._serving = {**self._serving, model: release}
            target = self._target_for(remote)
            targets = self._target_of
            self._target_of = {served: targets.get(served, self.own_target) for served in self._serving.values()}
            self._target_of[release] = target
        self._forget_model(model)
        self.cascades.serve(model, release)
        target.assume_link(release.plan.link)
        if previous is not None and previous is not release:
            previous.retire()

    def drop(self, model: str) -> None:
        """Stop serving `model`."""
        with self.direct.ended(), self._lock:
            previous = self._serving.get(model)
            self._serving = {name: release for name, release in self._serving.items() if name != model}
            still_served, targets = self._serving.values(), self._target_of.items()
            self._target_of = {served: target for served, target in targets if served in still_served}
        self._forget_model(model)
        self.cascades.drop(model)
        if previous is not None:
            previous.retire()

    def _forget_model(self, model: str) -> None:
        """Drop all state kept for the model's previous release."""
        self._stop_unused_targets()
        self.selector.forget(model)
        self.stale_answers.forget(model)
        self.still_frames.forget(model)
        self.hedge_budget.forget(model)

    def _lane_conditions(self, model: str) -> LaneConditions:
        return LaneConditions(
            allowed=self._settings.lanes, models=len(self._serving), row_in_use=self.selector.row_of(model),
            traced=self._tracer is not TRACING_OFF, watts=self._power.mode.watts, settled=self._is_settled(model),
            serving=None if self._stopped else self._serving.get(model),
        )  # fmt: skip

    def observe(self, observer: Observer) -> Callable[[], Observer]:
        """Record every finished request with `observer`, which is read through the returned function: that first
        delivers the records of all requests answered so far, lanes' included."""
        self.accounting.add(observer)

        def up_to_date() -> Observer:
            self.direct.collect()
            self.accounting.deliver()
            return observer

        return up_to_date

    @property
    def serving(self) -> Mapping[str, LoadedRelease]:
        """The served releases, by model."""
        return self._serving

    @property
    def conditions(self) -> Conditions:
        """Current estimates of the device, its own offload target and the link to it."""
        return self._with_clock_cap(self.own_target.conditions)

    def target_state(self, model: str) -> tuple[Conditions, CircuitBreaker]:
        """Current estimates and circuit breaker of the offload target of this model, which may be a foreign server."""
        target = self._target_of.get(self._serving[model], self.own_target)
        return self._with_clock_cap(target.conditions), target.breaker

    def _with_clock_cap(self, conditions: Conditions) -> Conditions:
        """The conditions with the clock cap applied to the device's seconds."""
        return msgspec.structs.replace(conditions, device_slowdown=conditions.device_slowdown * self._power.slowdown)

    @property
    def breaker(self) -> CircuitBreaker:
        """Circuit breaker of the device's own offload target."""
        return self.own_target.breaker

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Tensor],
        *,
        deadline_s: float = DEADLINE_S,
        request_id: str = "",
        options: InferOptions = NONE,
        defer_accounting: bool = False,
        background: bool = False,
    ) -> Answer:
        """One answer. Raises UsageError, NotFound, Busy, Dropped, DeadlineExceeded, InferenceFailed or LinkError in
        time.

        `background`: all other requests have precedence for the device's processor. `defer_accounting`: the caller
        calls `accounting.deliver` once the answer is on its way; else, and with an error, it happens before returning.
        """
        has_answer = False
        try:
            answer = self._infer(model, inputs, deadline_s, request_id, options, background)
            has_answer = True
            return answer
        finally:
            if not (has_answer and defer_accounting):
                self.accounting.deliver()

    def _infer(
        self, model: str, inputs: Mapping[str, Tensor], deadline_s: float, request_id: str, options: InferOptions,
        background: bool,
    ) -> Answer:  # fmt: skip
        began = perf_counter()
        release, target = self._leased(model)
        model = served_name(model)
        try:
            oip.check_tensors(inputs, release.inputs)
            if not 0 < deadline_s <= LONGEST_DEADLINE_S:
                raise UsageError(f"deadline of {deadline_s} s: more than 0, at most {LONGEST_DEADLINE_S:g}")
            if options.least_accuracy > 0:
                _check_accuracy(model, release.plan, options.least_accuracy)
            request = Request(
                request_id or uuid.uuid4().hex, model, release, inputs, began + deadline_s, target,
                options=options, began=began, is_background=background,
            )  # fmt: skip
            if not request_id:  # cannot be retried, so it is not cached
                return self._answer_or_repeat(request)
            key = (*request_key(model, request_id, inputs), options.least_accuracy, options.refuse_unsure)
            wait_s = request.left_s - self._settings.margin_s / 2
            return self.idempotency.answer(key, wait_s, lambda: self._answer_or_repeat(request))
        finally:
            release.end_lease()

    def _leased(self, model: str) -> tuple[LoadedRelease, OffloadTarget]:
        """The release that is served now, leased so that it cannot be retired, and its target; the caller gives the
        lease back.

        Raises NotFound.
        """
        with self._lock:
            release = find_release(model, self._serving)
            target = self._target_of.get(release, self.own_target)
            release.lease()
        return release, target

    # One request

    def _answer_or_repeat(self, request: Request) -> Answer:
        """The stream's last answer where its frame is still, and the stream repeats answers; else a fresh one."""
        return self.still_frames.answer(request, self._with_stale_fallback)

    def _with_stale_fallback(self, request: Request) -> Answer:
        """A fresh answer or, where the application accepts it and everything else failed, the last good one."""
        stream, oldest_s = (request.model, request.options.stream), request.options.stale_ok_s
        floor = request.options.least_accuracy
        try:
            answer = self._admit_and_run(request)
        except (LinkError, DeadlineExceeded, InferenceFailed, Unsure):  # Busy is a LinkError
            stale = self.stale_answers.get(stream, perf_counter(), oldest_s) if oldest_s > 0 else None
            if stale is None or stale.report.accuracy < floor or request.left_s <= 0:
                raise
            if stale.report.unsure and request.options.refuse_unsure:
                raise
            return stale
        if oldest_s > 0 and self._serving.get(request.model) is request.release:
            self.stale_answers.put(stream, answer, request.began)
        return answer

    def _admit_and_run(self, request: Request) -> Answer:
        """Admit the request to the device queue and answer it under its own trace."""
        request.trace = RequestTrace.begin(self._tracer, request.model)
        try:
            with (
                trace_context.request_context(request.trace.span.context, request.id),
                self.queue.admitted(request.queue_entry),
            ):
                answer = self.cascades.answer(request)
        except Exception as error:
            self._on_end(request, error)
            raise
        self._on_end(request, answer.report)
        return answer

    def _on_end(self, request: Request, outcome: Report | Exception) -> None:
        """End the request's span and queue its record."""
        if self._tracer is not TRACING_OFF:
            self._end_trace(request, outcome)
        request.is_recorded = True
        timing = request.timing if request.has_device_times else None
        runs = request.take_device_runs()
        self.accounting.finished(RequestRecord(request.model, request.release, outcome, runs, timing))

    def _record_late_runs(self, request: Request) -> None:
        """Record runs that ended after the record of their request was made."""
        if runs := request.take_device_runs():
            self.accounting.finished(RequestRecord(request.model, request.release, None, runs))
            self.accounting.deliver()

    @staticmethod
    def _end_trace(request: Request, result: Report | Exception) -> None:
        try:
            if isinstance(result, Report):
                request.trace.answered(result)
            else:
                request.trace.failed(result)
        except Exception:
            log.exception("the spans of a request could not be recorded")

    # The steps of a cascade

    def _run_first(self, request: Request, row: Row) -> tuple[Answer, Live]:
        """Answer by that local row, or by the early exit up to which it runs; its energy is not recorded yet."""
        conditions = self._with_clock_cap(request.target.conditions)
        expected = _predict(RowChoice(row), request.release.plan, conditions, "", "")
        try:
            live = self._run_device_part(request, row)
        except _DevicePartFailed as failure:
            raise failure.error from None
        if request.release.exit_slices:
            request.computed = Computed(frozenset(row.device), live)
            live = {**live, **exit_outputs(request.release, live)}
        return build_answer(request, expected, live), live

    def _answer_unseen(self, request: Request) -> Answer:
        """Answer a request that no application made: it counts as none, only its runs on the device do."""
        try:
            with self.queue.admitted(request.queue_entry):
                return self._answer(request)
        finally:
            request.is_recorded = True
            timing = request.timing if request.has_device_times else None
            runs = request.take_device_runs()
            self.accounting.finished(RequestRecord(request.model, request.release, None, runs, timing))
            self.accounting.deliver()

    def _can_audit(self, request: Request, rows: Plan) -> bool:
        """Whether one of these rows may be used for an audit now: not to save energy, nor where the link is gone."""
        may_send = request.target.snapshot().is_available
        return self._power.mode.mode != "saver" and any(row.is_local or may_send for row in rows.rows)

    # The selected row

    def _answer(self, request: Request) -> Answer:
        """Answer by the selected row; if the device's part fails, by a row without one, and after a lost worker once
        more."""
        select = partial(self._select_row, request)
        try:
            return self._run_row(request, select, preselected=self._preselected_row(request))
        except _DevicePartFailed as failure:
            log.warning("%s: the device's part failed: %s", request.model, failure.error)
            try:
                return self._run_row(request, partial(_row_without_device, request), cause="device")
            except _NoRow:  # no row without the device: its error is the reason
                if not isinstance(failure.error, WorkerLost):
                    raise failure.error from None
        try:  # the worker was lost: its supervisor starts another one
            return self._run_row(request, select)
        except _DevicePartFailed as again:
            raise again.error from None

    def _run_row(
        self, request: Request, select: RowSelection, cause: str = "", preselected: RowChoice | None = None
    ) -> Answer:
        """Answer by the row that `select` returns, or by `preselected`. `cause`: why it is not the row selected
        first."""
        target, reservation, is_repeat = request.target, None, False
        while True:
            snapshot = target.snapshot()
            choice = preselected or select(snapshot, is_repeat)
            if choice is None:
                raise _NoRow(_no_row_text(request))
            if choice.row.is_local:
                break
            reservation = target.reserve()
            if reservation is not None:
                break
            # Since the snapshot the breaker opened, or other requests took the last places: select again without them.
            is_repeat = True
        conditions = self._with_clock_cap(snapshot.conditions)
        reason = self.reasons.of(request.model) if not cause else ""
        expected = _predict(choice, request.release.plan, conditions, cause, reason)
        if reservation is None:
            answer = build_answer(request, expected, self._run_device_part(request, choice.row))
            return self._with_energy(request, choice.row, answer)
        try:
            live = self._run_device_part(request, choice.row)
            answer = self._offload_race.finish(request, expected, live, conditions, target)
            answer = self._with_energy(request, choice.row, answer)
            # A race as planned, whichever side won, is reported as such; a fallback stays a fallback.
            raced = choice.local_was_chosen or answer.report.raced
            return _reclassify_race(answer, choice, conditions) if raced else answer
        finally:
            target.release(reservation)

    def _preselected_row(self, request: Request) -> RowChoice | None:
        """The local row, where the plan has no other and it is in use already; else None. Saves the selection."""
        only = request.release.only_row
        # Under a power budget each request is charged by the selector, so it cannot be skipped.
        if only is None or self.selector.row_of(request.model) != only.name or self._power.mode.watts is not None:
            return None
        return RowChoice(only)

    def _select_row(self, request: Request, snapshot: TargetSnapshot, is_repeat: bool) -> RowChoice | None:
        """Select the row for this request, with what the budgets allow at this moment."""
        model, release, rows = request.model, request.release, request.plan
        measured = _context(snapshot)
        context = replace(
            measured,
            may_hedge=self._may_hedge(request, self._local_cost(request)),
            may_race=self._may_hedge(request, max_sending_cost(rows, measured.conditions())),
            deadline_s=request.allowed_s,
            least_accuracy=request.options.least_accuracy,
            slowdown=self._power.slowdown,
        )
        if self._serving.get(model) is not release:  # replaced meanwhile: nothing is held for it
            return select_row(rows, context, self._power.mode)
        return self.selector.select(model, rows, context, is_repeat=is_repeat, layer_counts=release.layer_counts)

    def _may_hedge(self, request: Request, cost: float) -> bool:
        """Whether device and target may both work on this request, at this cost."""
        mode = request.options.hedge or self._settings.hedge
        if mode != "auto":  # the application or the operator decided
            return mode == "always"
        if request.plan.local is None or self.queue.has_waiting:
            return False
        return self.hedge_budget.allows(request.model, cost)

    def _local_cost(self, request: Request) -> float:
        """Cost of answering locally alone; 0 where the plan has no local row."""
        local, release = request.plan.local, request.release
        if local is None:
            return 0.0
        alone_s = slices_duration_s(local.device, release.measured_s, release.plan.slice_s, 1.0)
        return processor_cost(alone_s, release.plan)

    def _with_energy(self, request: Request, row: Row, answer: Answer) -> Answer:
        """The answer with its energy in the report, which is also charged to the power budget."""
        report, plan_ = answer.report, request.release.plan
        if plan_.power is None:
            return answer
        # If the device answered, the radio may have been up all along: the target's own share is not known.
        radio_s = report.latency_s - report.encode_s if report.fallback or report.raced else report.link_s
        predicted = actual_joules(
            row, plan_.power, report.device_s + report.encode_s, report.latency_s, max(0.0, radio_s)
        )
        self.selector.record_joules(predicted - plan_.power.idle_watts * report.latency_s)
        joules, basis = self._power.energy.record_answer(plan_, predicted, report.latency_s, monotonic())
        return Answer(answer.outputs, msgspec.structs.replace(report, joules=joules, joules_basis=basis))

    def _run_device_part(self, request: Request, row: Row) -> Live:
        """Run the device's part of this row, as far as it was not computed yet; its measured times are learnt
        afterwards. Raises _DevicePartFailed."""
        release, done = request.release, request.computed or Computed(frozenset(), request.inputs)
        order = release.order(set(row.device) - done.slices)
        try:
            live = self._executor.run_in_time(request, order, done.live, request.timing)
        except InferenceFailed as error:
            raise _DevicePartFailed(error) from error
        request.has_device_times = True
        return live

    # Offload targets

    def _targets(self) -> tuple[OffloadTarget, ...]:
        return (self.own_target, *self._foreign_targets.values())

    def _target_for(self, remote: OffloadClient | None) -> OffloadTarget:
        """The target of that client, created on first use; None is the device's own. The lock is held."""
        if remote is None:
            return self.own_target
        target = self._foreign_targets.get(remote)
        if target is None:
            target = OffloadTarget(remote, self._settings.idle_probe_s, self._settings.timeouts)
            self._foreign_targets = {**self._foreign_targets, remote: target}
            if self._started and not self._stopped:
                target.start()
        return target

    def _stop_unused_targets(self) -> None:
        """Stop the targets that no served release names and that have no request in flight."""
        with self._lock:
            foreign, used = self._foreign_targets, set(self._target_of.values())
            unused = {target for target in foreign.values() if target not in used and not target.in_flight}
            self._foreign_targets = {remote: target for remote, target in foreign.items() if target not in unused}
        for target in unused:
            target.stop()


class _NoRow(LinkError):
    """No row of the plan is usable now."""


class _DevicePartFailed(Exception):
    """The device's part of the selected row failed."""

    def __init__(self, error: InferenceFailed) -> None:
        super().__init__(str(error))
        self.error = error


def _context(snapshot: TargetSnapshot) -> SelectionContext:
    """The inputs of a selection that an offload target determines."""
    return SelectionContext(snapshot.estimate, snapshot.taken_at, snapshot.is_available)


def _row_without_device(request: Request, snapshot: TargetSnapshot, is_repeat: bool) -> RowChoice | None:
    """The best row without a device part, or None."""
    allowed, now = _allowed_rows(request), _context(snapshot).conditions()
    row = plan.best_row([row for row in allowed.rows if not row.device], now)
    if row is None:
        return None
    return RowChoice(row, finish=variant_choice.local_finish(allowed, row, now, request.allowed_s))


def _allowed_rows(request: Request) -> Plan:
    """The plan with only the rows that are accurate enough for the request."""
    return variant_choice.above_floor(request.plan, request.options.least_accuracy)


def _no_row_text(request: Request) -> str:
    floor = variant_choice.floor_of(request.plan, request.options.least_accuracy)
    if floor and request.plan.local is not None:
        return f"the cloud does not answer, and no variant of at least {floor:.1%} accuracy runs on this device"
    return "the plan has no fallback, and the cloud does not answer"


def _check_accuracy(model: str, plan_: Plan, least_accuracy: float) -> None:
    """InfeasibleLimits where no variant of the model is that accurate; UsageError where it is no family."""
    best = variant_choice.best_accuracy(plan_)
    if best is None:
        raise UsageError(f"{model} states no accuracy: ask for least_accuracy of a family only (edgectl family create)")
    if plan_.agreement_with:
        raise UsageError(
            f"{model}: the samples of the family have no labels, so the accuracy of its variants is not known, only how"
            f" often they agree with {plan_.agreement_with}: ask without least_accuracy"
        )
    if (best.accuracy or 0.0) < least_accuracy:
        raise InfeasibleLimits(
            f"{model}: no variant reaches an accuracy of {least_accuracy:.1%}; the best, {best.variant}, has"
            f" {best.accuracy or 0.0:.1%}"
        )


def _predict(choice: RowChoice, plan_: Plan, conditions: Conditions, cause: str, reason: str) -> Prediction:
    """The plan's prediction for the selected row in current conditions."""
    row = choice.row
    sending = sending_cost(row, conditions, plan_) if choice.local_was_chosen else None
    remote_s = (
        plan.link_s(row, conditions.link)
        + plan.further_links_s(row, conditions)
        + (row.decode_s + row.remote_s) * conditions.server_load
    )
    latency_s = plan.latency_s(row, conditions)
    return Prediction(row, latency_s, remote_s, cause, sending, choice.early_s, reason, choice.finish)


def _reclassify_race(answer: Answer, choice: RowChoice, conditions: Conditions) -> Answer:
    """The answer with the report of a planned race: a win of the device is no fallback, it answered by its own row."""
    sent, local, report = choice.row, choice.finish, answer.report
    if local is None:
        return answer
    predicted_s = min(report.predicted_s, plan.latency_s(local, conditions))
    if not (report.fallback or report.raced):  # the target won
        return replace(answer, report=msgspec.structs.replace(report, predicted_s=predicted_s, raced=sent.name))
    as_local = msgspec.structs.replace(
        report, row=local.name, split_after=local.split_after, fallback=False, cause="", remote_wait_s=0.0,
        predicted_s=predicted_s,
        raced=sent.name,
    )  # fmt: skip
    return replace(answer, report=as_local)


def predictions(plan_: Plan, now: Conditions) -> dict[str, float]:
    """Predicted seconds of each row now, by name."""
    return {row.name: plan.latency_s(row, now) for row in plan_.rows}


def find_release(reference: str, serving: Mapping[str, LoadedRelease], version: str | None = None) -> LoadedRelease:
    """The release that serves `name` or `name@version`; NotFound where the model, or that version of it, does not run
    here. `version`: the version in the request's path, which must be the same."""
    name, named_version = served_name(reference), reference.partition("@")[2]
    release = serving.get(name)
    if release is None:
        raise NotFound(f"no model {printable(reference[:80])} runs here; {suggest_models(name, serving)}")
    for wanted in (named_version, version):
        if wanted and wanted != release.version:
            other = printable(wanted[:80])
            raise NotFound(
                f"version {other} of {name} does not run here, but {name}@{release.version}: ask for {name}, or"
                f" deploy {name}@{other}"
            )
    return release


def suggest_models(model: str, serving: Iterable[str]) -> str:
    """A hint for an unknown model name: similar names that are served, or all of them."""
    names = sorted(serving)
    similar = difflib.get_close_matches(model, names, 3)
    if similar:
        return f"did you mean {' or '.join(similar)}?"
    return f"these do: {', '.join(names)}" if names else "no model does yet: `edgectl deploy` sends one"
