"""What a table costs on the links that devices really had: the one in use beside the one that would be made now.

Pure. Both tables are priced with the same layers' seconds, measured where they were, so that their difference is the
tables' own. What a device took from the table in use it has shown: it knows more of its link than it tells. Of another
table it is taken to choose, by that table's figures, between the row that it took and the rows that are new to it; so a
table is worth exactly nothing beside itself. Races and fallbacks are not priced.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from edgesplit import plan as plans
from edgesplit.plan import Conditions, Plan, Row
from edgesplit_controller.replan.evidence import Moment, Voice
from edgesplit_partitioner.costs.from_telemetry import bytes_sent
from edgesplit_partitioner.costs.model import Costs

MOST_MOMENTS = 48
"""Of one device; more are thinned out evenly."""


Way = tuple[frozenset[str], tuple[tuple[str, str], ...], bool, tuple[frozenset[str], ...]]
"""What a row is, whatever it is called: its layers on the device, codecs, compression, layers beyond further links."""


@dataclass(frozen=True, slots=True)
class Table:
    """A plan with its rows' real costs."""

    plan: Plan
    true: Mapping[str, Row]
    ways: Mapping[str, Way]
    slowdown: float = 1.0
    """What the device has learnt of itself: its seconds beside the plan's."""

    def best(self, now: Conditions, among: Container[Way] | None = None) -> Row | None:
        """The row that its figures call best, with its real costs; of some ways, or of all."""
        rows = tuple(row for row in self.plan.rows if among is None or self.ways[row.name] in among)
        learnt = msgspec.structs.replace(now, device_slowdown=self.slowdown)
        found = plans.choose(msgspec.structs.replace(self.plan, rows=rows), learnt)
        return None if found is None else self.true[found.name]


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
    ways = {row.name: _way(row, _flat(row.device, layers), layers) for row in plan.rows}
    local = plan.local
    slowdown = true[local.name].device_s / local.device_s if local is not None and local.device_s > 0.0 else 1.0
    return Table(plan, true, ways, slowdown)


def fresh(table: Plan) -> Table:
    """A table that was made with these costs, its rows still in layers."""
    ways = {row.name: _way(row, row.layers, {}) for row in table.rows}
    return Table(table, {row.name: row for row in table.rows}, ways)


def bills(old: Table, new: Table, moments: Sequence[Moment], fixed_s: float = 0.0) -> tuple[Bill, Bill]:
    """What a device with these moments pays by the table in use, and by another."""
    paid: tuple[list[tuple[float, float, bool]], ...] = ([], [])
    unknown = set(new.ways.values()) - set(old.ways.values())
    for moment in thinned(moments):
        now = Conditions(link=msgspec.structs.replace(moment.link, rtt_s=moment.link.rtt_s + fixed_s))
        took = taken(old, moment, now)
        if took is None:
            continue
        mine = old.ways[took.name]
        among = unknown | ({mine} if mine in new.ways.values() else set(old.ways.values()))
        then = new.best(now, among)
        for table, row, into in ((old, took, paid[0]), (new, then, paid[1])):
            if row is not None:
                plan = table.plan
                cost = plans.cost(row, now, plan.weights, plan.power)
                into.append((cost, plans.latency_s(row, now), breaks(plan, row, now)))
    return _bill(paid[0]), _bill(paid[1])


def taken(table: Table, moment: Moment, now: Conditions) -> Row | None:
    """The row that the device used in that window, with its real costs; the best where it used several."""
    window = moment.window
    return table.best(now) if window.switches or window.row not in table.true else table.true[window.row]


def _bill(paid: Sequence[tuple[float, float, bool]]) -> Bill:
    count = max(1, len(paid))
    costs, seconds, broken = (sum(each[place] for each in paid) / count for place in range(3))
    return Bill(costs, seconds, broken)


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
    weight = bytes_sent(costs, row.sends, row.codecs, compress=row.compress)
    if weight and not row.is_local:
        changes["up_bytes"] = round(weight)
    if not row.hops and all(remote in seconds[name] for name in far):
        changes["remote_s"] = sum(seconds[name][remote] for name in far)
    return msgspec.structs.replace(row, **changes)


def _way(row: Row, here: Iterable[str], layers: Mapping[str, Sequence[str]]) -> Way:
    beyond = tuple(frozenset(_flat(hop.remote, layers) if layers else hop.remote) for hop in row.hops)
    codecs = tuple(sorted((name, codec) for name, codec in row.codecs.items() if codec != "raw"))
    return frozenset(here), codecs, row.compress, beyond


def _flat(names: Iterable[str], layers: Mapping[str, Sequence[str]]) -> list[str]:
    return [layer for name in names for layer in layers.get(name, ())]


def _limit(plan: Plan, name: str) -> float | None:
    """A limit of the plan that is a number, as its table carries it."""
    try:
        return float(plan.limits[name])
    except (KeyError, ValueError):
        return None
