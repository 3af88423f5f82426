"""A plan as one JSON value for people and scripts: what `edgectl plan --json` prints and the API answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from edgesplit.plan import Link, link_s
from edgesplit_partitioner.costs.intervals import of_row
from edgesplit_partitioner.costs.model import Costs
from edgesplit_partitioner.formulation.constraints import Limits
from edgesplit_partitioner.formulation.tiers import Links, VaryingLink
from edgesplit_partitioner.planner.alternatives import Candidate
from edgesplit_partitioner.planner.planner import Plan, plan

SHOWN = ("name", "after", "sends", "receives", "codecs", "compress", "device_s", "encode_s", "up_bytes", "down_bytes")
TIMES = ("decode_s", "remote_s")


def describe(
    costs: Costs,
    link: Link | VaryingLink | Links,
    *,
    objective: str | Mapping[str, float] = "latency",
    limits: Limits | Mapping[str, Any] | None = None,
    codecs: Iterable[str] | None = None,
) -> dict[str, Any]:
    """The plan with its candidates, ranges and certificate. Seconds, bytes, bytes per second; null is unbounded.

    `link` is that between the device and the last tier, or all links by the tiers they join, as `plan` takes them.
    """
    links = link if isinstance(link, Mapping) else {f"{costs.tiers[0]}-{costs.tiers[-1]}": link}
    allowed = tuple(codecs) if codecs else None
    made = plan(costs, links, objective=objective, limits=limits, codecs=allowed)
    return made.to_builtins() | {
        "device_class": costs.device_class,
        "basis": dict(costs.basis),
        "best": made.row.name,
        "candidates": [_candidate(one, made) for one in made.candidates()],
        "ranges": [_range(name, found) for name, found in _by_rate(made)],
        "rows": [_row_name(row) for row in made.table.rows],
    }


def _candidate(one: Candidate, made: Plan) -> dict[str, Any]:
    row = {name: msgspec.to_builtins(getattr(one.row, name)) for name in (*SHOWN, *TIMES)}
    times = {"link_s": link_s(one.row, made.link) + one.row.beyond_s, "total_s": one.seconds, "value": one.value}
    hops = {"hops": msgspec.to_builtins(one.row.hops)} if one.row.hops else {}
    return (
        row
        | hops
        | times
        | {
            "between": msgspec.to_builtins(of_row(made.costs, made.tiers, one.row, one.seconds)),
            "allowed": one.allowed,
            "in_table": one.in_table,
            "layers": len(one.row.layers),
            "remote_layers": len(one.row.remote),
        }
    )


def _by_rate(made: Plan) -> list[tuple[str, tuple[float, float] | None]]:
    """Rows from the fastest uplink they are best at to the slowest; those best nowhere last."""
    return sorted(made.ranges.items(), key=lambda item: -item[1][1] if item[1] else math.inf)


def _range(name: str, found: tuple[float, float] | None) -> dict[str, Any]:
    if found is None:
        return {"name": name, "from_bytes_per_s": None, "to_bytes_per_s": None, "best_somewhere": False}
    slowest, fastest = found
    fast = fastest if math.isfinite(fastest) else None
    return {"name": name, "from_bytes_per_s": slowest, "to_bytes_per_s": fast, "best_somewhere": True}


def _row_name(row: Any) -> dict[str, Any]:
    return {"name": row.name, "after": row.after, "compress": row.compress, "up_bytes": row.up_bytes}
