"""Answers requests: admits them, chooses the row, runs the device's part, and has the rest finished.

Promises, per request id: one answer or one typed error, before the deadline, whatever cloud, link and models do. Who
waits and who gives way is `processor`'s, the race of cloud and local tail `finishing`'s, what is known of a cloud
`cloud`'s, that an id is answered once `once`'s.
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
from edgesplit.observability.tracing import OFF, Tracer
from edgesplit.offload_client.circuit_breaker import Breaker
from edgesplit.offload_client.pool import Remote
from edgesplit.oip import protocol as oip
from edgesplit.oip.options import NONE, Hedge, Wishes
from edgesplit.oip.report import Report
from edgesplit.plan import Conditions, Plan, Row
from edgesplit.runtime import Tensor, Timing
from edgesplit_agent.offload.target import IDLE_PROBE_S, WAKE_UP, Cloud
from edgesplit_agent.policy.hedge_budget import Ledger, cost_of, race_costs, sending_costs
from edgesplit_agent.policy.hedge_timing import MARGIN_S, tail_s
from edgesplit_agent.policy.row_selection import Choice, Chooser, Situation, decide
from edgesplit_agent.power.energy_model import spent_j
from edgesplit_agent.power.monitor import PowerWatch
from edgesplit_agent.releases.loaded_release import ActiveRelease
from edgesplit_agent.serving.deferred_accounting import Afterwards
from edgesplit_agent.serving.device_queue import Processor
from edgesplit_agent.serving.direct_access import Circumstances, Ears, Lanes, Settled, why_not
from edgesplit_agent.serving.idempotency import Once, key_of
from edgesplit_agent.serving.local_executor import Device, Live, OwnPart
from edgesplit_agent.serving.offload_race import Finishing, finished
from edgesplit_agent.serving.queue_policy import MODELS
from edgesplit_agent.serving.request import Answer, Expected, Request
from edgesplit_agent.serving.request_trace import Course
from edgesplit_agent.serving.stale_cache import LastGood
from edgesplit_agent.serving.thread_pool import Crew
from edgesplit_agent.worker.host import WorkerLost

__all__ = ["DEADLINE_S", "WAKE_UP", "Answer", "Engine", "Observer", "OwnPart", "Settings", "known", "predictions"]

log = logging.getLogger(__name__)

DEADLINE_S = 2.0
"""Where a request names none."""
LONGEST_DEADLINE_S = 3600.0
IN_FLIGHT = 32
"""Requests of one model that may run, wait or be away; of all together twice as many."""


@dataclass(frozen=True)
class Settings:
    """What an operator could turn."""

    in_flight: int = IN_FLIGHT
    idle_probe_s: float = IDLE_PROBE_S
    margin_s: float = MARGIN_S
    hedge: Hedge = "auto"
    lanes: bool = True
    """Applications may ask a model's worker themselves, where there is nothing to decide for each request."""
    hedge_budget: float | None = None
    """Early hedges may cost this part of what answering everything alone would cost; None: what the stance allows."""


Observer = Callable[[str, "Answer | Exception"], None]
"""Told of each finished request, by model. A request that was given a stale answer failed, for an observer."""
OutcomeOf = Callable[[str, str, "Answer | Exception"], None]
"""The same with the release that the request began with: model, release, result."""
LaneWatcher = Callable[[str, ActiveRelease, Report], None]
"""Told of each answer that a lane gave: by model and release."""
RemoteOf = Callable[[ActiveRelease], "Remote | None"]
"""The offload server of a release; None: the device's own."""


class Engine:
    """The models that this device serves. Thread-safe."""

    def __init__(
        self,
        device_class: str,
        remote: Remote | None,
        *,
        settings: Settings | None = None,
        observe: Observer | None = None,
        outcome: OutcomeOf | None = None,
        own_part: OwnPart | None = None,
        remote_of: RemoteOf | None = None,
        tracer: Tracer = OFF,
        power: PowerWatch | None = None,
        settled: Settled = lambda model: True,
    ) -> None:
        """`settled`: whether nothing is on trial for a model."""
        self._tracer = tracer
        self._settled = settled
        self._settings = settings or Settings()
        self._observer = observe or (lambda model, result: None)
        self._outcome = outcome or (lambda model, release, result: None)
        self._remote_of = remote_of or (lambda release: None)
        self._lock = threading.Lock()
        self._serving: dict[str, ActiveRelease] = {}
        self._power = power or PowerWatch()
        self._chooser = Chooser(lambda: self._power.stance)
        self._started = self._stopped = False
        self._cloud = Cloud(remote, self._settings.idle_probe_s)
        self._others: dict[Remote, Cloud] = {}
        self._cloud_of: dict[ActiveRelease, Cloud] = {}
        room = self._settings.in_flight
        self._processor = Processor(room)
        self._asking, self._running = Crew(2 * MODELS * room, "asking"), Crew(2 * MODELS * room, "answering")
        margin_s = self._settings.margin_s
        self._device = Device(self._processor, self._running, margin_s, own_part or (lambda release, error: None))
        budget = self._settings.hedge_budget
        self._ledger = Ledger(lambda: self._power.stance.hedge_part if budget is None else budget)
        self._finishing = Finishing(
            device_class, self._device, self._processor, self._running,
            asking=self._asking, ledger=self._ledger, hedge=self._settings.hedge, margin_s=margin_s,
        )  # fmt: skip
        self._afterwards = Afterwards()
        self.later = self._afterwards.later
        """What of a request is noted when its answer is on its way."""
        self._once: Once[Answer] = Once(size_of=lambda answer: sum(one.nbytes for one in answer.outputs.values()))
        self._last_good = LastGood()
        own, energy = own_part or (lambda release, error: None), self._power.ledger
        self._lanes = Lanes(
            Ears(self._learnt_by_lane, self._told_by_lane, self._chooser.spent, energy, own, self._afterwards)
        )
        self._lane_watchers: tuple[LaneWatcher, ...] = ()

    # What owners call

    def start(self) -> None:
        """Begin to watch the link."""
        with self._lock:
            self._started = True
            clouds = self._clouds()
        for cloud in clouds:
            cloud.start()

    def stop(self) -> None:
        """Close the offload connections; what waits on them finishes alone."""
        with self._lanes.changing, self._lock:
            self._lanes.end(self._serving)
            self._stopped = True
            clouds = self._clouds()
        for cloud in clouds:
            cloud.stop()
        self._asking.stop()
        self._running.stop()

    def serve(self, model: str, release: ActiveRelease) -> None:
        """Answer `model` by this release from now on; requests that run finish with theirs."""
        remote = self._remote_of(release)
        with self._lanes.changing, self._lock:
            self._lanes.end(self._serving)  # before: what begins from now on is the new one's
            before = self._serving.get(model)
            self._serving = {**self._serving, model: release}
            cloud = self._cloud_at(remote)
            self._cloud_of = {one: self._cloud_of.get(one, self._cloud) for one in self._serving.values()}
            self._cloud_of[release] = cloud
        self._forget(model)
        cloud.suppose(release.plan.link)
        if before is not None and before is not release:
            before.retire()

    def drop(self, model: str) -> None:
        """Answer `model` no more."""
        with self._lanes.changing, self._lock:
            self._lanes.end(self._serving)
            before = self._serving.get(model)
            self._serving = {name: release for name, release in self._serving.items() if name != model}
            self._cloud_of = {one: cloud for one, cloud in self._cloud_of.items() if one in self._serving.values()}
        self._forget(model)
        if before is not None:
            before.retire()

    def _forget(self, model: str) -> None:
        """What was kept of the release before."""
        self._leave_unused()
        self._chooser.forget(model)
        self._last_good.forget(model)
        self._ledger.forget(model)

    def open_lane(self, model: str, descriptor: int, *, shared: bool) -> Grant:
        """A lane to that model for whoever has the other end of this socket. NotFound; UsageError; Busy where there is
        none now, and why."""
        release, _ = self._leased(model)
        try:
            with self._lanes.changing:
                if self._serving.get(model) is not release or self._stopped:
                    raise Busy("no lane: another release takes its place")
                grant = self._lanes.open(model, release, self._circumstances(model), descriptor, shared=shared)
            self._lanes.note(self.conditions.device_slowdown)
            return grant
        finally:
            release.give_back()

    def why_no_lane(self, model: str) -> str:
        """What there is to decide for each request for that model; empty where applications may have lanes."""
        release = self._serving.get(model)
        return why_not(release, self._circumstances(model)) if release is not None else "it does not run here"

    def _circumstances(self, model: str) -> Circumstances:
        return Circumstances(
            allowed=self._settings.lanes,
            models=len(self._serving),
            row_in_use=self._chooser.row_of(model),
            traced=self._tracer is not OFF,
            watts=self._power.stance.watts,
            settled=self._settled(model),
        )

    def watch_lanes(self, watcher: LaneWatcher) -> None:
        """Have it told of each answer that a lane gave."""
        self._lane_watchers = (*self._lane_watchers, watcher)

    def catch_up(self) -> None:
        """Returns when all that was answered is noted: for whoever reads what observers know."""
        if self._lanes.were_granted:
            self._lanes.note(self.conditions.device_slowdown)
        self._afterwards.catch_up()

    @property
    def serving(self) -> Mapping[str, ActiveRelease]:
        """What is answered now, by model."""
        return self._serving

    def row_of(self, model: str) -> str:
        """The row in use, empty before the first request."""
        return self._chooser.row_of(model)

    def why(self, model: str) -> str:
        """What kept the last request from the fastest row; empty where nothing did."""
        return self._chooser.why(model)

    @property
    def conditions(self) -> Conditions:
        """What is known of the device, its own offload server and the link to it now."""
        return self._slowed(self._cloud.conditions)

    def beyond(self, model: str) -> tuple[Conditions, Breaker]:
        """The same of the server that finishes this model, which may be one that is not ours."""
        cloud = self._cloud_of.get(self._serving[model], self._cloud)
        return self._slowed(cloud.conditions), cloud.breaker

    def _slowed(self, seen: Conditions) -> Conditions:
        return msgspec.structs.replace(seen, device_slowdown=seen.device_slowdown * self._power.slowdown)

    @property
    def breaker(self) -> Breaker:
        """How the device's own offload server is doing."""
        return self._cloud.breaker

    @property
    def joined(self) -> int:
        """Retries that were given a running or finished request's answer."""
        return self._once.joined

    @property
    def hedging(self) -> Mapping[str, float]:
        """What hedging did since the start: `hedging.Counts`."""
        return self._ledger.counts

    @property
    def here(self) -> int:
        """Requests that run, wait or are away."""
        return self._processor.here

    @property
    def dropped(self) -> int:
        """Frames that gave way to others or found no place, as their application asked."""
        return self._processor.dropped

    @property
    def stale(self) -> int:
        """Stale answers given."""
        return self._last_good.given

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Tensor],
        *,
        deadline_s: float = DEADLINE_S,
        request_id: str = "",
        wishes: Wishes = NONE,
        at_leisure: bool = False,
    ) -> Answer:
        """One answer, or UsageError, NotFound, Busy, Dropped, DeadlineExceeded, InferenceFailed, LinkError in time.

        `at_leisure`: whoever asks calls `catch_up` once the answer is on its way; else it is noted before."""
        try:
            return self._infer(model, inputs, deadline_s, request_id, wishes)
        finally:
            if not at_leisure:
                self.catch_up()

    def _infer(
        self, model: str, inputs: Mapping[str, Tensor], deadline_s: float, request_id: str, wishes: Wishes
    ) -> Answer:
        began = perf_counter()
        release, cloud = self._leased(model)
        try:
            oip.check_tensors(inputs, release.inputs)
            if not 0 < deadline_s <= LONGEST_DEADLINE_S:
                raise UsageError(f"a deadline of {deadline_s} s")
            request = Request(
                request_id or uuid.uuid4().hex, model, release, inputs, began + deadline_s, cloud,
                wishes=wishes, began=began,
            )  # fmt: skip
            if not request_id:
                return self._answered(request)
            key = key_of(model, request_id, inputs)
            wait_s = request.left_s - self._settings.margin_s / 2
            return self._once.answer(key, wait_s, lambda: self._answered(request))
        finally:
            release.give_back()

    def _leased(self, model: str) -> tuple[ActiveRelease, Cloud]:
        """The release that answers now, held on to before another can take its place, and its server: the caller gives
        the release back. NotFound."""
        with self._lock:
            release, cloud = self._serving.get(model), self._cloud
            if release is not None:
                cloud = self._cloud_of.get(release, cloud)
                release.lease()
        if release is None:
            raise NotFound(f"no model {model[:80]!r} runs here; {known(model, self._serving)}")
        return release, cloud

    # One request

    def _answered(self, request: Request) -> Answer:
        """An answer, fresh or, where the application takes it so, the last good one."""
        stream, oldest_s = (request.model, request.wishes.stream), request.wishes.stale_ok_s
        try:
            answer = self._admitted(request)
        except (LinkError, DeadlineExceeded, InferenceFailed):  # Busy is a LinkError
            last = self._last_good.give(stream, perf_counter(), oldest_s) if oldest_s > 0 else None
            if last is None or request.left_s <= 0:
                raise
            return last
        if oldest_s > 0 and self._serving.get(request.model) is request.release:
            self._last_good.keep(stream, answer, request.began)
        return answer

    def _admitted(self, request: Request) -> Answer:
        request.course = Course.begin(self._tracer, request.model)
        try:
            with (
                trace_context.working_for(request.course.span.context, request.id),
                self._processor.admitted(request.place),
            ):
                answer = self._answer(request)
        except Exception as error:
            self._ended(request, error)
            raise
        self._ended(request, answer)
        return answer

    def _ended(self, request: Request, result: Answer | Exception) -> None:
        """It has its answer, or none: its span ends, and those who watch hear of it afterwards."""
        if self._tracer is not OFF:
            self._trace_ended(request, result)
        self._afterwards.later(partial(self._observer, request.model, result))
        self._afterwards.later(partial(self._outcome, request.model, request.release.digest, result))

    @staticmethod
    def _trace_ended(request: Request, result: Answer | Exception) -> None:
        try:
            if isinstance(result, Answer):
                request.course.answered(result.report)
            else:
                request.course.failed(result)
        except Exception:
            log.exception("a request's spans could not be made")

    def _answer(self, request: Request) -> Answer:
        release = request.release

        def choose(seen: Situation) -> Choice | None:
            return self._choose(request, seen)

        try:
            return self._by(request, choose, at_once=self._without_choice(request))
        except _OwnPartFailed as failure:
            log.warning("%s: the device's part failed: %s", request.model, failure.error)
            try:
                return self._by(request, lambda seen: _without_the_device(release.plan, seen), cause="device")
            except _NoRow:  # what the device said is the reason
                if not isinstance(failure.error, WorkerLost):
                    raise failure.error from None
        try:  # another worker is on its way
            return self._by(request, choose)
        except _OwnPartFailed as again:
            raise again.error from None

    def _by(
        self,
        request: Request,
        choose: Callable[[Situation], Choice | None],
        cause: str = "",
        at_once: Choice | None = None,
    ) -> Answer:
        """The answer by the row chosen, or by the one that needs no choice. `cause`: why it is not the first one."""
        cloud = request.cloud
        choice = at_once or cloud.decide(choose)
        if choice is None:
            raise _NoRow("the plan has no way to answer without the cloud, and the cloud does not answer")
        now = self._slowed(cloud.conditions)
        expected = _expected(choice, request.release.plan, now, cause)
        if choice.row.is_local:
            return self._weighed(request, choice, finished(request, expected, self._own_part(request, choice.row)))
        try:
            live = self._own_part(request, choice.row)
            answer = self._weighed(request, choice, self._finishing.finish(request, expected, live, now, cloud))
            raced = choice.alone or answer.report.raced
            return _as_planned(answer, choice.row, request.release.plan, now) if raced else answer
        finally:
            cloud.leave()

    def _without_choice(self, request: Request) -> Choice | None:
        """The device's own row, where it is all that there is, and was chosen before."""
        only = request.release.only_row
        if only is None or self._chooser.row_of(request.model) != only.name or self._power.stance.watts is not None:
            return None
        return Choice(only)

    def _choose(self, request: Request, seen: Situation) -> Choice | None:
        model, release = request.model, request.release
        situation = replace(
            seen,
            may_hedge=self._may_hedge(request, self._cost_alone(release)),
            may_race=self._may_hedge(request, sending_costs(release.plan, seen.conditions())),
            deadline_s=request.left_s,
            slowdown=self._power.slowdown,
        )
        if self._serving.get(model) is not release:  # the next request's release is another: nothing is held for it
            return decide(release.plan, situation, self._power.stance)
        return self._chooser.choose(model, release.plan, situation)

    def _may_hedge(self, request: Request, cost: float) -> bool:
        """Whether device and cloud may both work on this request, at such a cost."""
        mode = request.wishes.hedge or self._settings.hedge
        if mode != "auto":
            return mode == "always"
        if request.release.plan.local is None or self._processor.is_wanted:
            return False
        return self._ledger.allows(request.model, cost)

    def _cost_alone(self, release: ActiveRelease) -> float:
        local = release.plan.local
        if local is None:
            return 0.0
        return cost_of(tail_s(local.device, release.measured_s, release.plan.slice_s, 1.0), release.plan)

    def _weighed(self, request: Request, choice: Choice, answer: Answer) -> Answer:
        """The answer, with the joules that it took."""
        told, plan_ = answer.report, request.release.plan
        if plan_.power is None:
            return answer
        moving_s = told.latency_s - told.encode_s if told.fallback or told.raced else told.link_s
        predicted = spent_j(choice.row, plan_.power, told.device_s + told.encode_s, told.latency_s, max(0.0, moving_s))
        self._chooser.spent(predicted - plan_.power.idle_watts * told.latency_s)
        joules, basis = self._power.ledger.answered(plan_, predicted, told.latency_s, monotonic())
        return Answer(answer.outputs, msgspec.structs.replace(told, joules=joules, joules_basis=basis))

    def _own_part(self, request: Request, row: Row) -> Live:
        """What the device does first by this row; learns how fast it is beside its plan."""
        release = request.release
        try:
            live = self._device.run_in_time(request, release.order(row.device), request.inputs, request.timing)
        except InferenceFailed as error:
            raise _OwnPartFailed(error) from error
        self._afterwards.later(partial(self._learn, release, request.timing, self._power.slowdown))
        return live

    def _learn(self, release: ActiveRelease, timing: Timing, slowdown: float) -> None:
        """How fast the device was, with its clock capped so far."""
        release.learn(timing)
        predicted = release.predicted_s(timing.seconds)
        measured = sum(s for name, s in timing.seconds.items() if name in release.plan.slice_s)
        for cloud in self._clouds():
            cloud.computed(measured / slowdown, predicted)

    def _learnt_by_lane(self, release: ActiveRelease, timing: Timing) -> None:
        self._learn(release, timing, self._power.slowdown)

    def _told_by_lane(self, model: str, release: ActiveRelease, report: Report) -> None:
        answer = Answer({}, report)
        self._observer(model, answer)
        self._outcome(model, release.digest, answer)
        for watcher in self._lane_watchers:
            watcher(model, release, report)

    # Clouds

    def _clouds(self) -> tuple[Cloud, ...]:
        return (self._cloud, *self._others.values())

    def _cloud_at(self, remote: Remote | None) -> Cloud:
        """Under the lock: what is known of that server; None is the device's own."""
        if remote is None:
            return self._cloud
        cloud = self._others.get(remote)
        if cloud is None:
            cloud = Cloud(remote, self._settings.idle_probe_s)
            self._others = {**self._others, remote: cloud}
            if self._started and not self._stopped:
                cloud.start()
        return cloud

    def _leave_unused(self) -> None:
        """Forget servers that no release here names any more."""
        with self._lock:
            used = set(self._cloud_of.values())
            unused = {remote: cloud for remote, cloud in self._others.items() if cloud not in used and not cloud.out}
            self._others = {remote: cloud for remote, cloud in self._others.items() if remote not in unused}
        for cloud in unused.values():
            cloud.stop()


class _NoRow(LinkError):
    """No row is usable now."""


class _OwnPartFailed(Exception):
    """The device could not do what comes first by the row chosen."""

    def __init__(self, error: InferenceFailed) -> None:
        super().__init__(str(error))
        self.error = error


def _without_the_device(plan_: Plan, seen: Situation) -> Choice | None:
    """The best row that leaves everything to the cloud."""
    row = plan.best([row for row in plan_.rows if not row.device], seen.conditions())
    return Choice(row) if row is not None else None


def _expected(choice: Choice, plan_: Plan, now: Conditions, cause: str) -> Expected:
    row = choice.row
    sending = race_costs(row, now, plan_) if choice.alone else None
    remote_s = plan.link_s(row, now.link) + plan.beyond_s(row, now) + (row.decode_s + row.remote_s) * now.server_load
    return Expected(row, plan.latency_s(row, now), remote_s, cause, sending, choice.early_s)


def _as_planned(answer: Answer, sent: Row, plan_: Plan, now: Conditions) -> Answer:
    """A race that the device was meant to run and has won is no fallback: it answered by its own row."""
    local, told = plan_.local, answer.report
    if local is None:
        return answer
    predicted_s = min(told.predicted_s, plan.latency_s(local, now))
    if not (told.fallback or told.raced):
        return replace(answer, report=msgspec.structs.replace(told, predicted_s=predicted_s, raced=sent.name))
    as_local = msgspec.structs.replace(
        told, row=local.name, after=local.after, fallback=False, cause="", waited_s=0.0, predicted_s=predicted_s,
        raced=sent.name,
    )  # fmt: skip
    return replace(answer, report=as_local)


def predictions(plan_: Plan, now: Conditions) -> dict[str, float]:
    """Seconds that each row would take now, by name; for people."""
    return {row.name: plan.latency_s(row, now) for row in plan_.rows}


def known(model: str, serving: Iterable[str]) -> str:
    """What to ask for instead of a model that does not run here."""
    there = sorted(serving)
    near = difflib.get_close_matches(model, there, 3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"these do: {', '.join(there)}" if there else "no model does yet: `edgectl deploy` sends one"
