"""The agent's decisions on a recorded uplink, in virtual time: what would each policy have done here?

The choosing, the estimates and the patience are the agent's own code; the link is a trace, the times of device and
server are the plan's, requests come at a steady rate. One processor and one uplink, each first come, first served. What
is dropped leaves the link at once but for `stuck_bytes`, which the sockets and the radio hold already. Nothing here
knows the future but the oracle. No clock, no thread: the same input gives the same answers. Not rehearsed: pings, and
when the breaker opens.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from edgesplit import plan as plans
from edgesplit.bandwidth_trace import UplinkTrace
from edgesplit.offload_client.circuit_breaker import Breaker
from edgesplit.plan import Plan, Power, Row
from edgesplit_agent.policy.hedge_budget import Budget, cost_of, race_costs, sending_costs
from edgesplit_agent.policy.hedge_timing import LEAST_S, MARGIN_S, patience_s
from edgesplit_agent.policy.link_estimator import LinkMeter, probe_due
from edgesplit_agent.policy.row_selection import Choice, Held, Situation, decide, held_after, watts_left
from edgesplit_agent.power.budget import PowerBank
from edgesplit_agent.power.energy_model import spent_j
from edgesplit_agent.power.mode import PERFORMANCE, Stance

PROBE_BYTES = 16_384
IDLE_PROBE_S = 2.0
PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What happens: requests at a rate, on a device behind a recorded uplink."""

    plan: Plan
    trace: UplinkTrace
    requests: int
    period_s: float
    deadline_s: float = 2.0
    begins_s: float = 0.0
    """Where in the trace it starts."""
    stuck_bytes: int = 16_384
    """Of a request that was dropped: what still goes up the link."""
    slowdown: float = 1.0
    """The device's real factor on its planned seconds."""


@dataclass(frozen=True, slots=True)
class Told:
    """What became of one request."""

    row: str
    seconds: float
    """Until its answer."""
    joules: float
    """Of the device, by the plan's figures; 0 where it has none."""
    by_tail: bool = False
    """The device finished what it had sent away."""
    hedged: bool = False
    """The device began to finish beside the cloud."""
    sent: bool = False
    tail_s: float = 0.0
    """That the device worked on it beside the cloud."""
    in_time: bool = True


class Policy(Protocol):
    """How requests are answered."""

    @property
    def knows(self) -> bool:
        """It knows the future: what it sends away needs no hedge."""
        ...

    def choose(self, scene: Scene, world: World, at: float) -> Choice | None:
        """The way of the request that came at `at`; None where there is no way."""
        ...


@dataclass
class World:
    """The device as it stands in virtual time."""

    meter: LinkMeter
    link_free: float = 0.0
    processor_free: float = 0.0
    breaker: Breaker = field(default_factory=Breaker)
    last_sent: float = -math.inf
    held: Held | None = None
    bank: PowerBank = field(default_factory=PowerBank)
    budget: Budget | None = None
    """For hedges that no deadline demands; None: there is no bound."""
    _order: Iterator[int] = field(default_factory=itertools.count)
    _news: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)

    def turn(self, row: Row, at: float) -> float:
        """When a request that came at `at` has the processor; a row that begins in the cloud needs none."""
        return max(at, self.processor_free) if row.device_s > 0 else at

    def later(self, at: float, learn: Callable[[], None]) -> None:
        """Something will be known at `at`."""
        heapq.heappush(self._news, (at, next(self._order), learn))

    def until(self, at: float) -> None:
        """Learn what is known by then, in its order."""
        while self._news and self._news[0][0] <= at:
            heapq.heappop(self._news)[2]()


def rehearse(scene: Scene, policy: Policy) -> list[Told]:
    """What becomes of each request under this policy."""
    world = World(LinkMeter.of(scene.plan.link), scene.begins_s, scene.begins_s)
    told = []
    for number in range(scene.requests):
        at = scene.begins_s + number * scene.period_s
        _probe_if_idle(scene, world, at)
        world.until(at)
        choice = policy.choose(scene, world, at)
        if choice is None:
            told.append(Told("", scene.deadline_s, 0.0, in_time=False))
            continue
        told.append(_answered(scene, world, choice, at, policy.knows))
        _book(scene, world, choice, told[-1])
    return told


def _book(scene: Scene, world: World, choice: Choice, told: Told) -> None:
    """What one request leaves of the budgets, as the agent's ledger counts it."""
    local = scene.plan.local
    if world.budget is not None and local is not None and told.sent:
        now = world.meter.conditions(True)
        spent = race_costs(choice.row, now, scene.plan) if choice.alone else cost_of(told.tail_s, scene.plan)
        world.budget = world.budget.asked(cost_of(local.device_s, scene.plan)).spent(spent)
    if scene.plan.power is not None:
        world.bank = world.bank.spent(told.joules - scene.plan.power.idle_watts * told.seconds)


def _answered(scene: Scene, world: World, choice: Choice, at: float, knows: bool) -> Told:
    """One request, from the device's part to the first of both answers."""
    row, slow = choice.row, scene.slowdown
    ready = world.turn(row, at) + row.device_s * slow
    if row.device_s > 0:
        world.processor_free = ready
        world.later(ready, lambda: _computed(world, row.device_s * slow, row.device_s))
    if row.is_local:
        return _told(scene, row, at, ready, busy_s=row.device_s * slow)
    sent = ready + row.encode_s * slow
    world.last_sent = sent
    through, answered = _way(scene, world, row, sent)
    local = scene.plan.local
    if local is None:
        world.link_free = through
        _learn_answer(scene, world, row, sent, answered)
        return _told(scene, row, at, answered, busy_s=(row.device_s + row.encode_s) * slow, sent=sent, ends=answered)
    tail_s = (local.device_s - row.device_s) * slow
    expected = plans.link_s(row, world.meter.link) + row.decode_s + row.remote_s
    left_s = at + scene.deadline_s - sent
    wait_s = math.inf if knows else patience_s(left_s, tail_s, expected, MARGIN_S, choice.early_s)
    doubt_s = max(LEAST_S, 3 * expected)
    if answered > sent + doubt_s and choice.early_s is None:
        world.later(sent + doubt_s, lambda: _learn_late(world, row, doubt_s, sent + doubt_s))
    starts = max(sent + wait_s, world.processor_free)
    if answered <= starts:
        world.link_free = through
        _learn_answer(scene, world, row, sent, answered)
        return _told(scene, row, at, answered, busy_s=(row.device_s + row.encode_s) * slow, sent=sent, ends=answered)
    done = starts + tail_s
    ends = min(done, answered)
    if answered <= done:
        world.link_free = through
        _learn_answer(scene, world, row, sent, answered)
        stopped = _slice_end(scene, row, starts, answered)
    else:
        left = scene.trace.bytes_between(max(sent, world.link_free), done)
        world.link_free = scene.trace.through_at(
            max(sent, world.link_free), min(row.up_bytes, left + scene.stuck_bytes)
        )
        world.later(done, lambda: _learn_late(world, row, done - sent, done))
        stopped = done
    world.processor_free = stopped
    busy_s = (row.device_s + row.encode_s) * slow + stopped - starts
    told = _told(scene, row, at, ends, busy_s=busy_s, sent=sent, ends=ends)
    return replace(told, by_tail=done < answered, hedged=True, tail_s=stopped - starts)


def _way(scene: Scene, world: World, row: Row, sent: float) -> tuple[float, float]:
    """When its bytes are through the uplink, and when its answer is here."""
    through = scene.trace.through_at(max(sent, world.link_free), row.up_bytes)
    down_s = row.down_bytes / scene.plan.link.down_bytes_per_s
    return through, through + scene.plan.link.rtt_s + row.decode_s + row.remote_s + row.beyond_s + down_s


def _slice_end(scene: Scene, row: Row, starts: float, stop: float) -> float:
    """A tail that is called off ends with the slice that runs: the cuts of the table are the slices' ends."""
    ends = sorted(one.device_s - row.device_s for one in scene.plan.rows if one.device_s > row.device_s)
    return next((starts + end * scene.slowdown for end in ends if starts + end * scene.slowdown >= stop), stop)


def _told(
    scene: Scene, row: Row, at: float, done: float, *, busy_s: float, sent: float = 0.0, ends: float = 0.0
) -> Told:
    power = scene.plan.power
    moving_s = max(0.0, ends - sent) if not row.is_local else 0.0
    joules = spent_j(row, power, busy_s, done - at, moving_s) if power else 0.0
    return Told(row.name, done - at, joules, sent=not row.is_local, in_time=done - at <= scene.deadline_s)


def _computed(world: World, measured_s: float, predicted_s: float) -> None:
    world.meter = world.meter.computed(measured_s, predicted_s)


def _learn_answer(scene: Scene, world: World, row: Row, sent: float, answered: float) -> None:
    link_s = answered - sent - row.decode_s - row.remote_s - row.beyond_s

    def learn() -> None:
        world.breaker = world.breaker.succeeded(answered)
        world.meter = world.meter.transferred(row.up_bytes, row.down_bytes, link_s, answered)

    world.later(answered, learn)


def _learn_late(world: World, row: Row, waited_s: float, at: float) -> None:
    world.meter = world.meter.gave_up(row.up_bytes, waited_s, at)


def _probe_if_idle(scene: Scene, world: World, at: float) -> None:
    """What the agent's watcher does between requests: 16 KiB whenever nothing was sent for a while."""
    while probe_due(at, world.last_sent, IDLE_PROBE_S):
        began = max(scene.begins_s, world.last_sent + IDLE_PROBE_S)

        through = scene.trace.through_at(max(began, world.link_free), PROBE_BYTES)
        ends = min(through + scene.plan.link.rtt_s, began + PROBE_TIMEOUT_S)
        answered = ends < began + PROBE_TIMEOUT_S
        world.link_free = through if answered else max(ends, world.link_free)
        world.last_sent = ends
        world.later(ends, partial(_probed, world, ends - began, ends, answered))


def _probed(world: World, took_s: float, ends: float, answered: bool) -> None:
    if answered:
        world.meter = world.meter.transferred(PROBE_BYTES, 0, took_s, ends)
    else:
        world.meter = world.meter.gave_up(PROBE_BYTES, took_s, ends)


# Policies


@dataclass(frozen=True, slots=True)
class Always:
    """One row, whatever happens; the deadline's hedge is its only one."""

    row: str
    knows: bool = False

    def choose(self, scene: Scene, world: World, at: float) -> Choice | None:
        """That row."""
        return Choice(scene.plan.row(self.row))


@dataclass(frozen=True, slots=True)
class Adaptive:
    """The agent: its choice under a stance, with a budget for hedging or without."""

    stance: Stance = PERFORMANCE
    hedge_part: float | None = None
    """Early hedges may cost this part of what answering everything alone would; None: whatever they cost."""
    knows: bool = False

    def choose(self, scene: Scene, world: World, at: float) -> Choice | None:
        """What `choosing.decide` says."""
        world.bank = world.bank.until(at, watts_left(scene.plan, self.stance))
        seen = Situation(
            world.meter,
            at,
            may_hedge=self._may_hedge(scene, world, cost_of(_alone_s(scene.plan), scene.plan)),
            may_race=self._may_hedge(scene, world, sending_costs(scene.plan, world.meter.conditions(True))),
            deadline_s=scene.deadline_s,
            per_s=1.0 / scene.period_s,
            saved_j=world.bank.saved_j,
        )
        choice = decide(scene.plan, seen, self.stance, world.held)
        if choice is not None:
            world.held = held_after(world.held, choice, self.stance, seen)
        return choice

    def _may_hedge(self, scene: Scene, world: World, cost: float) -> bool:
        if self.hedge_part is None or scene.plan.local is None:
            return True
        world.budget = world.budget or Budget(self.hedge_part).asked(cost_of(_alone_s(scene.plan), scene.plan))
        return world.budget.allows(cost)


def _alone_s(plan: Plan) -> float:
    return plan.local.device_s if plan.local is not None else 0.0


@dataclass(frozen=True, slots=True)
class Oracle:
    """Knows the trace: the row whose answer will come first, or that takes the fewest joules in time."""

    of: str = "seconds"
    knows: bool = True

    def choose(self, scene: Scene, world: World, at: float) -> Choice | None:
        """The best row as it will turn out, hedged by nothing."""
        return Choice(min(scene.plan.rows, key=lambda row: self._price(scene, world, row, at)))

    def _price(self, scene: Scene, world: World, row: Row, at: float) -> tuple[bool, float, float]:
        ready = world.turn(row, at) + (row.device_s + row.encode_s) * scene.slowdown
        done = ready if row.is_local else _way(scene, world, row, ready)[1]
        busy_s = (row.device_s + row.encode_s) * scene.slowdown
        joules = spent_j(row, scene.plan.power or Power(), busy_s, done - at, done - ready)
        late = done - at > scene.deadline_s
        return (late, done, joules) if self.of == "seconds" else (late, joules, done)


def switches(told: Sequence[Told]) -> int:
    """Changes of rows from one request to the next."""
    return sum(one.row != other.row for one, other in itertools.pairwise(told))
