"""Replays the agent's decisions on a recorded uplink in virtual time, to compare policies.

Row selection, estimates and hedge timing are the agent's own code; the link is a trace, the times of device and server
are the plan's, requests come at a constant rate. One processor and one uplink, each first come, first served. A request
that is cancelled leaves the link at once except for `stuck_bytes`, which sockets and radio have buffered already. Only
the oracle uses the future. There is no clock and no thread: the same input gives the same results. Not replayed: pings,
and the opening of the circuit breaker.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import uplink

from edgesplit import plan as plans
from edgesplit.bandwidth_trace import UplinkTrace
from edgesplit.offload_client.circuit_breaker import CircuitBreaker
from edgesplit.plan import Plan, Power, Row
from edgesplit.variant_choice import finish_s, is_less_accurate
from edgesplit_agent.policy.hedge_budget import HedgeTokenBucket, max_sending_cost, processor_cost, sending_cost
from edgesplit_agent.policy.hedge_timing import DELIVERY_MARGIN_S, MIN_OFFLOAD_WAIT_S, offload_timeout_s
from edgesplit_agent.policy.link_estimator import LinkEstimate, is_probe_due
from edgesplit_agent.policy.row_selection import (
    HeldRow,
    RowChoice,
    SelectionContext,
    active_watts_allowed,
    hold_after,
    select_row,
)
from edgesplit_agent.power.budget import EnergyBudget
from edgesplit_agent.power.energy_model import actual_joules
from edgesplit_agent.power.mode import PERFORMANCE, PowerMode

PROBE_BYTES = 16_384
"""Size of a link probe."""
IDLE_PROBE_S = 2.0
"""Seconds without a transfer after which the link is probed."""
PROBE_TIMEOUT_S = 5.0
"""Timeout of a link probe in seconds."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Scenario of a replay: requests at a constant rate, on a device behind a recorded uplink."""

    plan: Plan
    trace: UplinkTrace
    requests: int
    period_s: float
    deadline_s: float = 2.0
    begins_s: float = 0.0
    """Start position in the trace, in seconds."""
    stuck_bytes: int = 16_384
    """Bytes of a cancelled request that are still sent."""
    slowdown: float = 1.0
    """Ratio of the device's real seconds to its planned ones."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one request."""

    row: str
    seconds: float
    """Latency in seconds."""
    joules: float
    """Energy of the device by the plan's figures; 0 where the plan has none."""
    won_by_hedge: bool = False
    """True where the device's hedge finished before the server did."""
    hedged: bool = False
    """True where the device began to compute the remote half too."""
    sent: bool = False
    """True where the request was offloaded."""
    hedge_s: float = 0.0
    """Seconds that the device computed on its hedge."""
    in_time: bool = True
    """True where the result came before the deadline."""
    answered_by: str = ""
    """Row that gave the result: `row`, or the local one by which the hedge finished; empty where there is none."""


class Policy(Protocol):
    """Selects the row of each request."""

    @property
    def is_clairvoyant(self) -> bool:
        """True where the policy uses the future, so that what it offloads needs no hedge."""
        ...

    def choose(self, scene: Scenario, world: DeviceState, at: float) -> RowChoice | None:
        """The row choice for the request that came at `at`; None where no row is possible."""
        ...


@dataclass
class DeviceState:
    """State of the device in virtual time."""

    link_estimate: LinkEstimate
    """The link estimate."""
    link_free: float = 0.0
    """Time from which the uplink is free."""
    processor_free: float = 0.0
    """Time from which the processor is free."""
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    last_sent: float = -math.inf
    held_row: HeldRow | None = None
    """The row that the agent holds, with its state."""
    energy_budget: EnergyBudget = field(default_factory=EnergyBudget)
    """The energy budget."""
    hedge_budget: HedgeTokenBucket | None = None
    """Budget for hedges that no deadline demands; None where they are not limited."""
    _order: Iterator[int] = field(default_factory=itertools.count)
    _observations: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)

    def processor_available_at(self, row: Row, at: float) -> float:
        """Time at which a request that came at `at` gets the processor; a row that begins remotely needs none."""
        return max(at, self.processor_free) if row.device_s > 0 else at

    def schedule(self, at: float, learn: Callable[[], None]) -> None:
        """Schedule an observation for the time `at`."""
        heapq.heappush(self._observations, (at, next(self._order), learn))

    def advance(self, at: float) -> None:
        """Apply the observations that are due by `at`, in order of time."""
        while self._observations and self._observations[0][0] <= at:
            heapq.heappop(self._observations)[2]()


def replay(scene: Scenario, policy: Policy) -> list[Outcome]:
    """The outcome of each request under this policy."""
    world = DeviceState(LinkEstimate.from_link(scene.plan.link), scene.begins_s, scene.begins_s)
    outcomes = []
    for number in range(scene.requests):
        at = scene.begins_s + number * scene.period_s
        _probe_if_idle(scene, world, at)
        world.advance(at)
        choice = policy.choose(scene, world, at)
        if choice is None:
            outcomes.append(Outcome("", scene.deadline_s, 0.0, in_time=False))
            continue
        outcomes.append(_run_request(scene, world, choice, at, policy.is_clairvoyant))
        _charge_budgets(scene, world, choice, outcomes[-1], at)
    return outcomes


def _charge_budgets(scene: Scenario, world: DeviceState, choice: RowChoice, outcome: Outcome, at: float) -> None:
    """Charge one request to the hedge and energy budgets, as the agent does."""
    local = scene.plan.local
    if world.hedge_budget is not None and local is not None and outcome.sent:
        now = world.link_estimate.conditions(True, at)
        spent = (
            sending_cost(choice.row, now, scene.plan)
            if choice.local_was_chosen
            else processor_cost(outcome.hedge_s, scene.plan)
        )
        world.hedge_budget = world.hedge_budget.credited(processor_cost(local.device_s, scene.plan)).debited(spent)
    if scene.plan.power is not None:
        world.energy_budget = world.energy_budget.debited(
            outcome.joules - scene.plan.power.idle_watts * outcome.seconds
        )


def _run_request(scene: Scenario, world: DeviceState, choice: RowChoice, at: float, knows: bool) -> Outcome:
    """Outcome of one request: from the device's part to the first result of server and hedge."""
    row, slowdown = choice.row, scene.slowdown
    ready = world.processor_available_at(row, at) + row.device_s * slowdown
    if row.device_s > 0:
        world.processor_free = ready
        world.schedule(ready, lambda: _observe_compute(world, row.device_s * slowdown, row.device_s, ready))
    if row.is_local:
        return _outcome(scene, row, at, ready, busy_s=row.device_s * slowdown)
    sent = ready + row.encode_s * slowdown
    world.last_sent = sent
    through, answered = _transfer_times(scene, world, row, sent)
    local = choice.finish or scene.plan.local
    if local is None:
        world.link_free = through
        _observe_result_later(scene, world, row, sent, answered)
        return _outcome(
            scene, row, at, answered, busy_s=(row.device_s + row.encode_s) * slowdown, sent=sent, ends=answered
        )
    tail_s = finish_s(row, local) * slowdown
    expected = plans.link_s(row, world.link_estimate.link) + row.decode_s + row.remote_s
    left_s = at + scene.deadline_s - sent
    wait_s = math.inf if knows else offload_timeout_s(left_s, tail_s, expected, DELIVERY_MARGIN_S, choice.early_s)
    if not knows and is_less_accurate(local, row):  # as the agent does: only the deadline starts a weaker variant
        wait_s = offload_timeout_s(left_s, tail_s, math.inf)
    doubt_s = max(MIN_OFFLOAD_WAIT_S, 3 * expected)
    if answered > sent + doubt_s and choice.early_s is None:
        world.schedule(sent + doubt_s, lambda: _observe_timeout(world, row, doubt_s, sent + doubt_s))
    hedge_starts = max(sent + wait_s, world.processor_free)
    if answered <= hedge_starts:
        world.link_free = through
        _observe_result_later(scene, world, row, sent, answered)
        return _outcome(
            scene, row, at, answered, busy_s=(row.device_s + row.encode_s) * slowdown, sent=sent, ends=answered
        )
    done = hedge_starts + tail_s
    if is_less_accurate(local, row):  # the device's answer waits for the more accurate one until the last moment
        done = max(done, at + scene.deadline_s - DELIVERY_MARGIN_S / 2)
    ends_at = min(done, answered)
    if answered <= done:
        world.link_free = through
        _observe_result_later(scene, world, row, sent, answered)
        stopped = min(_slice_end(scene, row, local, hedge_starts, answered), hedge_starts + tail_s)
    else:
        sent_bytes = uplink.bytes_between(scene.trace, max(sent, world.link_free), done)
        world.link_free = uplink.completion_time_s(
            scene.trace, max(sent, world.link_free), min(row.up_bytes, sent_bytes + scene.stuck_bytes)
        )
        world.schedule(done, lambda: _observe_timeout(world, row, done - sent, done))
        stopped = hedge_starts + tail_s
    world.processor_free = stopped
    busy_s = (row.device_s + row.encode_s) * slowdown + stopped - hedge_starts
    outcome = _outcome(scene, row, at, ends_at, busy_s=busy_s, sent=sent, ends=ends_at)
    won = done < answered
    answered_by = local.name if won else row.name
    return replace(outcome, won_by_hedge=won, hedged=True, hedge_s=stopped - hedge_starts, answered_by=answered_by)


def _transfer_times(scene: Scenario, world: DeviceState, row: Row, sent: float) -> tuple[float, float]:
    """Time at which the row's bytes are through the uplink, and time at which its result arrives."""
    through = uplink.completion_time_s(scene.trace, max(sent, world.link_free), row.up_bytes)
    down_s = row.down_bytes / scene.plan.link.down_bytes_per_s
    return through, through + scene.plan.link.rtt_s + row.decode_s + row.remote_s + row.further_links_s + down_s


def _slice_end(scene: Scenario, row: Row, local: Row, starts: float, stop: float) -> float:
    """Time at which a cancelled hedge stops: at the end of the slice that runs. The table's cuts are the ends of
    slices; another variant's hedge begins from the input."""
    begun_s = row.device_s if row.variant == local.variant else 0.0
    cuts = (other for other in scene.plan.rows if other.variant == local.variant)
    ends = sorted(other.device_s - begun_s for other in cuts if other.device_s > begun_s)
    return next((starts + end * scene.slowdown for end in ends if starts + end * scene.slowdown >= stop), stop)


def _outcome(
    scene: Scenario, row: Row, at: float, done: float, *, busy_s: float, sent: float = 0.0, ends: float = 0.0
) -> Outcome:
    power = scene.plan.power
    moving_s = max(0.0, ends - sent) if not row.is_local else 0.0
    joules = actual_joules(row, power, busy_s, done - at, moving_s) if power else 0.0
    in_time = done - at <= scene.deadline_s
    return Outcome(row.name, done - at, joules, sent=not row.is_local, in_time=in_time, answered_by=row.name)


def _observe_compute(world: DeviceState, measured_s: float, predicted_s: float, at: float) -> None:
    world.link_estimate = world.link_estimate.after_compute(measured_s, predicted_s, at)


def _observe_result_later(scene: Scenario, world: DeviceState, row: Row, sent: float, answered: float) -> None:
    link_s = answered - sent - row.decode_s - row.remote_s - row.further_links_s

    def learn() -> None:
        world.breaker = world.breaker.after_success(answered)
        world.link_estimate = world.link_estimate.after_transfer(row.up_bytes, row.down_bytes, link_s, answered)

    world.schedule(answered, learn)


def _observe_timeout(world: DeviceState, row: Row, waited_s: float, at: float) -> None:
    world.link_estimate = world.link_estimate.after_timeout(row.up_bytes, waited_s, at)


def _probe_if_idle(scene: Scenario, world: DeviceState, at: float) -> None:
    """Probe the link with `PROBE_BYTES` whenever nothing was sent for `IDLE_PROBE_S`, as the agent's link monitor
    does."""
    while is_probe_due(at, world.last_sent, IDLE_PROBE_S):
        began = max(scene.begins_s, world.last_sent + IDLE_PROBE_S)

        through = uplink.completion_time_s(scene.trace, max(began, world.link_free), PROBE_BYTES)
        ends = min(through + scene.plan.link.rtt_s, began + PROBE_TIMEOUT_S)
        answered = ends < began + PROBE_TIMEOUT_S
        world.link_free = through if answered else max(ends, world.link_free)
        world.last_sent = ends
        world.schedule(ends, partial(_observe_probe, world, ends - began, ends, answered))


def _observe_probe(world: DeviceState, took_s: float, ends: float, answered: bool) -> None:
    if answered:
        world.link_estimate = world.link_estimate.after_transfer(PROBE_BYTES, 0, took_s, ends)
    else:
        world.link_estimate = world.link_estimate.after_timeout(PROBE_BYTES, took_s, ends)


# Policies


@dataclass(frozen=True, slots=True)
class Always:
    """Policy that always uses one row, and hedges only for the deadline."""

    row: str
    is_clairvoyant: bool = False

    def choose(self, scene: Scenario, world: DeviceState, at: float) -> RowChoice | None:
        """The policy's row."""
        return RowChoice(scene.plan.row(self.row))


@dataclass(frozen=True, slots=True)
class Adaptive:
    """The agent's own row selection in a power mode, with or without a budget for hedging."""

    power_mode: PowerMode = PERFORMANCE
    hedge_ratio: float | None = None
    """Limit on early hedges, as a ratio of what computing everything locally would cost; None for no limit."""
    is_clairvoyant: bool = False

    def choose(self, scene: Scenario, world: DeviceState, at: float) -> RowChoice | None:
        """The result of the agent's `row_selection`."""
        world.energy_budget = world.energy_budget.credited(at, active_watts_allowed(scene.plan, self.power_mode))
        now = world.link_estimate.conditions(True, at)
        context = SelectionContext(
            world.link_estimate,
            at,
            may_hedge=self._may_hedge(scene, world, processor_cost(_alone_s(scene.plan), scene.plan)),
            may_race=self._may_hedge(scene, world, max_sending_cost(scene.plan, now)),
            deadline_s=scene.deadline_s,
            per_s=1.0 / scene.period_s,
            saved_j=world.energy_budget.saved_j,
        )
        choice = select_row(scene.plan, context, self.power_mode, world.held_row)
        if choice is not None:
            world.held_row = hold_after(world.held_row, choice, self.power_mode, context)
        return choice

    def _may_hedge(self, scene: Scenario, world: DeviceState, cost: float) -> bool:
        if self.hedge_ratio is None or scene.plan.local is None:
            return True
        world.hedge_budget = world.hedge_budget or HedgeTokenBucket(self.hedge_ratio).credited(
            processor_cost(_alone_s(scene.plan), scene.plan)
        )
        return world.hedge_budget.allows(cost)


def _alone_s(plan: Plan) -> float:
    return plan.local.device_s if plan.local is not None else 0.0


@dataclass(frozen=True, slots=True)
class Oracle:
    """Policy with knowledge of the trace: the row whose result comes first, or that uses the fewest joules in time."""

    objective: str = "seconds"
    """What is minimised: `seconds` or `joules`."""
    is_clairvoyant: bool = True

    def choose(self, scene: Scenario, world: DeviceState, at: float) -> RowChoice | None:
        """The best row by its real outcome, without hedging."""
        return RowChoice(min(scene.plan.rows, key=lambda row: self._price(scene, world, row, at)))

    def _price(self, scene: Scenario, world: DeviceState, row: Row, at: float) -> tuple[bool, float, float]:
        ready = world.processor_available_at(row, at) + (row.device_s + row.encode_s) * scene.slowdown
        done = ready if row.is_local else _transfer_times(scene, world, row, ready)[1]
        busy_s = (row.device_s + row.encode_s) * scene.slowdown
        joules = actual_joules(row, scene.plan.power or Power(), busy_s, done - at, done - ready)
        late = done - at > scene.deadline_s
        return (late, done, joules) if self.objective == "seconds" else (late, joules, done)


def switches(outcomes: Sequence[Outcome]) -> int:
    """Number of changes of the row from one request to the next."""
    return sum(earlier.row != later.row for earlier, later in itertools.pairwise(outcomes))
