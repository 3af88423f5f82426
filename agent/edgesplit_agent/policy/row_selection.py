"""Row selection: which row of the plan answers the next request, and whether the device races the offload target for
it.

`select_row` is the whole decision and a pure function: plan, estimates, power mode and the held row in; a `RowChoice`
out, in microseconds. Where latency is all that counts and hedging may be paid for, it takes the row against which a
race saves most time (an uncertain link is worth trying while the device works anyway). Elsewhere it takes the plan's
choice with hysteresis, without the rows that exceed the power budget. See docs/decisions/0025-deciding.md.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter

import msgspec

from edgesplit import plan as plans
from edgesplit import variant_choice
from edgesplit.plan import Conditions, Plan, Row
from edgesplit_agent.policy.completion_time import CompletionTime
from edgesplit_agent.policy.hedge_timing import MIN_OFFLOAD_WAIT_S, early_hedge_s, offload_timeout_s
from edgesplit_agent.policy.link_estimator import LinkEstimate
from edgesplit_agent.policy.variant_selection import DEADLINE_RATIO, finish_of, variants_allowed
from edgesplit_agent.power.budget import EnergyBudget
from edgesplit_agent.power.mode import PERFORMANCE, PowerMode

DWELL_S = 2.0
"""Minimum time in seconds between two changes to a row that offloads."""
MIN_RACE_GAIN_RATIO = 0.01
"""A race must be expected to save at least this ratio of what the device takes alone."""
MIN_RACE_GAIN_S = 0.001
"""A race must be expected to save at least this many seconds, because it costs energy and occupies the link."""
KEEP_ROW_RATIO = 0.9
"""The held row stays the race's row unless it saves less than this ratio of what the best row saves."""
MIN_TRANSFERS = 8
"""Number of measured transfers before the plan's link is doubted: until then there are no races and no early hedges,
unless a transfer had no answer in time."""
SAME_CLOCK_FACTOR = 1.25
"""Two clock caps that differ by less than this factor count as equal."""
BUDGET_TOLERANCE = 1.05
"""The row in use is kept while its energy exceeds the power budget by no more than this factor."""
SAVINGS_RATIO = 0.2
"""One request may use its share of the power budget and this ratio of the saved energy."""
RATE_WINDOW_S = 10.0
"""Length in seconds of the sliding interval over which the request rate is counted."""
MAX_ARRIVALS = 4096
"""Maximum number of arrivals kept for the request rate of one model."""
NO_COUNTS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class HeldRow:
    """The row in use and the circumstances under which it was chosen."""

    row: str
    since: float
    """Monotonic time at which this row was taken up."""
    mode: str = "performance"
    """Name of the power mode at the last choice."""
    slowdown: float = 1.0
    """Slowdown by the clock cap at the last choice."""


@dataclass(frozen=True, slots=True)
class RowChoice:
    """How to answer one request."""

    row: Row
    early_s: float | None = None
    """Seconds after sending at which the device starts an early hedge. None: only after the regular timeout."""
    local_was_chosen: bool = False
    """The device would have answered this request alone: its own work is no extra cost of the race, only sending is."""
    why: str = ""
    """Reason for operators why this is not simply the fastest row; empty if it is."""
    finish: Row | None = None
    """The local row by which the device finishes if the offload target does not answer; in a family it may be another
    variant's. None where the device cannot, and for a row that is local itself."""


@dataclass(frozen=True, slots=True)
class SelectionContext:
    """Inputs of one selection."""

    estimate: LinkEstimate
    now: float
    """Current monotonic time."""
    remote_usable: bool = True
    """The offload target accepts requests (circuit breaker)."""
    may_hedge: bool = True
    """The budget allows the device to finish a request that was sent away."""
    may_race: bool = True
    """The budget allows sending a request that the device answers itself."""
    deadline_s: float = 2.0
    """Seconds until the request's deadline."""
    least_accuracy: float = 0.0
    """Least accuracy that the request asks for, 0 to 1; a family's rows below it are not used."""
    per_s: float = 0.0
    """Recent requests per second of this model."""
    others_watts: float = 0.0
    """Watts beyond idling that the device's other models use."""
    saved_j: float = 0.0
    """Joules saved under the power budget recently; negative when more was drawn than allowed."""
    slowdown: float = 1.0
    """Slowdown by the cap on the processor's clock; the estimate's own slowdown is learnt without it
    (`mode.clock_slowdown`)."""

    @property
    def has_measured_link(self) -> bool:
        """Whether enough was measured to replace the plan's link by the estimate."""
        return self.estimate.transfers >= MIN_TRANSFERS or self.estimate.unanswered > 0

    def conditions(self) -> Conditions:
        """The conditions for the plan's cost functions, with the clock cap applied."""
        seen = self.estimate.conditions(self.remote_usable, self.now)
        return msgspec.structs.replace(seen, device_slowdown=seen.device_slowdown * self.slowdown)


@dataclass(frozen=True, slots=True)
class Decision:
    """One selection: its inputs and the choice made of them."""

    plan: Plan
    choice: RowChoice
    context: SelectionContext
    power_mode: PowerMode
    layer_counts: Mapping[str, int]
    """Layers by slice, of all slices of the release; empty: unknown."""

    @property
    def outcome(self) -> tuple[str, bool]:
        """The chosen row, and whether it only races the device."""
        return self.choice.row.name, self.choice.local_was_chosen


def select_row(
    plan: Plan, context: SelectionContext, power_mode: PowerMode = PERFORMANCE, held: HeldRow | None = None
) -> RowChoice | None:
    """The row for the next request; None where no usable row is left."""
    conditions = context.conditions()
    if held is not None and not is_hold_valid(held, context, power_mode):
        held = None
    # 1. A row forced by the operator: no estimate, race or budget changes it.
    if plan.forced_row:
        row = plans.choose_row(plan, conditions)
        return _with_finish(RowChoice(row), plan, context, conditions) if row is not None else None
    # 2. Of a family only the variants above the floor, and of these the ones that the deadline allows.
    allowed = variants_allowed(
        plan, conditions, context.deadline_s, context.least_accuracy,
        lambda row, seconds: completion_time_of(row, context, conditions).probability_by(seconds),
        held.row if held else "",
    )  # fmt: skip
    if not allowed.rows:
        return None
    choice = _select_allowed(allowed, context, conditions, power_mode, held)
    return _with_finish(choice, plan, context, conditions) if choice is not None else None


def _select_allowed(
    plan: Plan, context: SelectionContext, conditions: Conditions, power_mode: PowerMode, held: HeldRow | None
) -> RowChoice | None:
    """The row among those that the request allows, and whether the device races it; None where none is usable."""
    # 1. Only rows within the power budget, weighted by what the power mode optimises for.
    affordable_plan, why = within_power_budget(plan, conditions, power_mode, context, held.row if held else "")
    weighted = _with_mode_weights(affordable_plan, power_mode.mode, conditions, context.deadline_s)
    local = plans.best_row((row for row in plan.rows if row.is_local), conditions)
    # 2. A race needs both a local row and a reachable target.
    if local is None or not context.remote_usable:
        row = _with_hysteresis(weighted, conditions, held, context.now)
        return RowChoice(row, why=why) if row is not None else None
    local_s = plans.latency_s(local, conditions)
    # 3. Races pay only where latency alone counts (no weights), and only once the link was measured: by the plan's own
    # link every race would look like a gain.
    races = power_mode.can_race and not weighted.weights and context.has_measured_link
    hedged = races and context.may_hedge
    # A hedged offload that fades is caught by its early tail; without hedging each row is charged for that risk.
    chosen = _with_hysteresis(
        weighted, conditions if hedged else _with_risk(weighted, context, conditions, local), held, context.now
    )
    if chosen is None:
        return None
    # 4. No race: the plan's choice. What a race costs extra depends on what the device would have done anyway. If it
    # answers alone, only sending is extra (`may_race`); if it offloads, the local tail is (`may_hedge`).
    if not races or not (context.may_race if chosen.is_local else context.may_hedge):
        return _with_early_hedge(RowChoice(chosen, why=why), context, conditions, local, local_s, power_mode)
    # 5. Race against the row that saves most on average; where none saves enough, the device answers alone.
    raced = _best_race(affordable_plan.rows, context, conditions, local_s, held)
    if raced is None:
        return RowChoice(local, why=why)
    if chosen.is_local:  # device and target start together
        return RowChoice(raced, early_s=0.0, local_was_chosen=True, why=why, finish=local)
    return _with_early_hedge(RowChoice(raced, why=why), context, conditions, local, local_s, power_mode)


def _with_finish(choice: RowChoice, plan: Plan, context: SelectionContext, conditions: Conditions) -> RowChoice:
    """The choice with the local row that finishes a request which the target does not answer."""
    if choice.row.is_local or choice.finish is not None:
        return choice
    allowed_s = variant_choice.time_allowed_s(plan, context.deadline_s)
    return replace(choice, finish=finish_of(plan, choice.row, conditions, allowed_s, context.least_accuracy))


def completion_time_of(row: Row, context: SelectionContext, conditions: Conditions) -> CompletionTime:
    """Distribution of the time to the whole answer by a row that offloads."""
    # The terms of plan.latency_s without the upload, whose duration is the uncertain part (Neurosurgeon, section 5).
    link = conditions.link
    links_s = link.rtt_s + row.down_bytes / link.down_bytes_per_s + plans.further_links_s(row, conditions)
    server_s = (row.decode_s + row.remote_s) * conditions.server_load
    fixed_s = (row.device_s + row.encode_s) * conditions.device_slowdown + links_s + server_s
    return context.estimate.completion_time(row.up_bytes, fixed_s, context.now)


def _with_early_hedge(
    choice: RowChoice,
    context: SelectionContext,
    conditions: Conditions,
    local: Row,
    local_s: float,
    power_mode: PowerMode,
) -> RowChoice:
    """The choice, with the time at which an early hedge starts if the power mode and the budget allow one."""
    row = choice.row
    if row.is_local or not power_mode.can_hedge or not context.may_hedge or not context.has_measured_link:
        return choice
    # The tail is what all-local computes beyond the row's own device part.
    tail_s = variant_choice.finish_s(row, local) * conditions.device_slowdown
    sent_s = (row.device_s + row.encode_s) * conditions.device_slowdown
    completion = completion_time_of(row, context, conditions)
    early_s = early_hedge_s(completion, local_s, sent_s, tail_s, power_mode.required_probability)
    return replace(choice, early_s=early_s, finish=local if early_s is not None else None)


def _best_race(
    rows: Sequence[Row], context: SelectionContext, conditions: Conditions, local_s: float, held: HeldRow | None
) -> Row | None:
    """The row against which a race saves most on average, or None where no row saves enough."""
    best, best_s = None, max(MIN_RACE_GAIN_RATIO * local_s, MIN_RACE_GAIN_S)
    held_row, held_s = None, 0.0
    for row in rows:
        if row.is_local:
            continue
        # Mean of max(0, local - offloaded): uncertainty makes a race more valuable than its mean suggests: a slow
        # answer costs nothing while the device works too.
        saved_s = completion_time_of(row, context, conditions).expected_saving_s(local_s)
        if held is not None and row.name == held.row:
            held_row, held_s = row, saved_s
        if saved_s > best_s:
            best, best_s = row, saved_s
    # Hysteresis: stay with the held row while it saves nearly as much as the best.
    return held_row if best is not None and held_row is not None and held_s >= KEEP_ROW_RATIO * best_s else best


def _with_hysteresis(plan: Plan, conditions: Conditions, held: HeldRow | None, now: float) -> Row | None:
    """The plan's choice with hysteresis; another offloading row only after `DWELL_S` with the current one."""
    if held is None:
        return plans.choose_row(plan, conditions)
    row = plans.choose_row(plan, conditions, held.row)
    # Back to the device is always free; another offloading row has to wait for the dwell time.
    if row is None or row.is_local or row.name == held.row or now - held.since >= DWELL_S:
        return row
    usable = (candidate for candidate in plan.rows if candidate.is_local or conditions.remote_usable)
    current = next((candidate for candidate in usable if candidate.name == held.row), None)
    return current or plan.local or row


def _with_risk(plan: Plan, context: SelectionContext, conditions: Conditions, local: Row) -> Conditions:
    """The conditions with the mean cost, by row, of having to finish locally after all: the wait, then the local work.

    Weights of seconds are charged for fades only: an answer that is merely slow is in the prediction already. Weights
    of joules are charged for every answer that the device does not wait for to the end.
    """
    local_s, thrifty = plans.latency_s(local, conditions), "energy" in plan.weights
    risks = {}
    for row in plan.rows:
        if row.is_local:
            continue
        sent_s = (row.device_s + row.encode_s) * conditions.device_slowdown
        tail_s = variant_choice.finish_s(row, local) * conditions.device_slowdown
        away_s = plans.latency_s(row, conditions) - sent_s
        # With no hedge budget the tail starts only when the regular timeout ends: this is how long a dead link costs.
        wait_s = offload_timeout_s(context.deadline_s - sent_s, tail_s, away_s)
        late = 1.0 - completion_time_of(row, context, conditions).probability_by(sent_s + wait_s)
        risks[row.name] = (late if thrifty else context.estimate.fades) * (MIN_OFFLOAD_WAIT_S + local_s)
    return msgspec.structs.replace(conditions, risk_s=risks)


def within_power_budget(
    plan: Plan, conditions: Conditions, power_mode: PowerMode, context: SelectionContext, held: str
) -> tuple[Plan, str]:
    """The plan with only the rows whose energy the power budget covers at the current request rate, and the reason why
    rows are missing (empty if none is).

    Where no row fits, only the one that draws least is left. A plan without power figures stays as it is.
    """
    if power_mode.watts is None or plan.power is None or context.per_s <= 0.0:
        return plan, ""
    # Joules per request = allowed watts (less idling and the other models) / requests per second, plus part of the
    # savings: without them this is a step function that may never afford to answer locally (decision 25).
    allowed_watts = active_watts_allowed(plan, power_mode) - context.others_watts
    allowed_j = allowed_watts / context.per_s + SAVINGS_RATIO * context.saved_j
    energies = [
        (plans.marginal_energy_j(row, conditions, plan.power), row)
        for row in plan.rows
        if row.is_local or conditions.remote_usable
    ]
    rows = tuple(
        row for joules, row in energies if joules <= allowed_j * (BUDGET_TOLERANCE if row.name == held else 1.0)
    )
    if len(rows) == len(plan.rows):
        return plan, ""
    if rows:
        return msgspec.structs.replace(plan, rows=rows), "within the power budget"
    # Answering comes first: no budget refuses a request.
    left = (min(energies, key=itemgetter(0))[1],) if energies else plan.rows
    return msgspec.structs.replace(plan, rows=left), "over the power budget: the row that draws least"


def active_watts_allowed(plan: Plan, power_mode: PowerMode) -> float:
    """Watts beyond idling that the power budget allows, in the plan's units; 0 without a budget or without power
    figures."""
    if power_mode.watts is None or plan.power is None:
        return 0.0
    # The budget is in measured watts, the plan's figures may be off by a factor: compare both in the plan's units.
    return power_mode.watts / power_mode.measured_over_predicted - plan.power.idle_watts


def _with_mode_weights(plan: Plan, mode: str, conditions: Conditions, deadline_s: float) -> Plan:
    """The plan with the objective weights of the power mode; unchanged where the plan has no power figures."""
    if mode == "performance" or plan.power is None:
        return plan
    if mode == "balanced":
        local = plan.local or plan.rows[0]
        return msgspec.structs.replace(plan, weights=_balanced_weights(plan.power, local, plan.link))
    # Saver: the fewest joules among the rows that meet the deadline.
    in_time = tuple(row for row in plan.rows if plans.latency_s(row, conditions) <= DEADLINE_RATIO * deadline_s)
    if not any(row.is_local or conditions.remote_usable for row in in_time):
        return plan  # nothing meets the deadline: the fastest comes nearest to it
    return msgspec.structs.replace(plan, rows=in_time, weights={"energy": 1.0})


@lru_cache(maxsize=256)
def _cached_weights(seconds: float, joules: float) -> dict[str, float]:
    return {"latency": 1.0 / seconds, "energy": 1.0 / joules}


def _balanced_weights(power: plans.Power, local: Row, link: plans.Link) -> dict[str, float]:
    """Weights by which a ratio of the all-local row's seconds counts as much as the same ratio of its joules."""
    planned = Conditions(link=link)
    seconds, joules = plans.latency_s(local, planned), plans.energy_j(local, planned, power)
    return _cached_weights(seconds, joules) if seconds > 0 and joules > 0 else {}


def active_joules(row: Row, plan: Plan, conditions: Conditions) -> float:
    """Joules of one inference beyond idling; 0 where the plan has no power figures."""
    return plans.marginal_energy_j(row, conditions, plan.power) if plan.power is not None else 0.0


def is_hold_valid(held: HeldRow, context: SelectionContext, power_mode: PowerMode) -> bool:
    """Whether the held row still counts: not after a change of the power mode or of the clock cap."""
    # A row chosen for another objective or another clock speed deserves no hysteresis.
    clock_ratio = held.slowdown / context.slowdown
    return held.mode == power_mode.mode and 1.0 / SAME_CLOCK_FACTOR < clock_ratio < SAME_CLOCK_FACTOR


def hold_after(held: HeldRow | None, choice: RowChoice, power_mode: PowerMode, context: SelectionContext) -> HeldRow:
    """The held row after `choice` was made."""
    since = held.since if held is not None and held.row == choice.row.name else context.now
    return HeldRow(choice.row.name, since, power_mode.mode, context.slowdown)


class RowSelector:
    """Selects rows for all models of a device and keeps the held rows, request rates and the energy budget.
    Thread-safe."""

    def __init__(self, power_mode: Callable[[], PowerMode] = lambda: PERFORMANCE) -> None:
        self._power_mode = power_mode
        self._lock = threading.Lock()
        self._held: dict[str, HeldRow] = {}
        self._decisions: dict[str, Decision] = {}
        self._arrivals: dict[str, deque[float]] = {}
        self._watts: dict[str, float] = {}
        self._energy_budget = EnergyBudget()

    def select(
        self,
        model: str,
        plan: Plan,
        seen: SelectionContext,
        *,
        is_repeat: bool = False,
        layer_counts: Mapping[str, int] = NO_COUNTS,
    ) -> RowChoice | None:
        """Select the row for the next request of `model`, counting that request unless `is_repeat`: then it is selected
        again for the last one. None where no usable row is left. `layer_counts` are kept with the decision."""
        with self._lock:
            arrivals = self._arrivals.setdefault(model, deque(maxlen=MAX_ARRIVALS))
            if not is_repeat:
                arrivals.append(seen.now)
            others_watts = sum(watts for other, watts in self._watts.items() if other != model)
            per_s = request_rate(arrivals, seen.now)
            mode, held = self._power_mode(), self._held.get(model)
            self._energy_budget = self._energy_budget.credited(seen.now, active_watts_allowed(plan, mode))
            saved_j = self._energy_budget.saved_j
            context = replace(seen, per_s=per_s, others_watts=others_watts, saved_j=saved_j)
            choice = select_row(plan, context, mode, held)
            if choice is not None:
                self._held[model] = hold_after(held, choice, mode, seen)
                self._decisions[model] = Decision(plan, choice, context, mode, layer_counts)
                self._watts[model] = context.per_s * active_joules(choice.row, plan, context.conditions())
            return choice

    def record_joules(self, joules: float) -> None:
        """Record that an inference took so many joules beyond idling."""
        with self._lock:
            self._energy_budget = self._energy_budget.debited(joules)

    def row_of(self, model: str) -> str:
        """Name of the row in use; empty before the first request."""
        held = self._held.get(model)
        return held.row if held else ""

    def decision(self, model: str) -> Decision | None:
        """The selection for the last request, which `row_reason` explains; None before the first."""
        return self._decisions.get(model)

    def forget(self, model: str) -> None:
        """Drop all state of a model that is served no longer, or by another release."""
        with self._lock:
            for state in (self._held, self._decisions, self._arrivals, self._watts):
                state.pop(model, None)


def request_rate(arrivals: deque[float], now: float) -> float:
    """Requests per second over the last `RATE_WINDOW_S`; removes older arrivals. 0 with fewer than two."""
    while arrivals and arrivals[0] < now - RATE_WINDOW_S:
        arrivals.popleft()
    return (len(arrivals) - 1) / max(now - arrivals[0], 1e-3) if len(arrivals) > 1 else 0.0
