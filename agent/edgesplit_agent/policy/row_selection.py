"""Which row of the plan answers the next request, and whether the device races the cloud for it.

`decide` is the whole decision: plan, estimates, stance and what is held in; a `Choice` out, in microseconds. Where
latency is all that counts and hedging may be paid for, the row is the one against which a race saves most (an
uncertain link is worth trying while the device works anyway). Elsewhere it is the plan's choice with hysteresis, rows
over the power budget left out.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from edgesplit import plan as plans
from edgesplit.plan import Conditions, Plan, Row
from edgesplit_agent.policy.completion_time import Odds
from edgesplit_agent.policy.hedge_timing import LEAST_S, haste_s, patience_s
from edgesplit_agent.policy.link_estimator import LinkMeter
from edgesplit_agent.power.budget import PowerBank
from edgesplit_agent.power.mode import PERFORMANCE, Stance

DWELL_S = 2.0
"""After a change of rows, so long passes before another row that leaves the device is taken up."""
RACE_GAIN = 0.01
"""A race must be expected to save this part of what the device takes alone..."""
RACE_GAIN_S = 0.001
"""...and this much, for it costs energy and a place on the link."""
KEEP = 0.9
"""The row that is held is raced with unless it saves less than this part of what the best would."""
KNOWN = 8
"""Before so many transfers were measured the plan's link is believed, no races and no haste, unless one of them had no
answer in time."""
PACE = 1.25
"""A cap on the clock that moves by less than this factor is the same day."""
OVER = 1.05
"""A row in use is kept while it is over the power budget by no more than this."""
SPENDS = 0.2
"""One request may take its share of the budget, and this part of what was saved."""
RATE_WINDOW_S = 10.0
"""Over which the rate of requests is counted."""
MOST_COUNTED = 4096
IN_TIME = 0.8
"""A row meets a deadline if it is predicted to take no more than this part of it."""


@dataclass(frozen=True, slots=True)
class Held:
    """The row in use and when it was taken up."""

    row: str
    since: float
    mode: str = "performance"
    """Of the stance at its last choice."""
    slowdown: float = 1.0
    """By the cap on the clock, then."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do with one request."""

    row: Row
    early_s: float | None = None
    """Seconds after sending at which the device starts to finish alone: haste. None: only when patience ends."""
    alone: bool = False
    """The device would have answered alone: its work is no extra cost of this race, sending is."""
    why: str = ""
    """For people, where it is not simply the fastest row."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known at the moment of one choice."""

    meter: LinkMeter
    now: float
    """Of the monotonic clock."""
    remote_ok: bool = True
    may_hedge: bool = True
    """There is a budget for finishing here what was sent away."""
    may_race: bool = True
    """There is one for sending what the device answers alone."""
    deadline_s: float = 2.0
    per_s: float = 0.0
    """Requests per second, of late."""
    others_watts: float = 0.0
    """What this device's other models take of its power."""
    saved_j: float = 0.0
    """What the power budget allowed of late and was not drawn; negative where more was drawn."""
    slowdown: float = 1.0
    """By the cap on the processor's clock; the meter learns what is slow beside it (`stance.slowed`)."""

    @property
    def knows(self) -> bool:
        """Enough was measured to doubt the plan's link."""
        return self.meter.transfers >= KNOWN or self.meter.unanswered > 0

    def conditions(self) -> Conditions:
        """As a plan chooses by them."""
        seen = self.meter.conditions(self.remote_ok)
        return msgspec.structs.replace(seen, device_slowdown=seen.device_slowdown * self.slowdown)


def decide(plan: Plan, seen: Situation, stance: Stance = PERFORMANCE, held: Held | None = None) -> Choice | None:
    """The next request's way; None where nothing usable is left."""
    now = seen.conditions()
    if held is not None and not holds(held, seen, stance):
        held = None
    if plan.forced:
        row = plans.choose(plan, now)
        return Choice(row) if row is not None else None
    within, why = affordable(plan, now, stance, seen, held.row if held else "")
    wanted = _with_weights(within, stance.mode, now, seen.deadline_s)
    local = plan.local
    if local is None or not seen.remote_ok:
        row = _settled(wanted, now, held, seen.now)
        return Choice(row, why=why) if row is not None else None
    local_s = plans.latency_s(local, now)
    races = stance.races and not wanted.weights and seen.knows
    hedged = races and seen.may_hedge
    settled = _settled(wanted, now if hedged else _risky(wanted, seen, now, local), held, seen.now)
    if settled is None:
        return None
    if not races or not (seen.may_race if settled.is_local else seen.may_hedge):
        return _sent(Choice(settled, why=why), seen, now, local, local_s, stance)
    raced = _worth_a_race(within.rows, seen, now, local_s, held)
    if raced is None:
        return Choice(local, why=why)
    if settled.is_local:
        return Choice(raced, early_s=0.0, alone=True, why=why)
    return _sent(Choice(raced, why=why), seen, now, local, local_s, stance)


def odds_of(row: Row, seen: Situation, now: Conditions) -> Odds:
    """When the whole request would be answered by a row that leaves the device."""
    fixed_s = (row.device_s + row.encode_s) * now.device_slowdown + now.link.rtt_s + plans.beyond_s(row, now)
    fixed_s += row.down_bytes / now.link.down_bytes_per_s + (row.decode_s + row.remote_s) * now.server_load
    return seen.meter.odds(row.up_bytes, fixed_s, seen.now)


def _sent(choice: Choice, seen: Situation, now: Conditions, local: Row, local_s: float, stance: Stance) -> Choice:
    """The choice, with the moment at which the device starts to finish alone."""
    row = choice.row
    if row.is_local or not stance.hedges or not seen.may_hedge or not seen.knows:
        return choice
    tail_s = (local.device_s - row.device_s) * now.device_slowdown
    sent_s = (row.device_s + row.encode_s) * now.device_slowdown
    early_s = haste_s(odds_of(row, seen, now), local_s, sent_s, tail_s, stance.sure)
    return replace(choice, early_s=early_s)


def _worth_a_race(
    rows: Sequence[Row], seen: Situation, now: Conditions, local_s: float, held: Held | None
) -> Row | None:
    """The row against which a race saves most, or None where none saves enough."""
    best, most_s = None, max(RACE_GAIN * local_s, RACE_GAIN_S)
    kept, kept_s = None, 0.0
    for row in rows:
        if row.is_local:
            continue
        saved_s = odds_of(row, seen, now).saves_s(local_s)
        if held is not None and row.name == held.row:
            kept, kept_s = row, saved_s
        if saved_s > most_s:
            best, most_s = row, saved_s
    return kept if best is not None and kept is not None and kept_s >= KEEP * most_s else best


def _settled(plan: Plan, now: Conditions, held: Held | None, at: float) -> Row | None:
    """The plan's choice with hysteresis; away from the device only after a while with the row before."""
    if held is None:
        return plans.choose(plan, now)
    row = plans.choose(plan, now, held.row)
    if row is None or row.is_local or row.name == held.row or at - held.since >= DWELL_S:
        return row
    kept = next((one for one in plan.rows if one.name == held.row and (one.is_local or now.remote_ok)), None)
    return kept or plan.local or row


def _risky(plan: Plan, seen: Situation, now: Conditions, local: Row) -> Conditions:
    """With what it costs, by row, where the device has to finish after all: the wait, and then its own work.

    Seconds pay for fades only: an answer that is merely slow is in the prediction already. Joules pay for every answer
    that the device does not wait for to the end.
    """
    local_s, thrifty = plans.latency_s(local, now), "energy" in plan.weights
    risks = {}
    for row in plan.rows:
        if row.is_local:
            continue
        sent_s = (row.device_s + row.encode_s) * now.device_slowdown
        tail_s = local_s - row.device_s * now.device_slowdown
        away_s = plans.latency_s(row, now) - sent_s
        wait_s = patience_s(seen.deadline_s - sent_s, tail_s, away_s)
        late = 1.0 - odds_of(row, seen, now).within(sent_s + wait_s)
        risks[row.name] = (late if thrifty else seen.meter.fades) * (LEAST_S + local_s)
    return msgspec.structs.replace(now, risk_s=risks)


def affordable(plan: Plan, now: Conditions, stance: Stance, seen: Situation, held: str) -> tuple[Plan, str]:
    """The plan with the rows whose joules the power budget pays for at this rate of requests; where none fits, with
    the one that draws least. Says why rows are missing. A plan without power figures stays as it is."""
    if stance.watts is None or plan.power is None or seen.per_s <= 0.0:
        return plan, ""
    allowed_j = (watts_left(plan, stance) - seen.others_watts) / seen.per_s + SPENDS * seen.saved_j
    spent = {row.name: plans.marginal_j(row, now, plan.power) for row in plan.rows if row.is_local or now.remote_ok}
    rows = tuple(
        row for row in plan.rows
        if row.name in spent and spent[row.name] <= allowed_j * (OVER if row.name == held else 1.0)
    )  # fmt: skip
    if len(rows) == len(plan.rows):
        return plan, ""
    if rows:
        return msgspec.structs.replace(plan, rows=rows), "within the power budget"
    least = min((row for row in plan.rows if row.name in spent), key=lambda row: spent[row.name], default=None)
    kept = plan.rows if least is None else (least,)
    return msgspec.structs.replace(plan, rows=kept), "over the power budget: the row that draws least"


def watts_left(plan: Plan, stance: Stance) -> float:
    """What the power budget leaves beyond idling, by the plan's figures; 0 where there is none, or none is known."""
    if stance.watts is None or plan.power is None:
        return 0.0
    return stance.watts / stance.measured_over_predicted - plan.power.idle_watts


def _with_weights(plan: Plan, mode: str, now: Conditions, deadline_s: float) -> Plan:
    """The plan, wanting what the mode wants. Without power figures every mode wants what the plan does."""
    if mode == "performance" or plan.power is None:
        return plan
    if mode == "balanced":
        local = plan.local or plan.rows[0]
        return msgspec.structs.replace(plan, weights=_even(plan.power, local, plan.link))
    in_time = tuple(row for row in plan.rows if plans.latency_s(row, now) <= IN_TIME * deadline_s)
    if not any(row.is_local or now.remote_ok for row in in_time):
        return plan  # nothing meets the deadline: the fastest comes nearest to it
    return msgspec.structs.replace(plan, rows=in_time, weights={"energy": 1.0})


@lru_cache(maxsize=256)
def _even_weights(seconds: float, joules: float) -> dict[str, float]:
    return {"latency": 1.0 / seconds, "energy": 1.0 / joules}


def _even(power: plans.Power, local: Row, link: plans.Link) -> dict[str, float]:
    """A part of all-local's seconds counts as much as the same part of its joules."""
    planned = Conditions(link=link)
    seconds, joules = plans.latency_s(local, planned), plans.energy_j(local, planned, power)
    return _even_weights(seconds, joules) if seconds > 0 and joules > 0 else {}


def joules_of(row: Row, plan: Plan, now: Conditions) -> float:
    """Of one inference, beyond idling; 0 where the plan has no power figures."""
    return plans.marginal_j(row, now, plan.power) if plan.power is not None else 0.0


def holds(held: Held, seen: Situation, stance: Stance) -> bool:
    """Whether there is a reason to stay with a row: another stance, or another cap on the clock, is a new day."""
    return held.mode == stance.mode and 1.0 / PACE < held.slowdown / seen.slowdown < PACE


def held_after(held: Held | None, choice: Choice, stance: Stance, seen: Situation) -> Held:
    """What is held once this was chosen."""
    since = held.since if held is not None and held.row == choice.row.name else seen.now
    return Held(choice.row.name, since, stance.mode, seen.slowdown)


class Chooser:
    """Chooses for all models of a device, and remembers what is held. Thread-safe."""

    def __init__(self, stance: Callable[[], Stance] = lambda: PERFORMANCE) -> None:
        self._stance = stance
        self._lock = threading.Lock()
        self._held: dict[str, Held] = {}
        self._why: dict[str, str] = {}
        self._asked: dict[str, deque[float]] = {}
        self._watts: dict[str, float] = {}
        self._bank = PowerBank()

    def choose(self, model: str, plan: Plan, seen: Situation) -> Choice | None:
        """The next request's way."""
        with self._lock:
            asked = self._asked.setdefault(model, deque(maxlen=MOST_COUNTED))
            asked.append(seen.now)
            others = sum(watts for other, watts in self._watts.items() if other != model)
            stance, held = self._stance(), self._held.get(model)
            self._bank = self._bank.until(seen.now, watts_left(plan, stance))
            counted = replace(seen, per_s=rate(asked, seen.now), others_watts=others, saved_j=self._bank.saved_j)
            choice = decide(plan, counted, stance, held)
            if choice is not None:
                self._held[model] = held_after(held, choice, stance, seen)
                self._why[model] = choice.why
                self._watts[model] = counted.per_s * joules_of(choice.row, plan, counted.conditions())
            return choice

    def spent(self, joules: float) -> None:
        """An inference took so much beyond idling."""
        with self._lock:
            self._bank = self._bank.spent(joules)

    def row_of(self, model: str) -> str:
        """The row in use, empty before the first request."""
        held = self._held.get(model)
        return held.row if held else ""

    def why(self, model: str) -> str:
        """What kept the last request from the fastest row, for people; empty where nothing did."""
        return self._why.get(model, "")

    def forget(self, model: str) -> None:
        """Another release, or none: nothing is held any more."""
        with self._lock:
            for kept in (self._held, self._why, self._asked, self._watts):
                kept.pop(model, None)


def rate(asked: deque[float], now: float) -> float:
    """Requests per second in the window; those before it are forgotten. 0 while there was only one."""
    while asked and asked[0] < now - RATE_WINDOW_S:
        asked.popleft()
    return (len(asked) - 1) / max(now - asked[0], 1e-3) if len(asked) > 1 else 0.0
