"""Finishes a request whose rest goes to the cloud: sends it, hedges, and takes the first who arrives.

Promises: an answer or a typed error before the request's deadline, whatever cloud, link, runtime and threads do. The
loser is cancelled and counted. When a hedge may begin is `hedging`'s, how the cloud is doing `cloud`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import inf
from secrets import token_hex
from time import perf_counter

from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, InferenceFailed, LinkError, UsageError
from edgesplit.observability import phases
from edgesplit.offload_client.pool import RemoteAnswer, RemoteFailure, ask
from edgesplit.oip import protocol as oip
from edgesplit.oip.options import Hedge
from edgesplit.oip.report import Report
from edgesplit.plan import Conditions
from edgesplit.release import boundary_codecs
from edgesplit.runtime import Tensor, Timing
from edgesplit.runtime.emulated import wait_out
from edgesplit_agent.offload.foreign_server import coding_of
from edgesplit_agent.offload.target import OVERDUE_S, Cloud
from edgesplit_agent.policy.hedge_budget import Ledger, cost_of, moments, radio_joules, watts_of
from edgesplit_agent.policy.hedge_timing import LEAST_S, tail_s
from edgesplit_agent.serving.device_queue import Processor, Withdrawn
from edgesplit_agent.serving.local_executor import Device
from edgesplit_agent.serving.race_state import Encoded, Race, TailDone, TailFailed
from edgesplit_agent.serving.request import Answer, Expected, Request
from edgesplit_agent.serving.request_trace import DECODE, ENCODE, QUEUE, TAIL_QUEUE
from edgesplit_agent.serving.thread_pool import Crew

log = logging.getLogger(__name__)


class Finishing:
    """Thread-safe; one for all requests and all clouds."""

    def __init__(
        self,
        device_class: str,
        device: Device,
        processor: Processor,
        tails: Crew,
        *,
        asking: Crew,
        ledger: Ledger,
        hedge: Hedge,
        margin_s: float,
    ) -> None:
        self._device_class = device_class
        self._device = device
        self._processor = processor
        self._tails = tails
        self._asking = asking
        self._ledger = ledger
        self._hedge: Hedge = hedge
        self._margin_s = margin_s

    def finish(
        self, request: Request, expected: Expected, live: Mapping[str, Tensor], now: Conditions, cloud: Cloud
    ) -> Answer:
        """The answer, from the cloud or from here. LinkError, DeadlineExceeded, InferenceFailed, UsageError."""
        encoded = self._encode(request, expected, live)
        tail = request.release.tail(expected.row)
        race = Race(request, expected, live, encoded, request.deadline - self._margin_s / 2, tail)
        try:
            self._ask(race, cloud)
            self._set_moments(race, now, cloud)
            return self._first(race, now, cloud)
        finally:
            race.over = True
            self._processor.withdraw(request.place)
            race.call.drop()

    # Beginning

    def _encode(self, request: Request, expected: Expected, live: Mapping[str, Tensor]) -> Encoded:
        """The request's body, each tensor by its codec. An emulated device takes its own time to make it."""
        row, release = expected.row, request.release
        private = set(row.sends) & set(release.plan.never_leaves)
        if private:  # the rows were sifted when the release was loaded; this is where bytes would leave
            raise UsageError(f"{sorted(private)} may not leave this device")
        start = perf_counter()
        name = oip.remote_name(release.digest, self._device_class, row.name)
        sends = boundary_codecs.encode_all({tensor: live[tensor] for tensor in row.sends}, row.codecs)
        own_id = (
            f"{request.id}~{token_hex(4)}"  # an id may come again with other tensors: a replay of its answer must not
        )
        asked = ask(
            name, own_id, sends, release.receives(row), left_s=request.left_s,
            coding=coding_of(row, release.plan), planned_s=row.decode_s + row.remote_s,
        )  # fmt: skip
        if release.emulated:
            wait_out(start, row.encode_s)
        request.course.timeline.add(ENCODE, start, perf_counter())
        return Encoded(asked, perf_counter() - start)

    def _ask(self, race: Race, cloud: Cloud) -> None:
        """Send it, on a thread of its own."""
        timeout_s = max(0.01, race.request.left_s)

        def exchange() -> None:
            outcome: RemoteAnswer | RemoteFailure = RemoteFailure("link", "the thread that asked the cloud died")
            try:
                with race.request.course.offloading(race.request.id) as told:
                    outcome = cloud.ask(race.encoded.asked, race.call, timeout_s)
                    cloud.went_further(race.expected.row, outcome)
                    told(outcome)
            finally:
                race.put(outcome)

        if not self._asking.start(exchange):
            race.put(RemoteFailure("link", "no thread is free to ask the cloud"))

    def _set_moments(self, race: Race, now: Conditions, cloud: Cloud) -> None:
        """When to doubt the cloud, and when the tail may begin."""
        release, row = race.request.release, race.expected.row
        handshake_s = 0.0 if cloud.is_warm else 3 * now.link.rtt_s
        predicted_s = race.expected.remote_s + handshake_s
        race.doubt_at = race.began + max(LEAST_S, 3 * predicted_s)
        race.overdue_at = race.began + max(OVERDUE_S, 3 * predicted_s)
        if race.tail is None:
            return
        seconds = tail_s(race.tail, release.measured_s, release.plan.slice_s, now.device_slowdown)
        mode = race.request.wishes.hedge or self._hedge
        when = moments(mode, race.request.left_s, seconds, predicted_s, self._margin_s, race.expected.early_s)
        present = perf_counter()
        race.by_choice, race.by_need = present + when.by_choice, present + when.by_need
        local = release.plan.local
        alone_s = tail_s(local.device if local else (), release.measured_s, release.plan.slice_s, now.device_slowdown)
        self._ledger.asked(race.request.model, cost_of(alone_s, release.plan))
        log.debug("row %s: the cloud should take %.3f s, the tail %.3f s", row.name, predicted_s, seconds)

    # The race

    def _first(self, race: Race, now: Conditions, cloud: Cloud) -> Answer:
        """Wait for whoever comes first, and look up at each moment."""
        while True:
            arrival = race.next()
            if isinstance(arrival, RemoteAnswer):
                return self._cloud_wins(race, arrival)
            if isinstance(arrival, TailDone):
                return self._device_wins(race, arrival, now, cloud)
            if isinstance(arrival, RemoteFailure):
                race.failure = arrival
                self._begin_tail(race)
            elif isinstance(arrival, TailFailed):
                race.tail_state, race.tail_error = "failed", arrival.error
            else:
                self._look_up(race, cloud)
            if race.is_lost:
                raise _no_means(race)
            if perf_counter() >= race.end:
                raise self._out_of_time(race, cloud)

    def _look_up(self, race: Race, cloud: Cloud) -> None:
        """A moment has come."""
        present = perf_counter()
        if present >= race.by_need:
            self._begin_tail(race)
        if present >= race.by_choice:
            race.by_choice = inf
            if self._may_hedge(race):
                self._ledger.count(by_choice=1)
                race.by_plan = race.expected.early_s is not None and race.tail_state == "ready"
                self._begin_tail(race)
        if present >= race.doubt_at:
            race.doubt_at = inf
            if race.failure is None:
                cloud.doubt(race.waited_s, race.encoded.asked.up_bytes if race.expected.early_s is None else 0)
        if present >= race.overdue_at:
            race.overdue_at = inf
            if race.failure is None:
                cloud.overdue(race.waited_s)
                if not cloud.breaker.lets_through:
                    self._begin_tail(race)

    def _may_hedge(self, race: Race) -> bool:
        """Whether an early hedge is affordable, and takes nobody's turn."""
        release = race.request.release
        mode = race.request.wishes.hedge or self._hedge
        if mode == "always" or race.expected.race_cost is not None:
            return True
        seconds = tail_s(race.tail or (), release.measured_s, release.plan.slice_s, 1.0)
        if not self._processor.is_wanted and self._ledger.allows(race.request.model, cost_of(seconds, release.plan)):
            return True
        self._ledger.count(held_back=1)
        return False

    def _begin_tail(self, race: Race) -> None:
        """Let the device finish it too, if it can and does not already."""
        race.by_choice = race.by_need = inf
        if race.tail_state != "ready":
            return
        race.tail_state, race.hedged = "running", race.failure is None
        race.alone_from = perf_counter()
        if race.hedged:
            self._ledger.count(hedges=1)
        if not self._tails.start(lambda: self._run_tail(race)):
            race.put(TailFailed(Busy("no thread is free to finish it here")))

    def _run_tail(self, race: Race) -> None:
        """On a thread of its own: finish alone, slice by slice, unless the cloud is quicker after all."""
        live: Mapping[str, Tensor] = race.live
        timing = Timing()
        error: EdgeError = InferenceFailed("the thread that finished it here died")
        done = False
        try:
            for name in race.tail or ():
                if race.over:
                    return
                live = self._device.run(race.request, [name], live, timing)
            done = True
        except Withdrawn:
            return
        except Exception as raised:
            if not isinstance(raised, EdgeError):
                log.exception("the local tail failed")
            error = raised if isinstance(raised, EdgeError) else InferenceFailed(f"the local tail failed: {raised}")
        finally:
            self._account(race, timing)
            race.put(TailDone(live, timing) if done else TailFailed(error))

    def _account(self, race: Race, timing: Timing) -> None:
        """What a hedge has cost, and what of it was for nothing."""
        if not race.hedged:
            return
        plan, sending = race.request.release.plan, race.expected.race_cost
        self._ledger.spent(race.request.model, cost_of(timing.total_s, plan) if sending is None else sending)
        if race.over and sending is None:
            self._ledger.count(wasted_s=timing.total_s, wasted_j=timing.total_s * (watts_of(plan) or 0.0))

    # The end

    def _cloud_wins(self, race: Race, arrival: RemoteAnswer) -> Answer:
        race.over = True
        if race.hedged:
            self._ledger.count(cloud_won=1, cancelled=race.tail_state == "running")
        return finished(race.request, race.expected, race.live, race, arrival)

    def _device_wins(self, race: Race, arrival: TailDone, now: Conditions, cloud: Cloud) -> Answer:
        if race.failure is None:
            self._give_up(race, cloud)
            sent_j = radio_joules(race.expected.row, now, race.request.release.plan) or 0.0
            self._ledger.count(device_won=1, cancelled=1, wasted_j=sent_j)
        timing = race.request.timing
        race.request.release.learn(arrival.timing)
        timing.seconds.update(arrival.timing.seconds)
        timing.late += arrival.timing.late
        race.tail_s = arrival.timing.total_s
        return finished(race.request, race.expected, arrival.live, race)

    def _give_up(self, race: Race, cloud: Cloud) -> None:
        """Nobody waits for the cloud's answer any more: close its connection, and remember it if it was slow."""
        race.call.drop()
        late = race.doubt_at == inf  # that moment has passed
        (cloud.gave_up if late else cloud.outrun)(race.encoded.asked.up_bytes, race.waited_s)

    def _out_of_time(self, race: Race, cloud: Cloud) -> EdgeError:
        if race.failure is None:
            self._give_up(race, cloud)
        if race.tail_state == "none":
            return DeadlineExceeded("the cloud did not answer before the deadline, and the plan has no fallback")
        return DeadlineExceeded("neither the cloud nor the device was done before the deadline")


def _no_means(race: Race) -> EdgeError:
    """Cloud and device are both out of it."""
    if race.tail_error is not None:
        return race.tail_error
    failure = race.failure
    assert failure is not None
    if failure.cause == "timeout":
        return DeadlineExceeded("the cloud did not answer before the deadline, and the plan has no fallback")
    return LinkError(f"the cloud did not answer ({failure.cause}: {failure.text}), and the plan has no fallback")


def finished(
    request: Request,
    expected: Expected,
    live: Mapping[str, Tensor],
    race: Race | None = None,
    cloud: RemoteAnswer | None = None,
) -> Answer:
    """The answer, if it is whole and in time. InferenceFailed, DeadlineExceeded."""
    outputs = {**live, **(cloud.outputs if cloud else {})}
    missing = [spec.name for spec in request.release.outputs if spec.name not in outputs]
    if missing:
        raise InferenceFailed(f"no output {missing[0]!r} came of the row {expected.row.name!r}")
    if request.left_s <= 0:
        raise DeadlineExceeded("the answer was ready only after the deadline")
    wanted = {spec.name: outputs[spec.name] for spec in request.release.outputs}
    return Answer(wanted, _report(request, expected, race, cloud))


def _report(request: Request, expected: Expected, race: Race | None, cloud: RemoteAnswer | None) -> Report:
    row = expected.row
    alone = race is not None and cloud is None
    outrun = race is not None and alone and race.is_outrun
    seconds = request.course.timeline.seconds()
    remote = cloud.phases if cloud else {}
    return Report(
        release=request.release.digest,
        row=row.name,
        after=row.after,
        fallback=alone and not outrun,
        cause=race.cause if race is not None and alone and not outrun else expected.cause,
        raced=row.name if outrun else "",
        hedged=race is not None and race.hedged,
        emulated=request.release.emulated,
        late=request.timing.late > 0,
        latency_s=perf_counter() - request.began,
        predicted_s=expected.latency_s,
        queue_s=seconds.get(QUEUE, 0.0) + (seconds.get(TAIL_QUEUE, 0.0) if alone else 0.0),
        device_s=request.timing.total_s,
        decode_s=seconds.get(DECODE, 0.0),
        tail_s=race.tail_s if race else 0.0,
        waited_s=race.alone_from - race.began if race and alone else 0.0,
        encode_s=race.encoded.seconds if race else 0.0,
        link_s=cloud.link_s if cloud else 0.0,
        remote_s=cloud.server_s if cloud else 0.0,
        remote_queue_s=remote.get(phases.QUEUE, 0.0),
        remote_decode_s=remote.get(phases.DECODE, 0.0),
        remote_load_s=remote.get(phases.LOAD, 0.0),
        remote_encode_s=remote.get(phases.ENCODE, 0.0),
        answer_decode_s=cloud.decode_s if cloud else 0.0,
        trace_id=request.course.trace_id,
        hop_s=cloud.hop_s if cloud else 0.0,
        hop_server_s=cloud.hop_server_s if cloud else 0.0,
        hop_cause=cloud.hop_cause if cloud else "",
        up_bytes=race.encoded.asked.up_bytes if race else 0,
        down_bytes=cloud.down_bytes if cloud else 0,
    )
