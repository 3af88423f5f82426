"""What a table costs on the links that devices really had: the one in use beside the one that would be made now.

Pure. Both tables are priced with the same layers' seconds, measured where they were, so that their difference is the
tables' own. A device is taken to choose as it does: from its table's own figures, knowing how much slower than planned
it is all in all. Races and fallbacks are not priced: they make either table better, the worse one more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from edgesplit import plan as plans
from edgesplit.plan import Conditions, Link, Plan, Row
from edgesplit_controller.replan.evidence import Moment, Voice
from edgesplit_partitioner.costs import Costs

MOST_MOMENTS = 48
"""Of one device; more are thinned out evenly."""


@dataclass(frozen=True, slots=True)
class Table:
    """A plan with its rows' real costs."""

    plan: Plan
    true: Mapping[str, Row]
    slowdown: float = 1.0
    """What the device has learnt of itself: its seconds beside the plan's."""

    def chosen(self, link: Link) -> Row | None:
        """The row that a device takes on this link, with its real costs."""
        row = plans.choose(self.plan, Conditions(link=link, device_slowdown=self.slowdown))
        return None if row is None else self.true[row.name]


@dataclass(frozen=True, slots=True)
class Bill:
    """What one device paid by a table: per request, on average over its moments."""

    cost: float
    seconds: float
    broken: float
    """The part of moments in which the row that was taken kept some limit of the plan not."""


def in_use(plan: Plan, layers: Mapping[str, Sequence[str]], costs: Costs) -> Table:
    """The table of a release, whose rows are slices of these layers, by what its layers really cost."""
    true = {row.name: _true(row, layers, costs) for row in plan.rows}
    local = plan.local
    return Table(plan, true, true[local.name].device_s / local.device_s if local and local.device_s > 0.0 else 1.0)


def fresh(table: Plan) -> Table:
    """A table that was made with these costs."""
    return Table(table, {row.name: row for row in table.rows})


def bill(table: Table, moments: Sequence[Moment], fixed_s: float = 0.0) -> Bill:
    """What a device with these moments pays."""
    costs, seconds, broken = [], [], 0
    for moment in thinned(moments):
        link = msgspec.structs.replace(moment.link, rtt_s=moment.link.rtt_s + fixed_s)
        row = table.chosen(link)
        if row is None:
            continue
        now = Conditions(link=link)
        costs.append(plans.cost(row, now, table.plan.weights, table.plan.power))
        seconds.append(plans.latency_s(row, now))
        broken += breaks(table.plan, row, now)
    priced = max(1, len(costs))
    return Bill(sum(costs) / priced, sum(seconds) / priced, broken / priced)


def breaks(plan: Plan, row: Row, now: Conditions) -> bool:
    """Whether a row keeps a limit not that depends on the link."""
    deadline_s, joules = _limit(plan, "deadline_s"), _limit(plan, "energy_joules")
    late = deadline_s is not None and plans.latency_s(row, now) > deadline_s
    thirsty = joules is not None and plan.power is not None and plans.energy_j(row, now, plan.power) > joules
    return late or thirsty


def saving(old: Bill, new: Bill) -> float:
    """The part of what a device pays that the new table saves."""
    return 1.0 - new.cost / old.cost if old.cost > 0.0 else 0.0


def halves(voices: Iterable[Voice]) -> tuple[list[tuple[Moment, ...]], list[tuple[Moment, ...]]]:
    """The moments of each device before and after the middle of the time in which they all lie."""
    each = [one.moments for one in voices]
    times = [moment.at for moments in each for moment in moments]
    cut = (min(times) + max(times)) / 2 if times else 0.0
    older = [tuple(one for one in moments if one.at <= cut) for moments in each]
    newer = [tuple(one for one in moments if one.at > cut) for moments in each]
    return older, newer


def thinned(moments: Sequence[Moment]) -> list[Moment]:
    """At most `MOST_MOMENTS` of them, evenly, the newest among them."""
    step = max(1, -(-len(moments) // MOST_MOMENTS))
    return list(reversed(moments[::-1][::step]))


def _true(row: Row, layers: Mapping[str, Sequence[str]], costs: Costs) -> Row:
    """The row by what its layers cost. Beyond a gateway it stays as planned: nobody measures the tiers there apart."""
    seconds = {layer.name: layer.seconds for layer in costs.layers}
    joules = {layer.name: layer.joules for layer in costs.layers}
    here, far = (_flat(names, layers) for names in (row.device, row.remote))
    device, remote = costs.tiers[0], costs.tiers[-1]
    if not {*here, *far} <= seconds.keys():
        return row
    changes: dict[str, float] = {"device_s": sum(seconds[name].get(device, 0.0) for name in here)}
    if row.device_joules is not None and all(device in joules[name] for name in here):
        changes["device_joules"] = sum(joules[name][device] for name in here)
    if not row.hops and all(remote in seconds[name] for name in far):
        changes["remote_s"] = sum(seconds[name][remote] for name in far)
    return msgspec.structs.replace(row, **changes)


def _flat(names: Iterable[str], layers: Mapping[str, Sequence[str]]) -> list[str]:
    return [layer for name in names for layer in layers.get(name, ())]


def _limit(plan: Plan, name: str) -> float | None:
    """A limit of the plan that is a number, as its table carries it."""
    try:
        return float(plan.limits[name])
    except (KeyError, ValueError):
        return None
