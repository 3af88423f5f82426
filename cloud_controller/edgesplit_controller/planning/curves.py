"""A release's plan as curves over uplink bandwidth: the cost of each row of the table, the best row, and the current
position of a device.

The arithmetic is that of `edgesplit.plan`, by which agents select rows, so the page that draws these points computes
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from edgesplit.plan import Conditions, Link, Plan, Row, cost, latency_s, link_s

POINTS = 97
"""Points on the bandwidth axis."""
AXIS_LIMIT = 300.0
"""A change of the best row farther than this factor from the planned link is not shown."""
PLANNED_MARGIN = 10.0
"""The axis reaches this factor beyond the planned bandwidth on both sides."""
MEASURED_MARGIN = 2.0
"""The axis reaches this factor beyond the device's measured bandwidth."""


def curves(plan: Plan, now: Link | None = None) -> dict[str, Any]:
    """Curves of a plan, at the round-trip time of the measured link `now`, or of the planned link where that is not
    known."""
    link = msgspec.structs.replace(plan.link, rtt_s=now.rtt_s) if now is not None else plan.link
    rates = bandwidths(plan.link.up_bytes_per_s, now.up_bytes_per_s if now is not None else None)
    lines = {row.name: [_cost(plan, row, link, rate) for rate in rates] for row in plan.rows}
    return {
        "model": plan.model, "device_class": plan.device_class, "objective": plan.objective, "unit": _unit(plan),
        "basis": plan.basis.rstrip(":"), "fallback": plan.fallback, "limits": plan.limits,
        "tiers": list(plan.tiers or ("device", "cloud")), "link": msgspec.to_builtins(plan.link), "rtt_s": link.rtt_s,
        "up_bytes_per_s": rates, "best": best_rows(lines, len(rates)),
        "rows": [{**row_view(row, plan.link), "line": lines[row.name]} for row in plan.rows], "gain": gain(plan),
    }  # fmt: skip


def bandwidths(planned: float, now: float | None = None) -> list[float]:
    """Bytes per second, evenly spaced on a logarithmic axis, around the planned bandwidth and the one measured now."""
    low, high = planned / PLANNED_MARGIN, planned * PLANNED_MARGIN
    if now is not None and planned / AXIS_LIMIT < now < planned * AXIS_LIMIT:
        low, high = min(low, now / MEASURED_MARGIN), max(high, now * MEASURED_MARGIN)
    step = math.log(high / low) / (POINTS - 1)
    return [low * math.exp(step * index) for index in range(POINTS)]


def best_rows(lines: Mapping[str, Sequence[float]], points: int) -> list[str]:
    """The name of the best row at each point."""
    return [min(lines, key=lambda name: lines[name][index]) for index in range(points)] if lines else []


def row_view(row: Row, link: Link) -> dict[str, Any]:
    """One row with its seconds on the planned link, split into device, link and remote."""
    return {
        "name": row.name, "split_after": row.split_after, "local": row.is_local,
        "codecs": sorted(set(row.codecs.values())), "compress": row.compress, "loss": row.loss,
        "up_bytes": row.up_bytes, "device_s": row.device_s + row.encode_s, "link_s": link_s(row, link),
        "remote_s": row.decode_s + row.remote_s + row.further_links_s, "total_s": latency_s(row, Conditions(link=link)),
    }  # fmt: skip


def gain(plan: Plan) -> dict[str, float | str | None]:
    """What the best row at the planned link saves over all-local and all-remote, as factors of the objective; None for
    a placement that the table does not contain."""
    conditions = Conditions(link=plan.link)
    cost_of = {row.name: cost(row, conditions, plan.weights, plan.power) for row in plan.rows}
    best = min(cost_of, key=lambda name: cost_of[name])
    remote = [cost_of[row.name] for row in plan.rows if not row.device and not row.is_local]
    local = [cost_of[row.name] for row in plan.rows if row.is_local]
    return {"best": best, "over_local": _factor(local, cost_of[best]), "over_remote": _factor(remote, cost_of[best])}


def _factor(values: Sequence[float], best: float) -> float | None:
    return min(values) / best if values and best > 0 else None


def _cost(plan: Plan, row: Row, link: Link, up_bytes_per_s: float) -> float:
    conditions = Conditions(link=msgspec.structs.replace(link, up_bytes_per_s=up_bytes_per_s))
    return cost(row, conditions, plan.weights, plan.power)


def _unit(plan: Plan) -> str:
    """`s`, `J`, or empty where several objectives are weighed against each other."""
    if not plan.weights or set(plan.weights) <= {"latency", "throughput"}:
        return "s"
    return "J" if set(plan.weights) == {"energy"} else ""
