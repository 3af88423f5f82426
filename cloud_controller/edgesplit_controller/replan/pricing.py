"""Costs of plan tables on the links that devices really had: the table in use and the one that would be made now
(pure).

Both tables are priced with the same measured seconds per layer, so that they differ only by their own choices. With the
table in use, a device's choices are known from its telemetry: it has more information about its link than it reports.
With another table it is assumed to select, by that table's figures, between the row that it used and the rows that are
new to it; so a table saves exactly nothing against itself. Hedged requests and fallbacks are not priced.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from edgesplit import plan as plans
from edgesplit.plan import Conditions, Plan, Row
from edgesplit_controller.replan.evidence import DeviceMeasurements, Observation
from edgesplit_partitioner.costs.from_telemetry import planned_transfer_bytes
from edgesplit_partitioner.costs.model import Costs

MOST_OBSERVATIONS = 48
"""Observations of one device that are priced; more are thinned out evenly."""


RowIdentity = tuple[frozenset[str], tuple[tuple[str, str], ...], bool, tuple[frozenset[str], ...]]
"""Identity of a row apart from its name: its layers on the device, its codecs, its compression, its layers behind
further links."""


@dataclass(frozen=True, slots=True)
class PricedTable:
    """A plan with its rows' measured costs."""

    plan: Plan
    measured_rows: Mapping[str, Row]
    identities: Mapping[str, RowIdentity]
    slowdown: float = 1.0
    """Measured seconds on the device over planned ones: agents learn this factor and scale the plan by it."""

    def best(self, now: Conditions, among: Container[RowIdentity] | None = None) -> Row | None:
        """The row that the table's figures favour, with its measured costs; among some row identities, or all. None if
        the plan allows no row."""
        rows = tuple(row for row in self.plan.rows if among is None or self.identities[row.name] in among)
        conditions = msgspec.structs.replace(now, device_slowdown=self.slowdown)
        chosen = plans.choose_row(msgspec.structs.replace(self.plan, rows=rows), conditions)
        return None if chosen is None else self.measured_rows[chosen.name]


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Costs of one device under a table: per request, on average over its observations."""

    cost: float
    seconds: float
    broken_ratio: float
    """Part of the observations in which the selected row broke some limit of the plan."""


def price_in_use(plan: Plan, layers: Mapping[str, Sequence[str]], costs: Costs) -> PricedTable:
    """The table of a release, whose rows consist of slices of these layers, with the measured costs of its layers."""
    true = {row.name: _measured_row(row, layers, costs) for row in plan.rows}
    ways = {row.name: _identity(row, _layers_of(row.device, layers), layers) for row in plan.rows}
    local = plan.local
    slowdown = true[local.name].device_s / local.device_s if local is not None and local.device_s > 0.0 else 1.0
    return PricedTable(plan, true, ways, slowdown)


def price_new(table: Plan) -> PricedTable:
    """A table that was planned with these costs; its rows consist of layers."""
    ways = {row.name: _identity(row, row.layers, {}) for row in table.rows}
    return PricedTable(table, {row.name: row for row in table.rows}, ways)


def compare_costs(
    old: PricedTable, new: PricedTable, observations: Sequence[Observation], fixed_s: float = 0.0
) -> tuple[DeviceCosts, DeviceCosts]:
    """Costs of a device with these observations under the table in use, and under another."""
    priced: tuple[list[tuple[float, float, bool]], ...] = ([], [])
    new_identities = set(new.identities.values()) - set(old.identities.values())
    for moment in thin_out(observations):
        now = Conditions(link=msgspec.structs.replace(moment.link, rtt_s=moment.link.rtt_s + fixed_s))
        used = used_row(old, moment, now)
        if used is None:
            continue
        # The device selects among the rows that are new to it and the row it used, so that the old rows it declined
        # (for reasons its telemetry does not show) cannot make the new table look better. If the new table lacks the
        # used row, all of its rows are candidates.
        used_identity = old.identities[used.name]
        candidates = new_identities | (
            {used_identity} if used_identity in new.identities.values() else set(old.identities.values())
        )
        new_row = new.best(now, candidates)
        for table, row, prices in ((old, used, priced[0]), (new, new_row, priced[1])):
            if row is not None:
                plan = table.plan
                cost = plans.cost(row, now, plan.weights, plan.power)
                prices.append((cost, plans.latency_s(row, now), breaks_limit(plan, row, now)))
    return _average(priced[0]), _average(priced[1])


def used_row(table: PricedTable, moment: Observation, now: Conditions) -> Row | None:
    """The row that the device used in that window, with its measured costs; the best one where it used several."""
    window = moment.window
    return table.best(now) if window.switches else table.measured_rows.get(window.row) or table.best(now)


def _average(prices: Sequence[tuple[float, float, bool]]) -> DeviceCosts:
    count = max(1, len(prices))
    costs, seconds, broken = (sum(price[index] for price in prices) / count for index in range(3))
    return DeviceCosts(costs, seconds, broken)


def breaks_limit(plan: Plan, row: Row, now: Conditions) -> bool:
    """Whether a row breaks a limit of the plan that depends on the link."""
    deadline_s, joules = _limit(plan, "deadline_s"), _limit(plan, "energy_joules")
    is_late = deadline_s is not None and plans.latency_s(row, now) > deadline_s
    is_over_energy = joules is not None and plan.power is not None and plans.energy_j(row, now, plan.power) > joules
    return is_late or is_over_energy


def saved_ratio(old: DeviceCosts, new: DeviceCosts) -> float:
    """Part of a device's cost that the new table saves."""
    return 1.0 - new.cost / old.cost if old.cost > 0.0 else 0.0


def split_in_time(
    devices: Iterable[DeviceMeasurements],
) -> tuple[list[tuple[Observation, ...]], list[tuple[Observation, ...]]]:
    """Each device's observations before and after the middle of the whole period."""
    per_device = [observation.observations for observation in devices]
    times = [moment.at for moments in per_device for moment in moments]
    cut = (min(times) + max(times)) / 2 if times else 0.0
    older = [tuple(observation for observation in moments if observation.at <= cut) for moments in per_device]
    newer = [tuple(observation for observation in moments if observation.at > cut) for moments in per_device]
    return older, newer


def thin_out(observations: Sequence[Observation]) -> list[Observation]:
    """At most `MOST_OBSERVATIONS` of them, evenly spread, the newest included."""
    step = max(1, -(-len(observations) // MOST_OBSERVATIONS))
    return list(reversed(observations[::-1][::step]))


def _measured_row(row: Row, layers: Mapping[str, Sequence[str]], costs: Costs) -> Row:
    """The row with the measured costs of its layers. Layers behind a gateway keep their planned costs, because these
    tiers are not measured separately."""
    seconds = {layer.name: layer.seconds for layer in costs.layers}
    joules = {layer.name: layer.joules for layer in costs.layers}
    device_layers, remote_layers = (_layers_of(names, layers) for names in (row.device, row.remote))
    device, remote = costs.tiers[0], costs.tiers[-1]
    if not {*device_layers, *remote_layers} <= seconds.keys():
        return row
    changes: dict[str, float] = {"device_s": sum(seconds[name].get(device, 0.0) for name in device_layers)}
    if row.device_joules is not None and all(device in joules[name] for name in device_layers):
        changes["device_joules"] = sum(joules[name][device] for name in device_layers)
    measured_bytes = planned_transfer_bytes(costs, row.sends, row.codecs, compress=row.compress)
    if measured_bytes and not row.is_local:
        changes["up_bytes"] = round(measured_bytes)
    if not row.hops and all(remote in seconds[name] for name in remote_layers):
        changes["remote_s"] = sum(seconds[name][remote] for name in remote_layers)
    return msgspec.structs.replace(row, **changes)


def _identity(row: Row, here: Iterable[str], layers: Mapping[str, Sequence[str]]) -> RowIdentity:
    beyond = tuple(frozenset(_layers_of(hop.remote, layers) if layers else hop.remote) for hop in row.hops)
    codecs = tuple(sorted((name, codec) for name, codec in row.codecs.items() if codec != "raw"))
    return frozenset(here), codecs, row.compress, beyond


def _layers_of(names: Iterable[str], layers: Mapping[str, Sequence[str]]) -> list[str]:
    return [layer for name in names for layer in layers.get(name, ())]


def _limit(plan: Plan, name: str) -> float | None:
    """A numeric limit of the plan, from its table; None if there is none."""
    try:
        return float(plan.limits[name])
    except (KeyError, ValueError):
        return None
