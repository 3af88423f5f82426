"""A release's plan as curves over the uplink's bandwidth: what each row of the table takes, which is best, and where a
device is on them now.

The arithmetic is `edgesplit.plan`'s, which agents choose by: a page that draws these points computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from edgesplit.plan import Conditions, Link, Plan, Row, cost, latency_s, link_s

POINTS = 97
FAR = 300.0
"""A switch between rows farther than this from the planned link is of no interest to people."""
AROUND = 10.0
"""The picture reaches this far beyond the planned link, and `BEYOND` beyond the device's own."""
BEYOND = 2.0


def curves(plan: Plan, now: Link | None = None) -> dict[str, Any]:
    """The table of a plan at the round trip of `now`, or of the planned link where that is not known."""
    link = msgspec.structs.replace(plan.link, rtt_s=now.rtt_s) if now is not None else plan.link
    rates = bandwidths(plan.link.up_bytes_per_s, now.up_bytes_per_s if now is not None else None)
    lines = {row.name: [_cost(plan, row, link, rate) for rate in rates] for row in plan.rows}
    return {
        "model": plan.model,
        "device_class": plan.device_class,
        "objective": plan.objective,
        "unit": _unit(plan),
        "basis": plan.basis.rstrip(":"),
        "fallback": plan.fallback,
        "limits": plan.limits,
        "tiers": list(plan.tiers or ("device", "cloud")),
        "link": _shown_link(plan.link),
        "rtt_s": link.rtt_s,
        "up_bytes_per_s": rates,
        "best": best_rows(lines, len(rates)),
        "rows": [{**shown_row(row, plan.link), "line": lines[row.name]} for row in plan.rows],
        "gain": gain(plan),
    }


def bandwidths(planned: float, now: float | None = None) -> list[float]:
    """Bytes per second, evenly spread on a logarithmic axis, around the planned link and the one measured now."""
    low, high = planned / AROUND, planned * AROUND
    if now is not None and planned / FAR < now < planned * FAR:
        low, high = min(low, now / BEYOND), max(high, now * BEYOND)
    step = math.log(high / low) / (POINTS - 1)
    return [low * math.exp(step * place) for place in range(POINTS)]


def best_rows(lines: Mapping[str, Sequence[float]], points: int) -> list[str]:
    """The name of the row that is best at each point."""
    return [min(lines, key=lambda name: lines[name][place]) for place in range(points)] if lines else []


def shown_row(row: Row, link: Link) -> dict[str, Any]:
    """One row with what it takes on the planned link, split into device, link and remote."""
    return {
        "name": row.name,
        "after": row.after,
        "local": row.is_local,
        "codecs": sorted(set(row.codecs.values())),
        "compress": row.compress,
        "loss": row.loss,
        "up_bytes": row.up_bytes,
        "device_s": row.device_s + row.encode_s,
        "link_s": link_s(row, link),
        "remote_s": row.decode_s + row.remote_s + row.beyond_s,
        "total_s": latency_s(row, Conditions(link=link)),
    }


def gain(plan: Plan) -> dict[str, float | str | None]:
    """What the best row of the planned link saves over all-local and all-remote, as factors of the objective; None for
    a mode that the table does not hold."""
    here = Conditions(link=plan.link)
    value = {row.name: cost(row, here, plan.weights, plan.power) for row in plan.rows}
    best = min(value, key=lambda name: value[name])
    remote = [value[row.name] for row in plan.rows if not row.device and not row.is_local]
    local = [value[row.name] for row in plan.rows if row.is_local]
    return {"best": best, "over_local": _factor(local, value[best]), "over_remote": _factor(remote, value[best])}


def _factor(values: Sequence[float], best: float) -> float | None:
    return min(values) / best if values and best > 0 else None


def _cost(plan: Plan, row: Row, link: Link, up_bytes_per_s: float) -> float:
    here = Conditions(link=msgspec.structs.replace(link, up_bytes_per_s=up_bytes_per_s))
    return cost(row, here, plan.weights, plan.power)


def _unit(plan: Plan) -> str:
    """`s`, `J`, or nothing where several are weighed against each other."""
    if not plan.weights or set(plan.weights) <= {"latency", "throughput"}:
        return "s"
    return "J" if set(plan.weights) == {"energy"} else ""


def _shown_link(link: Link) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(link)
    return shown
