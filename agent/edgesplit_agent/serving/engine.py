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
from time import monotonic, perf_counter

import msgspec

from edgesplit import plan
from edgesplit.client.direct.grant import Grant
from edgesplit.errors import Busy, DeadlineExceeded, InferenceFailed, LinkError, NotFound, UsageError
from edgesplit.observability import trace_context
from edgesplit.observability.tracing import TRACING_OFF, Tracer
from edgesplit.offload_client.circuit_breaker import CircuitBreaker
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.oip import protocol as oip
from edgesplit.oip.options import NONE, Hedge, InferOptions
from edgesplit.oip.report import Report
from edgesplit.plan import Conditions, Plan, Row
from edgesplit.runtime import Tensor, Timing
from edgesplit_agent.offload.target import IDLE_PROBE_S, INITIAL_LINK, OffloadTarget
from edgesplit_agent.policy.hedge_budget import HedgeBudget, max_sending_cost, processor_cost, sending_cost
from edgesplit_agent.policy.hedge_timing import DELIVERY_MARGIN_S, slices_duration_s
from edgesplit_agent.policy.row_selection import RowChoice, RowSelector, SelectionContext, select_row
from edgesplit_agent.power.energy_model import actual_joules
from edgesplit_agent.power.monitor import PowerMonitor
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.serving.deferred_accounting import DeferredAccounting
from edgesplit_agent.serving.device_queue import DeviceQueue
from edgesplit_agent.serving.direct_access import IsSettled, LaneConditions, LaneObservers, Lanes, reason_against
from edgesplit_agent.serving.idempotency import IdempotencyCache, request_key
from edgesplit_agent.serving.local_executor import Live, LocalExecutor, OnDevicePart
from edgesplit_agent.serving.offload_race import OffloadRace, build_answer
from edgesplit_agent.serving.queue_policy import TOTAL_ROOM_FACTOR
from edgesplit_agent.serving.request import Answer, Prediction, Request
from edgesplit_agent.serving.request_trace import RequestTrace
from edgesplit_agent.serving.stale_cache import StaleAnswerCache
from edgesplit_agent.serving.thread_pool import BoundedThreads
from edgesplit_agent.worker.host import WorkerLost

__all__ = [
    "DEADLINE_S",
    "INITIAL_LINK",
    "Answer",
    "Engine",
    "OnDevicePart",
    "OnResult",
    "Settings",
    "predictions",
    "suggest_models",
]

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
    margin_s: float = DELIVERY_MARGIN_S
    hedge: Hedge = "auto"
    lanes: bool = True
    """Applications may send requests to a model's worker directly where there is nothing to decide per request."""
    hedge_budget: float | None = None
    """Optional hedges may cost this ratio of answering everything locally; None: what the power mode allows."""


OnResult = Callable[[str, "Answer | Exception"], None]
"""Callback for each finished request, by model. A request answered with a stale answer counts as failed."""
OnReleaseResult = Callable[[str, str, "Answer | Exception"], None]
"""Callback for each finished request: model, digest of the release with which it began, answer or error."""
OnLaneReport = Callable[[str, LoadedRelease, Report], None]
"""Callback for each answer given over a lane: model, release, report."""
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
        on_result: OnResult | None = None,
        on_release_result: OnReleaseResult | None = None,
        on_device_part: OnDevicePart | None = None,
        client_for: OffloadClientFor | None = None,
        tracer: Tracer = TRACING_OFF,
        power: PowerMonitor | None = None,
        is_settled: IsSettled = lambda model: True,
    ) -> None:
        """`is_settled` tells whether no release of a model is on trial; the other callbacks are described at their
        types."""
        self._tracer = tracer
        self._is_settled = is_settled
        self._settings = settings or Settings()
        self._on_result = on_result or (lambda model, result: None)
        self._on_release_result = on_release_result or (lambda model, release, result: None)
        self._client_for = client_for or (lambda release: None)
        self._lock = threading.Lock()
        self._serving: dict[str, LoadedRelease] = {}
        self._power = power or PowerMonitor()
        self._selector = RowSelector(lambda: self._power.mode)
        self._started = self._stopped = False
        self._own_target = OffloadTarget(remote, self._settings.idle_probe_s)
        self._foreign_targets: dict[OffloadClient, OffloadTarget] = {}
        self._target_of: dict[LoadedRelease, OffloadTarget] = {}
        room = self._settings.in_flight
        self._queue = DeviceQueue(room)
        self._offload_threads, self._device_threads = (
            BoundedThreads(2 * TOTAL_ROOM_FACTOR * room, "asking"),
            BoundedThreads(2 * TOTAL_ROOM_FACTOR * room, "answering"),
        )
        margin_s = self._settings.margin_s
        self._executor = LocalExecutor(
            self._queue, self._device_threads, margin_s, on_device_part or (lambda release, error: None)
        )
        budget = self._settings.hedge_budget
        self._hedge_budget = HedgeBudget(lambda: self._power.mode.hedge_ratio if budget is None else budget)
        self._offload_race = OffloadRace(
            device_class, self._executor, self._queue, self._device_threads,
            offload_threads=self._offload_threads, budget=self._hedge_budget, hedge=self._settings.hedge,
            margin_s=margin_s,
        )  # fmt: skip
        self._accounting = DeferredAccounting()
        self.defer = self._accounting.defer
        """Queue an action to be run once the answer is on its way."""
        self._idempotency: IdempotencyCache[Answer] = IdempotencyCache(
            size_of=lambda answer: sum(tensor.nbytes for tensor in answer.outputs.values())
        )
        self._stale_answers = StaleAnswerCache()
        own, energy = on_device_part or (lambda release, error: None), self._power.energy
        self._lanes = Lanes(
            LaneObservers(
                self._on_lane_times, self._on_lane_answer, self._selector.record_joules, energy, own, self._accounting
            )
        )
        self._lane_watchers: tuple[OnLaneReport, ...] = ()

    # Life cycle and status

    def start(self) -> None:
        """Start watching the links."""
        with self._lock:
            self._started = True
            targets = self._targets()
        for target in targets:
            target.start()

    def stop(self) -> None:
        """End all lanes and close the offload connections; requests that wait for a target finish locally."""
        with self._lanes.changing, self._lock:
            self._lanes.end(self._serving)
            self._stopped = True
            targets = self._targets()
        for target in targets:
            target.stop()
        self._offload_threads.stop()
        self._device_threads.stop()

    def serve(self, model: str, release: LoadedRelease) -> None:
        """Serve `model` by this release from now on; requests that are running finish with theirs."""
        remote = self._client_for(release)
        with self._lanes.changing, self._lock:
            self._lanes.end(self._serving)  # first: requests that start from now on belong to the new release
            previous = self._serving.get(model)
            self._serving = {**self._serving, model: release}
            target = self._target_for(remote)
            self._target_of = {
                served: self._target_of.get(served, self._own_target) for served in self._serving.values()
            }
            self._target_of[release] = target
        self._forget_model(model)
        target.assume_link(release.plan.link)
        if previous is not None and previous is not release:
            previous.retire()

    def drop(self, model: str) -> None:
        """Stop serving `model`."""
        with self._lanes.changing, self._lock:
            self._lanes.end(self._serving)
            previous = self._serving.get(model)
            self._serving = {name: release for name, release in self._serving.items() if name != model}
            self._target_of = {
                served: target for served, target in self._target_of.items() if served in self._serving.values()
            }
        self._forget_model(model)
        if previous is not None:
            previous.retire()

    def _forget_model(self, model: str) -> None:
        """Drop all state kept for the model's previous release."""
        self._stop_unused_targets()
        self._selector.forget(model)
        self._stale_answers.forget(model)
        self._hedge_budget.forget(model)

    def open_lane(self, model: str, descriptor: int, *, shared: bool) -> Grant:
        """Grant a lane to `model` over the socket `descriptor`. Raises NotFound, UsageError, or Busy with the
        reason."""
        release, _ = self._leased(model)
        try:
            with self._lanes.changing:
                if self._serving.get(model) is not release or self._stopped:
                    raise Busy("no lane: another release takes its place")
                grant = self._lanes.open(model, release, self._lane_conditions(model), descriptor, shared=shared)
            self._lanes.collect(self.conditions.device_slowdown)
            return grant
        finally:
            release.end_lease()

    def reason_against_lane(self, model: str) -> str:
        """Why applications cannot have lanes to this model now; empty where they can."""
        release = self._serving.get(model)
        return reason_against(release, self._lane_conditions(model)) if release is not None else "it does not run here"

    def _lane_conditions(self, model: str) -> LaneConditions:
        return LaneConditions(
            allowed=self._settings.lanes,
            models=len(self._serving),
            row_in_use=self._selector.row_of(model),
            traced=self._tracer is not TRACING_OFF,
            watts=self._power.mode.watts,
            settled=self._is_settled(model),
        )

    def add_lane_watcher(self, watcher: OnLaneReport) -> None:
        """Add a callback for each answer given over a lane."""
        self._lane_watchers = (*self._lane_watchers, watcher)

    def flush_accounting(self) -> None:
        """Record everything that was answered so far; to be called before statistics are read."""
        if self._lanes.has_grants:
            self._lanes.collect(self.conditions.device_slowdown)
        self._accounting.flush()

    @property
    def serving(self) -> Mapping[str, LoadedRelease]:
        """The served releases, by model."""
        return self._serving

    def row_of(self, model: str) -> str:
        """Name of the row in use; empty before the first request."""
        return self._selector.row_of(model)

    def reason(self, model: str) -> str:
        """Why the last request did not take the fastest row; empty if it did."""
        return self._selector.reason(model)

    @property
    def conditions(self) -> Conditions:
        """Current estimates of the device, its own offload target and the link to it."""
        return self._with_clock_cap(self._own_target.conditions)

    def target_state(self, model: str) -> tuple[Conditions, CircuitBreaker]:
        """Current estimates and circuit breaker of the offload target of this model, which may be a foreign server."""
        target = self._target_of.get(self._serving[model], self._own_target)
        return self._with_clock_cap(target.conditions), target.breaker

    def _with_clock_cap(self, conditions: Conditions) -> Conditions:
        """The conditions with the clock cap applied to the device's seconds."""
        return msgspec.structs.replace(conditions, device_slowdown=conditions.device_slowdown * self._power.slowdown)

    @property
    def breaker(self) -> CircuitBreaker:
        """Circuit breaker of the device's own offload target."""
        return self._own_target.breaker

    @property
    def joined_retries(self) -> int:
        """Number of retries that received a running or finished request's answer."""
        return self._idempotency.joined

    @property
    def hedge_counts(self) -> Mapping[str, float]:
        """Hedging counters since the start, by field name of `HedgeCounts`."""
        return self._hedge_budget.counts

    @property
    def in_flight(self) -> int:
        """Number of requests in flight."""
        return self._queue.in_flight

    @property
    def dropped_frames(self) -> int:
        """Number of frames dropped for others or for lack of room, as their application requested."""
        return self._queue.dropped

    @property
    def stale_answers(self) -> int:
        """Number of stale answers returned."""
        return self._stale_answers.given

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Tensor],
        *,
        deadline_s: float = DEADLINE_S,
        request_id: str = "",
        options: InferOptions = NONE,
        defer_accounting: bool = False,
    ) -> Answer:
        """One answer. Raises UsageError, NotFound, Busy, Dropped, DeadlineExceeded, InferenceFailed or LinkError in
        time.

        `defer_accounting`: the caller calls `flush_accounting` once the answer is on its way; else it happens before
        returning.
        """
        try:
            return self._infer(model, inputs, deadline_s, request_id, options)
        finally:
            if not defer_accounting:
                self.flush_accounting()

    def _infer(
        self, model: str, inputs: Mapping[str, Tensor], deadline_s: float, request_id: str, options: InferOptions
    ) -> Answer:
        began = perf_counter()
        release, target = self._leased(model)
        try:
            oip.check_tensors(inputs, release.inputs)
            if not 0 < deadline_s <= LONGEST_DEADLINE_S:
                raise UsageError(f"a deadline of {deadline_s} s")
            request = Request(
                request_id or uuid.uuid4().hex, model, release, inputs, began + deadline_s, target,
                options=options, began=began,
            )  # fmt: skip
            if not request_id:  # cannot be retried, so it is not cached
                return self._with_stale_fallback(request)
            key = request_key(model, request_id, inputs)
            wait_s = request.left_s - self._settings.margin_s / 2
            return self._idempotency.answer(key, wait_s, lambda: self._with_stale_fallback(request))
        finally:
            release.end_lease()

    def _leased(self, model: str) -> tuple[LoadedRelease, OffloadTarget]:
        """The release that is served now, leased so that it cannot be retired, and its target; the caller gives the
        lease back.

        Raises NotFound.
        """
        with self._lock:
            release, target = self._serving.get(model), self._own_target
            if release is not None:
                target = self._target_of.get(release, target)
                release.lease()
        if release is None:
            raise NotFound(f"no model {model[:80]!r} runs here; {suggest_models(model, self._serving)}")
        return release, target

    # One request

    def _with_stale_fallback(self, request: Request) -> Answer:
        """A fresh answer or, where the application accepts it and everything else failed, the last good one."""
        stream, oldest_s = (request.model, request.options.stream), request.options.stale_ok_s
        try:
            answer = self._admit_and_run(request)
        except (LinkError, DeadlineExceeded, InferenceFailed):  # Busy is a LinkError
            stale = self._stale_answers.get(stream, perf_counter(), oldest_s) if oldest_s > 0 else None
            if stale is None or request.left_s <= 0:
                raise
            return stale
        if oldest_s > 0 and self._serving.get(request.model) is request.release:
            self._stale_answers.put(stream, answer, request.began)
        return answer

    def _admit_and_run(self, request: Request) -> Answer:
        """Admit the request to the device queue and answer it under its own trace."""
        request.trace = RequestTrace.begin(self._tracer, request.model)
        try:
            with (
                trace_context.request_context(request.trace.span.context, request.id),
                self._queue.admitted(request.queue_entry),
            ):
                answer = self._answer(request)
        except Exception as error:
            self._on_end(request, error)
            raise
        self._on_end(request, answer)
        return answer

    def _on_end(self, request: Request, result: Answer | Exception) -> None:
        """End the request's span and queue the observers' callbacks."""
        if self._tracer is not TRACING_OFF:
            self._end_trace(request, result)
        self._accounting.defer(partial(self._on_result, request.model, result))
        self._accounting.defer(partial(self._on_release_result, request.model, request.release.digest, result))

    @staticmethod
    def _end_trace(request: Request, result: Answer | Exception) -> None:
        try:
            if isinstance(result, Answer):
                request.trace.answered(result.report)
            else:
                request.trace.failed(result)
        except Exception:
            log.exception("a request's spans could not be made")

    def _answer(self, request: Request) -> Answer:
        """Answer by the selected row; if the device's part fails, by a row without one, and after a lost worker once
        more."""
        release = request.release

        def choose(seen: SelectionContext) -> RowChoice | None:
            return self._select_row(request, seen)

        try:
            return self._run_row(request, choose, preselected=self._preselected_row(request))
        except _DevicePartFailed as failure:
            log.warning("%s: the device's part failed: %s", request.model, failure.error)
            try:
                return self._run_row(request, lambda seen: _row_without_device(release.plan, seen), cause="device")
            except _NoRow:  # no row without the device: its error is the reason
                if not isinstance(failure.error, WorkerLost):
                    raise failure.error from None
        try:  # the worker was lost: its supervisor starts another one
            return self._run_row(request, choose)
        except _DevicePartFailed as again:
            raise again.error from None

    def _run_row(
        self,
        request: Request,
        select_row: Callable[[SelectionContext], RowChoice | None],
        cause: str = "",
        preselected: RowChoice | None = None,
    ) -> Answer:
        """Answer by the row that `select_row` returns, or by `preselected`. `cause`: why it is not the row selected
        first."""
        target = request.target
        choice = preselected or target.select(select_row)
        if choice is None:
            raise _NoRow("the plan has no way to answer without the cloud, and the cloud does not answer")
        conditions = self._with_clock_cap(target.conditions)
        expected = _predict(choice, request.release.plan, conditions, cause)
        if choice.row.is_local:
            return self._with_energy(
                request, choice, build_answer(request, expected, self._run_device_part(request, choice.row))
            )
        try:
            live = self._run_device_part(request, choice.row)
            answer = self._with_energy(
                request, choice, self._offload_race.finish(request, expected, live, conditions, target)
            )
            # A race as planned, whichever side won, is reported as such; a fallback stays a fallback.
            raced = choice.local_was_chosen or answer.report.raced
            return _reclassify_race(answer, choice.row, request.release.plan, conditions) if raced else answer
        finally:
            target.release()

    def _preselected_row(self, request: Request) -> RowChoice | None:
        """The local row, where the plan has no other and it is in use already; else None. Saves the selection."""
        only = request.release.only_row
        # Under a power budget each request is charged by the selector, so it cannot be skipped.
        if only is None or self._selector.row_of(request.model) != only.name or self._power.mode.watts is not None:
            return None
        return RowChoice(only)

    def _select_row(self, request: Request, measured: SelectionContext) -> RowChoice | None:
        """Select the row for this request, with what the budgets allow at this moment."""
        model, release = request.model, request.release
        context = replace(
            measured,
            may_hedge=self._may_hedge(request, self._local_cost(release)),
            may_race=self._may_hedge(request, max_sending_cost(release.plan, measured.conditions())),
            deadline_s=request.left_s,
            slowdown=self._power.slowdown,
        )
        if self._serving.get(model) is not release:  # replaced meanwhile: nothing is held for it
            return select_row(release.plan, context, self._power.mode)
        return self._selector.select(model, release.plan, context)

    def _may_hedge(self, request: Request, cost: float) -> bool:
        """Whether device and target may both work on this request, at this cost."""
        mode = request.options.hedge or self._settings.hedge
        if mode != "auto":  # the application or the operator decided
            return mode == "always"
        if request.release.plan.local is None or self._queue.has_waiting:
            return False
        return self._hedge_budget.allows(request.model, cost)

    def _local_cost(self, release: LoadedRelease) -> float:
        """Cost of answering locally alone; 0 where the plan has no local row."""
        local = release.plan.local
        if local is None:
            return 0.0
        return processor_cost(
            slices_duration_s(local.device, release.measured_s, release.plan.slice_s, 1.0), release.plan
        )

    def _with_energy(self, request: Request, choice: RowChoice, answer: Answer) -> Answer:
        """The answer with its energy in the report, which is also charged to the power budget."""
        report, plan_ = answer.report, request.release.plan
        if plan_.power is None:
            return answer
        # If the device answered, the radio may have been up all along: the target's own share is not known.
        radio_s = report.latency_s - report.encode_s if report.fallback or report.raced else report.link_s
        predicted = actual_joules(
            choice.row, plan_.power, report.device_s + report.encode_s, report.latency_s, max(0.0, radio_s)
        )
        self._selector.record_joules(predicted - plan_.power.idle_watts * report.latency_s)
        joules, basis = self._power.energy.record_answer(plan_, predicted, report.latency_s, monotonic())
        return Answer(answer.outputs, msgspec.structs.replace(report, joules=joules, joules_basis=basis))

    def _run_device_part(self, request: Request, row: Row) -> Live:
        """Run the device's part of this row; its measured times are learnt afterwards. Raises _OwnPartFailed."""
        release = request.release
        try:
            live = self._executor.run_in_time(request, release.order(row.device), request.inputs, request.timing)
        except InferenceFailed as error:
            raise _DevicePartFailed(error) from error
        self._accounting.defer(partial(self._learn, release, request.timing, self._power.slowdown))
        return live

    def _learn(self, release: LoadedRelease, timing: Timing, slowdown: float) -> None:
        """Learn the slices' measured times, and how fast the device is with its present clock cap divided out."""
        release.learn(timing)
        predicted = release.predicted_s(timing.seconds)
        # The cap is divided out: it is applied again, at its current value, by `_with_clock_cap` and `select_row`.
        measured = sum(s for name, s in timing.seconds.items() if name in release.plan.slice_s)
        for target in self._targets():
            target.on_compute(measured / slowdown, predicted)

    def _on_lane_times(self, release: LoadedRelease, timing: Timing) -> None:
        self._learn(release, timing, self._power.slowdown)

    def _on_lane_answer(self, model: str, release: LoadedRelease, report: Report) -> None:
        answer = Answer({}, report)
        self._on_result(model, answer)
        self._on_release_result(model, release.digest, answer)
        for watcher in self._lane_watchers:
            watcher(model, release, report)

    # Offload targets

    def _targets(self) -> tuple[OffloadTarget, ...]:
        return (self._own_target, *self._foreign_targets.values())

    def _target_for(self, remote: OffloadClient | None) -> OffloadTarget:
        """The target of that client, created on first use; None is the device's own. The lock is held."""
        if remote is None:
            return self._own_target
        target = self._foreign_targets.get(remote)
        if target is None:
            target = OffloadTarget(remote, self._settings.idle_probe_s)
            self._foreign_targets = {**self._foreign_targets, remote: target}
            if self._started and not self._stopped:
                target.start()
        return target

    def _stop_unused_targets(self) -> None:
        """Stop the targets that no served release names and that have no request in flight."""
        with self._lock:
            used = set(self._target_of.values())
            unused = {
                remote: target
                for remote, target in self._foreign_targets.items()
                if target not in used and not target.in_flight
            }
            self._foreign_targets = {
                remote: target for remote, target in self._foreign_targets.items() if remote not in unused
            }
        for target in unused.values():
            target.stop()


class _NoRow(LinkError):
    """No row of the plan is usable now."""


class _DevicePartFailed(Exception):
    """The device's part of the selected row failed."""

    def __init__(self, error: InferenceFailed) -> None:
        super().__init__(str(error))
        self.error = error


def _row_without_device(plan_: Plan, context: SelectionContext) -> RowChoice | None:
    """The best row without a device part, or None."""
    row = plan.best_row([row for row in plan_.rows if not row.device], context.conditions())
    return RowChoice(row) if row is not None else None


def _predict(choice: RowChoice, plan_: Plan, conditions: Conditions, cause: str) -> Prediction:
    """The plan's prediction for the selected row in current conditions."""
    row = choice.row
    sending = sending_cost(row, conditions, plan_) if choice.local_was_chosen else None
    remote_s = (
        plan.link_s(row, conditions.link)
        + plan.further_links_s(row, conditions)
        + (row.decode_s + row.remote_s) * conditions.server_load
    )
    return Prediction(row, plan.latency_s(row, conditions), remote_s, cause, sending, choice.early_s)


def _reclassify_race(answer: Answer, sent: Row, plan_: Plan, conditions: Conditions) -> Answer:
    """The answer with the report of a planned race: a win of the device is no fallback, it answered by its own row."""
    local, report = plan_.local, answer.report
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


def suggest_models(model: str, serving: Iterable[str]) -> str:
    """A hint for an unknown model name: similar names that are served, or all of them."""
    names = sorted(serving)
    similar = difflib.get_close_matches(model, names, 3)
    if similar:
        return f"did you mean {' or '.join(similar)}?"
    return f"these do: {', '.join(names)}" if names else "no model does yet: `edgectl deploy` sends one"
