"""Why a row was chosen, as one sentence for people, from the very inputs of the selection.

A cause is an input without which `select_row` would have chosen another row: each input that differs from what the plan
assumes is put back, and the selection is repeated. No clock of its own and no I/O: the wall clock is passed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec

from edgesplit import plan as plans
from edgesplit.mqtt.telemetry import ROW_REASON_CHARS
from edgesplit.plan import Conditions, Link, Row
from edgesplit.terminal_text import shorten
from edgesplit.variant_choice import ACCURACY
from edgesplit_agent.policy.row_selection import Decision, RowSelector, SelectionContext, select_row
from edgesplit_agent.power.mode import PERFORMANCE, PowerMode

REFRESH_S = 1.0
"""While the outcome of the selection stays the same, its sentence is composed again after this many seconds: its
figures change with every request, and composing takes several selections."""
AS_PLANNED_RATIO = 1.05
"""A factor that differs from the planned one by no more than this ratio is no cause."""
LINK_AS_PLANNED_RATIO = 1.25
"""A rate or a round trip that differs from the planned one by no more than this ratio is not named."""
CUT_NAME_CHARS = 60
"""Maximum length of a cut's layers in the sentence."""
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class _Change:
    """An input of the selection that differs from what the plan assumes."""

    text: str
    without: SelectionContext
    """The other inputs, with this one as planned."""
    power_mode: PowerMode


class RowReasons:
    """The sentence of each model's last selection. Thread-safe."""

    def __init__(self, selector: RowSelector, wall_clock: Callable[[], float] = time.time) -> None:
        self._selector = selector
        self._wall_clock = wall_clock
        self._composed: dict[str, tuple[Decision, str]] = {}

    def of(self, model: str) -> str:
        """Why the last request of `model` was answered where it was; empty before the first."""
        decision = self._selector.decision(model)
        if decision is None:
            return ""
        composed = self._composed.get(model)
        if composed is not None and _is_fresh(composed[0], decision):
            return composed[1]
        text = explain(decision, self._wall_clock())
        self._composed[model] = (decision, text)
        return text


def _is_fresh(composed: Decision, decision: Decision) -> bool:
    """Whether the sentence composed for one decision still describes another one."""
    is_same = (
        composed.plan is decision.plan
        and composed.outcome == decision.outcome
        and composed.choice.why == decision.choice.why
        and composed.context.remote_usable == decision.context.remote_usable
        and composed.power_mode.mode == decision.power_mode.mode
    )
    return is_same and decision.context.now - composed.context.now < REFRESH_S


def explain(decision: Decision, unix_s: float) -> str:
    """`PLACE: CAUSES (PREDICTIONS)`, at most `ROW_REASON_CHARS` long; `unix_s` is the present time of day.

    As in "the cloud: this device is believed 2.6 times slower than planned since 14:02 UTC, and 5.3 Mbit/s is enough
    (about 210 ms, this device 329 ms)".
    """
    conditions = decision.context.conditions()
    place = _place(decision, decision.choice.row)
    where = f"this device, raced by {place}" if decision.choice.local_was_chosen else place
    text = f"{where}: {_causes(decision, conditions, unix_s)}{_predictions(decision, conditions)}"
    return shorten(text, ROW_REASON_CHARS)


def _place(decision: Decision, row: Row) -> str:
    """Where a row runs: the device, a tier, or the cut's name with its share of the layers; and which variant."""
    variant = f"{row.variant} on " if row.variant else ""
    if row.is_local:
        return f"{variant}this device"
    if not row.device:
        tiers = decision.plan.tiers or ("device", "cloud")
        return f"{variant}the {tiers[min(1 + len(row.hops), len(tiers) - 1)]}"
    counts = decision.layer_counts
    here = sum(counts.get(name, 0) for name in row.device)
    share = f" ({here} of {sum(counts.values())} layers here)" if here else ""
    return f"{row.name}, after {shorten(row.split_after, CUT_NAME_CHARS)}{share}"


def _causes(decision: Decision, conditions: Conditions, unix_s: float) -> str:
    plan, choice, context = decision.plan, decision.choice, decision.context
    if plan.forced_row == choice.row.name:
        return "the plan forces it"
    if choice.why:
        return choice.why
    if len(plan.rows) == 1:
        return "the plan has no other row"
    if not context.remote_usable:
        return "nothing can be offloaded now"
    unheld = select_row(plan, context, decision.power_mode)
    if unheld is None or unheld.row.name != choice.row.name:
        if unheld is None:
            return "kept from the request before"
        other = f"{_place(decision, unheld.row)}, {_ms_text(plans.latency_s(unheld.row, conditions))},"
        return f"kept from the request before, and {other} is not clearly faster"
    changes = list(_changes(decision, conditions, unix_s))
    causes = [change for change in changes if _outcome_without(decision, change) != decision.outcome]
    objective = f"the plan's objective is {plan.objective}; " if plan.weights or plan.objective == ACCURACY else ""
    text = " and ".join(change.text for change in causes) or "as planned"
    link_is_cause = any(change.without.estimate.up_s_per_byte != context.estimate.up_s_per_byte for change in causes)
    if not choice.row.is_local and context.has_measured_link and not link_is_cause:
        text += f", and {_mbit_text(conditions.link.up_bytes_per_s)} is enough"
    return objective + text


def _outcome_without(decision: Decision, change: _Change) -> tuple[str, bool]:
    """The row that would be chosen, and whether it would only race the device, with one input as planned."""
    choice = select_row(decision.plan, change.without, change.power_mode)
    return (choice.row.name, choice.local_was_chosen) if choice is not None else ("", False)


def _changes(decision: Decision, conditions: Conditions, unix_s: float) -> Iterator[_Change]:
    """The inputs that differ from what the plan assumes."""
    context, mode, estimate = decision.context, decision.power_mode, decision.context.estimate
    if not 1 / AS_PLANNED_RATIO < conditions.device_slowdown < AS_PLANNED_RATIO:
        as_planned = msgspec.structs.replace(estimate, device_slowdown=1.0, usual_slowdown=1.0)
        text = _slowdown_text(context, conditions.device_slowdown, unix_s)
        yield _Change(text, replace(context, estimate=as_planned, slowdown=1.0), mode)
    if conditions.server_load > AS_PLANNED_RATIO:
        idle = msgspec.structs.replace(estimate, server_load=1.0)
        text = f"the server is believed {conditions.server_load:.1f} times slower than idle"
        yield _Change(text, replace(context, estimate=idle), mode)
    if context.has_measured_link:
        link = decision.plan.link
        planned = msgspec.structs.replace(
            estimate, rtt_s=link.rtt_s, up_s_per_byte=1 / link.up_bytes_per_s, down_s_per_byte=1 / link.down_bytes_per_s
        )
        yield _Change(_link_text(conditions.link, link), replace(context, estimate=planned), mode)
    if mode.mode != PERFORMANCE.mode:
        text = f"power mode {mode.mode}" + (f" ({mode.reason})" if mode.reason else "")
        yield _Change(text, context, replace(mode, mode=PERFORMANCE.mode))


def _slowdown_text(context: SelectionContext, slowdown: float, unix_s: float) -> str:
    if slowdown < 1.0:
        return f"this device is {1 / slowdown:.1f} times faster than planned"
    ago_s = context.now - context.estimate.slow_since
    since = f" since {_time_text(unix_s - ago_s, ago_s)}" if ago_s < float("inf") else ""
    capped = ", its clock capped" if context.slowdown > LINK_AS_PLANNED_RATIO else ""
    return f"this device is believed {slowdown:.1f} times slower than planned{since}{capped}"


def _time_text(unix_s: float, ago_s: float) -> str:
    """A time of day in UTC, with its date where it is long ago."""
    return time.strftime("%H:%M UTC" if ago_s < DAY_S / 2 else "%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))


def _link_text(link: Link, planned: Link) -> str:
    """How the measured link differs from the planned one."""
    parts = []
    if _differs(link.up_bytes_per_s, planned.up_bytes_per_s):
        parts.append(f"the uplink is {_mbit_text(link.up_bytes_per_s)}, planned {_mbit_text(planned.up_bytes_per_s)}")
    if _differs(link.rtt_s, planned.rtt_s):
        parts.append(f"a round trip takes {_ms_text(link.rtt_s)}, planned {_ms_text(planned.rtt_s)}")
    return " and ".join(parts) or f"the uplink is {_mbit_text(link.up_bytes_per_s)}"


def _differs(measured: float, planned: float) -> bool:
    return not planned / LINK_AS_PLANNED_RATIO <= measured <= planned * LINK_AS_PLANNED_RATIO


def _predictions(decision: Decision, conditions: Conditions) -> str:
    """The prediction for the chosen row, and for the best row of the other kind: local, or one that offloads."""
    row, rows = decision.choice.row, decision.plan.rows
    # Where the device was chosen and another row only races it, the figure is the racing row's, which is named.
    racing = f"{row.name} " if decision.choice.local_was_chosen else ""
    text = f"{racing}about {_ms_text(plans.latency_s(row, conditions))}"
    other = plans.best_row((other for other in rows if other.is_local != row.is_local), conditions)
    if other is not None:
        name = other.name if other.device and not other.is_local else _place(decision, other)
        text += f", {name} {_ms_text(plans.latency_s(other, conditions))}"
    return f" ({text})"


def _mbit_text(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-6:.3g} Mbit/s" if bytes_per_s < 1e8 else f"{bytes_per_s * 8e-9:.3g} Gbit/s"


def _ms_text(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
