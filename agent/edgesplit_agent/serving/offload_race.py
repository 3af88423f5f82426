"""The offload race: sends the rest of a request to the offload target, hedges with the local tail, and takes the first
answer.

Guarantees an answer or a typed error before the request's deadline, whatever target, link, runtime and threads do. The
loser is cancelled and counted. When a hedge may start is computed in `policy.hedge_budget` and `policy.hedge_timing`;
the health of the target is kept in `offload.target`. See docs/decisions/0006-answering.md and
0022-never-without-an-answer.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from secrets import token_hex
from time import perf_counter

from edgesplit import variant_choice
from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, InferenceFailed, LinkError, UsageError
from edgesplit.observability import phases
from edgesplit.offload_client.pool import OffloadAnswer, OffloadFailure, encode_offload_request
from edgesplit.oip import protocol as oip
from edgesplit.oip.options import Hedge
from edgesplit.oip.report import Report
from edgesplit.plan import Conditions, Row
from edgesplit.release import boundary_codecs
from edgesplit.runtime import Tensor, Timing
from edgesplit.runtime.emulated import sleep_until_elapsed
from edgesplit_agent.offload.foreign_server import coding_of
from edgesplit_agent.offload.target import OffloadTarget
from edgesplit_agent.policy.hedge_budget import HedgeBudget, busy_watts, hedge_schedule, processor_cost, radio_joules
from edgesplit_agent.policy.hedge_timing import slices_duration_s
from edgesplit_agent.serving.device_queue import DeviceQueue, Withdrawn
from edgesplit_agent.serving.local_executor import LocalExecutor
from edgesplit_agent.serving.race_state import Encoded, RaceState, TailDone, TailFailed
from edgesplit_agent.serving.request import Answer, Prediction, Request
from edgesplit_agent.serving.request_trace import DECODE, ENCODE, QUEUE, TAIL_QUEUE
from edgesplit_agent.serving.thread_pool import BoundedThreads

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OffloadRace:
    """Runs the races of all requests against all offload targets. Thread-safe."""

    device_class: str
    executor: LocalExecutor
    queue: DeviceQueue
    tail_threads: BoundedThreads
    offload_threads: BoundedThreads
    budget: HedgeBudget
    hedge: Hedge
    margin_s: float

    def finish(
        self,
        request: Request,
        prediction: Prediction,
        live: Mapping[str, Tensor],
        conditions: Conditions,
        target: OffloadTarget,
    ) -> Answer:
        """The answer, from the target or from the local tail. Raises LinkError, DeadlineExceeded, InferenceFailed,
        UsageError."""
        encoded = self._encode(request, prediction, live)
        tail = request.release.local_remainder(prediction.row, prediction.finish)
        race = RaceState(request, prediction, live, encoded, request.deadline - self.margin_s / 2, tail)
        try:
            self._send(race, target)
            self._schedule(race, conditions, target)
            return self._first_answer(race, conditions, target)
        finally:
            # However the race ended: stop the tail before its next slice, cancel its wait for the processor, and drop
            # the connection of an offload that is still in flight.
            race.is_over = True
            self.queue.withdraw(request.queue_entry)
            race.call.cancel()

    # Start: encode, send, set the timers

    def _encode(self, request: Request, prediction: Prediction, live: Mapping[str, Tensor]) -> Encoded:
        """Encode the request body, each tensor by its codec. An emulated device takes its own time for it."""
        row, release = prediction.row, request.release
        private = set(row.sends) & set(release.plan.private_tensors)
        if private:  # rows were filtered when the release was loaded; this is the last check before bytes leave
            raise UsageError(f"{sorted(private)} may not leave this device")
        start = perf_counter()
        name = oip.remote_name(release.digest, self.device_class, row.name)
        sends = boundary_codecs.encode_tensors({tensor: live[tensor] for tensor in row.sends}, row.codecs, row.clips)
        # An id may come again with other tensors: the random suffix keeps an old answer from being replayed for it.
        own_id = f"{request.id}~{token_hex(4)}"
        offload_request = encode_offload_request(
            name, own_id, sends, release.receives(row), left_s=request.left_s,
            coding=coding_of(row, release.plan), planned_s=row.decode_s + row.remote_s,
        )  # fmt: skip
        if release.emulated:
            sleep_until_elapsed(start, row.encode_s)
        request.trace.timeline.add(ENCODE, start, perf_counter())
        return Encoded(offload_request, perf_counter() - start)

    def _send(self, race: RaceState, target: OffloadTarget) -> None:
        """Send the request on a thread of its own; its outcome arrives in the race in every case."""
        timeout_s = max(0.01, race.request.left_s)

        def exchange() -> None:
            # Delivered if the code below raises: an arrival comes in every case, or the race would wait until its
            # deadline.
            outcome: OffloadAnswer | OffloadFailure = OffloadFailure("link", "the thread of the offload request failed")
            try:
                with race.request.trace.offloading(race.request.id) as record_outcome:
                    outcome = target.ask(race.encoded.request, race.call, timeout_s)
                    target.on_further_hop(race.prediction.row, outcome)
                    record_outcome(outcome)
            finally:
                race.put(outcome)

        if not self.offload_threads.start(exchange):
            race.put(OffloadFailure("link", "no thread is free for the offload request"))

    def _schedule(self, race: RaceState, conditions: Conditions, target: OffloadTarget) -> None:
        """Set the race's timers: when the target counts as slow and as overdue, and when the local tail may or must
        start."""
        release, row = race.request.release, race.prediction.row
        # A cold connection needs TCP and TLS handshakes first: three round trips are allowed for them.
        handshake_s = 0.0 if target.is_warm else 3 * conditions.link.rtt_s
        predicted_s = race.prediction.remote_s + handshake_s
        # Late by the same factor as `hedge_timing` uses: three times the prediction, and never sooner than its minimum.
        race.slow_at = race.began + max(target.timeouts.slow_s, 3 * predicted_s)
        race.overdue_at = race.began + max(target.timeouts.overdue_s, 3 * predicted_s)
        if race.tail is None:  # no local tail: its timers stay infinite
            return
        slowdown = conditions.device_slowdown
        tail_s = slices_duration_s(race.tail, release.measured_s, release.plan.slice_s, slowdown)
        mode = self._hedge_mode(race)
        left_s, early_s = max(0.0, race.request.allowed_s), race.prediction.early_s
        schedule = hedge_schedule(mode, left_s, tail_s, predicted_s, self.margin_s, early_s)
        now_s = perf_counter()
        race.optional_hedge_at, race.forced_hedge_at = now_s + schedule.optional_s, now_s + schedule.forced_s
        finish = race.prediction.finish
        if mode != "always" and variant_choice.is_less_accurate(finish, row):
            # The more accurate answer is worth waiting for until the last moment.
            race.holds_until = now_s + left_s - self.margin_s / 2
        slices = finish.device if finish else ()
        alone_s = slices_duration_s(slices, release.measured_s, release.plan.slice_s, slowdown)
        self.budget.credit(race.request.model, processor_cost(alone_s, release.plan))
        log.debug("row %s: the cloud should take %.3f s, the tail %.3f s", row.name, predicted_s, tail_s)

    def _hedge_mode(self, race: RaceState) -> Hedge:
        """When the tail may start. One that would give a less accurate answer starts only when the deadline demands it,
        unless the application asks for it always."""
        mode = race.request.options.hedge or self.hedge
        is_weaker = variant_choice.is_less_accurate(race.prediction.finish, race.prediction.row)
        return "never" if is_weaker and mode == "auto" else mode

    # The race: arrivals and timers

    def _first_answer(self, race: RaceState, conditions: Conditions, target: OffloadTarget) -> Answer:
        """Wait for the first answer, and act whenever a timer fires."""
        while True:
            arrival = race.next()
            if isinstance(arrival, OffloadAnswer):
                return self._on_target_won(race, arrival)
            if isinstance(arrival, TailDone):
                race.held_answer, race.deliver_held_at = arrival, race.holds_until
            elif isinstance(arrival, OffloadFailure):  # no hedge any more but the fallback: start it now
                race.failure = arrival
                self._start_tail(race)
            elif isinstance(arrival, TailFailed):
                race.tail_state, race.tail_error = "failed", arrival.error
            else:
                self._on_timer(race, target)
            if race.held_answer is not None and (race.failure or perf_counter() >= race.deliver_held_at):
                return self._on_device_won(race, race.held_answer, conditions, target)
            if race.is_lost:
                raise _both_failed(race)
            if perf_counter() >= race.give_up_at:
                raise self._deadline_error(race, target)

    def _on_timer(self, race: RaceState, target: OffloadTarget) -> None:
        """Handle all timers that have fired."""
        now = perf_counter()
        # Forced hedge: the deadline would be missed otherwise. Costs play no part.
        if now >= race.forced_hedge_at:
            self._start_tail(race)
        # Optional hedge: asked once; if the budget refuses, only the deadline or a failure starts the tail.
        if now >= race.optional_hedge_at:
            race.optional_hedge_at = inf
            if self._may_hedge(race):
                self.budget.count(by_choice=1)
                race.is_planned_hedge = race.prediction.early_s is not None and race.tail_state == "ready"
                self._start_tail(race)
        # Slow: the target is pinged. Without an early hedge the wait also bounds the link's rate now, for the next
        # request; with one, the end of the race does (`_cancel_offload`).
        if now >= race.slow_at:
            race.slow_at = inf
            if race.failure is None:
                target.on_slow(race.waited_s, race.encoded.request.up_bytes if race.prediction.early_s is None else 0)
        # Overdue: if that opens the breaker the target is dead, and waiting longer is pointless.
        if now >= race.overdue_at:
            race.overdue_at = inf
            if race.failure is None:
                target.on_overdue(race.waited_s)
                if not target.breaker.is_allowing:
                    self._start_tail(race)

    def _may_hedge(self, race: RaceState) -> bool:
        """Whether an optional hedge is affordable and delays no other request."""
        release = race.request.release
        mode = self._hedge_mode(race)
        # In a race that the device would have answered alone its work is free; sending was charged when it was chosen.
        if mode == "always" or race.prediction.race_cost is not None:
            return True
        tail_seconds = slices_duration_s(race.tail or (), release.measured_s, release.plan.slice_s, 1.0)
        # A second chance for this request must not delay the first of another.
        cost = processor_cost(tail_seconds, release.plan)
        if not self.queue.has_waiting and self.budget.allows(race.request.model, cost):
            return True
        self.budget.count(held_back=1)
        return False

    def _start_tail(self, race: RaceState) -> None:
        """Start the local tail, if it is possible and not started yet."""
        race.optional_hedge_at = race.forced_hedge_at = inf  # neither timer fires twice
        if race.tail_state != "ready":
            return
        race.tail_state, race.hedged = "running", race.failure is None
        race.tail_started_at = perf_counter()
        if race.hedged:
            self.budget.count(hedges=1)
        if not self.tail_threads.start(lambda: self._run_tail(race)):
            race.put(TailFailed(Busy("no thread is free for the local tail")))

    def _run_tail(self, race: RaceState) -> None:
        """Body of the tail thread: run the remaining slices one by one until the race is over."""
        live: Mapping[str, Tensor] = race.live
        timing = Timing()
        error: EdgeError = InferenceFailed("the thread of the local tail failed")
        done = False
        try:
            for name in race.tail or ():
                if race.is_over:  # a running slice cannot be interrupted, the next one need not start
                    return
                live = self.executor.run(race.request, [name], live, timing)
            done = True
        except Withdrawn:
            return
        except Exception as raised:
            if not isinstance(raised, EdgeError):
                log.exception("the local tail failed")
            error = raised if isinstance(raised, EdgeError) else InferenceFailed(f"the local tail failed: {raised}")
        finally:
            self._charge_hedge(race, timing)
            race.put(TailDone(live, timing) if done else TailFailed(error))

    def _charge_hedge(self, race: RaceState, timing: Timing) -> None:
        """Charge the hedge to the budget, and count what of it was wasted."""
        # A tail that replaced a failed offload is no hedge and costs the budget nothing.
        if not race.hedged:
            return
        plan, sending_cost = race.request.release.plan, race.prediction.race_cost
        cost = processor_cost(timing.total_s, plan) if sending_cost is None else sending_cost
        self.budget.debit(race.request.model, cost)
        if race.is_over and sending_cost is None:
            self.budget.count(wasted_s=timing.total_s, wasted_j=timing.total_s * (busy_watts(plan) or 0.0))

    # The end: winner, loser, answer

    def _on_target_won(self, race: RaceState, arrival: OffloadAnswer) -> Answer:
        race.is_over = True
        if race.hedged:
            self.budget.count(cloud_won=1, cancelled=race.tail_state == "running")
        return build_answer(race.request, race.prediction, race.live, race, arrival)

    def _on_device_won(
        self, race: RaceState, arrival: TailDone, conditions: Conditions, target: OffloadTarget
    ) -> Answer:
        if race.failure is None:
            self._cancel_offload(race, target)
            sent_j = radio_joules(race.prediction.row, conditions, race.request.release.plan) or 0.0
            self.budget.count(device_won=1, cancelled=1, wasted_j=sent_j)
        timing = race.request.timing
        timing.seconds.update(arrival.timing.seconds)
        timing.overruns += arrival.timing.overruns
        race.tail_s = arrival.timing.total_s
        return build_answer(race.request, race.prediction, arrival.live, race)

    def _cancel_offload(self, race: RaceState, target: OffloadTarget) -> None:
        """Cancel the offload by closing its connection, and report to the target whether it was late."""
        race.call.cancel()
        is_late = race.slow_at == inf  # the timer has fired
        (target.on_abandoned if is_late else target.on_lost_race)(race.encoded.request.up_bytes, race.waited_s)

    def _deadline_error(self, race: RaceState, target: OffloadTarget) -> EdgeError:
        if race.failure is None:
            self._cancel_offload(race, target)
        if race.tail_state == "none":
            return DeadlineExceeded("the cloud did not answer before the deadline, and the plan has no fallback")
        return DeadlineExceeded("neither the cloud nor the device finished before the deadline")


def _both_failed(race: RaceState) -> EdgeError:
    """The error when both the offload and the local tail have failed."""
    if race.tail_error is not None:
        return race.tail_error
    failure = race.failure
    assert failure is not None
    if failure.cause == "timeout":
        return DeadlineExceeded("the cloud did not answer before the deadline, and the plan has no fallback")
    return LinkError(f"the cloud did not answer ({failure.cause}: {failure.text}), and the plan has no fallback")


def build_answer(
    request: Request,
    prediction: Prediction,
    live: Mapping[str, Tensor],
    race: RaceState | None = None,
    remote: OffloadAnswer | None = None,
) -> Answer:
    """The answer, if it is complete and in time. Raises InferenceFailed, DeadlineExceeded."""
    tensors = {**live, **(remote.outputs if remote else {})}
    outputs = request.release.outputs_by(_answered_by(prediction, race, remote).variant, tensors)
    if request.left_s <= 0:
        raise DeadlineExceeded("the answer was ready only after the deadline")
    return Answer(outputs, _build_report(request, prediction, race, remote))


def _answered_by(prediction: Prediction, race: RaceState | None, remote: OffloadAnswer | None) -> Row:
    """The row whose variant gave the answer: the one that was sent, or that by which the device finished."""
    by_device = race is not None and remote is None
    return prediction.finish if by_device and prediction.finish is not None else prediction.row


def _build_report(
    request: Request, prediction: Prediction, race: RaceState | None, remote: OffloadAnswer | None
) -> Report:
    row = prediction.row
    by_device = race is not None and remote is None
    answered_by = _answered_by(prediction, race, remote)
    lost_as_planned = race is not None and by_device and race.lost_as_planned
    seconds = request.trace.timeline.seconds_by_phase()
    remote_phases = remote.phases if remote else {}
    is_accuracy = not request.release.plan.agreement_with
    return Report(
        release=request.release.digest, row=row.name, split_after=row.split_after,
        fallback=by_device and not lost_as_planned,
        cause=race.cause if race is not None and by_device and not lost_as_planned else prediction.cause,
        raced=row.name if lost_as_planned else "", hedged=race is not None and race.hedged,
        emulated=request.release.emulated, emulation_overrun=request.timing.overruns > 0,
        latency_s=perf_counter() - request.began, predicted_s=prediction.latency_s,
        queue_s=seconds.get(QUEUE, 0.0) + (seconds.get(TAIL_QUEUE, 0.0) if by_device else 0.0),
        device_s=request.timing.total_s, decode_s=seconds.get(DECODE, 0.0), local_finish_s=race.tail_s if race else 0.0,
        remote_wait_s=race.tail_started_at - race.began if race and by_device else 0.0,
        encode_s=race.encoded.seconds if race else 0.0, link_s=remote.link_s if remote else 0.0,
        remote_s=remote.server_s if remote else 0.0, remote_queue_s=remote_phases.get(phases.QUEUE, 0.0),
        remote_decode_s=remote_phases.get(phases.DECODE, 0.0), remote_load_s=remote_phases.get(phases.LOAD, 0.0),
        remote_encode_s=remote_phases.get(phases.ENCODE, 0.0), answer_decode_s=remote.decode_s if remote else 0.0,
        trace_id=request.trace.trace_id, next_tier_s=remote.hop_s if remote else 0.0,
        next_tier_server_s=remote.hop_server_s if remote else 0.0, next_tier_cause=remote.hop_cause if remote else "",
        up_bytes=race.encoded.request.up_bytes if race else 0, down_bytes=remote.down_bytes if remote else 0,
        reason=prediction.reason, variant=answered_by.variant,
        accuracy=(is_accuracy and answered_by.accuracy) or 0.0,
    )  # fmt: skip
