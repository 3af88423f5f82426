"""A plan as one JSON value for people and scripts: the output of `edgectl plan --json` and of the API."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from edgesplit.plan import Link, link_s
from edgesplit_partitioner.costs.intervals import row_interval
from edgesplit_partitioner.costs.model import Costs
from edgesplit_partitioner.formulation.constraints import Limits
from edgesplit_partitioner.formulation.tiers import Links, VaryingLink
from edgesplit_partitioner.planner.alternatives import Candidate
from edgesplit_partitioner.planner.early_exit import ExitPlan
from edgesplit_partitioner.planner.planner import PlanResult, plan

ROW_FIELDS = (
    "name", "split_after", "sends", "receives", "codecs", "compress", "device_s", "encode_s", "up_bytes", "down_bytes",
    "decode_s", "remote_s",
)  # fmt: skip


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
    return _described(plan(costs, links, objective=objective, limits=limits, codecs=allowed))


def describe_exit(planned: ExitPlan) -> dict[str, Any]:
    """The plan of a model with an early exit, as `describe` returns one, and the exit with its price as `exit`."""
    return _described(planned.result) | {"exit": msgspec.to_builtins(planned.planned)}


def _described(made: PlanResult) -> dict[str, Any]:
    costs, candidates = made.costs, made.candidates()
    return made.to_builtins() | {
        "device_class": costs.device_class,
        "basis": dict(costs.basis),
        "best": made.row.name,
        "candidates": [_candidate(candidate, made) for candidate in candidates],
        "pictures": [msgspec.to_builtins(picture) for picture in pictures(costs, candidates, made.link)],
        "ranges": [_range(name, rates) for name, rates in _by_rate(made)],
        "rows": [_row_name(row) for row in made.table.rows],
    }


class SentPicture(msgspec.Struct, frozen=True, kw_only=True):
    """A model input that most likely is a picture, and what all-remote would take if it went as a JPEG."""

    input: str
    bytes: int
    """Its size as numbers."""
    jpeg_bytes: int
    input_spec: str
    seconds: float
    """Latency of all-remote with the JPEG, which is decoded there in no time."""
    hides_the_cloud: bool
    """All-remote is slower than the best cut as it is priced, and would be faster with the JPEG."""


def pictures(costs: Costs, candidates: Iterable[Candidate], link: Link) -> list[SentPicture]:
    """The inputs that most likely are pictures sent as numbers; empty where all-remote is not among the candidates."""
    found = list(candidates)
    remote = next((candidate for candidate in found if candidate.allowed and not candidate.row.layers), None)
    if remote is None:
        return []
    sent: list[SentPicture] = []
    for name, picture in costs.pictures.items():
        others = sum(cost.bytes for other, cost in costs.inputs.items() if other != name and other in remote.row.sends)
        fewer = remote.row.up_bytes - others - picture.jpeg_bytes
        seconds = remote.seconds - max(fewer, 0) / link.up_bytes_per_s
        best_s = min(candidate.seconds for candidate in found if candidate.allowed)
        sent.append(
            SentPicture(
                input=name, bytes=costs.inputs[name].bytes, jpeg_bytes=picture.jpeg_bytes,
                input_spec=picture.input_spec, seconds=seconds, hides_the_cloud=seconds < best_s < remote.seconds,
            )
        )  # fmt: skip
    return sent


def _candidate(candidate: Candidate, made: PlanResult) -> dict[str, Any]:
    row = candidate.row
    fields = {name: msgspec.to_builtins(getattr(row, name)) for name in ROW_FIELDS}
    hops = {"hops": msgspec.to_builtins(row.hops)} if row.hops else {}
    return {
        **fields,
        **hops,
        "link_s": link_s(row, made.link) + row.further_links_s,
        "total_s": candidate.seconds,
        "value": candidate.value,
        "between": msgspec.to_builtins(row_interval(made.costs, made.tiers, row, candidate.seconds)),
        "allowed": candidate.allowed,
        "in_table": candidate.in_table,
        "layers": len(row.layers),
        "remote_layers": len(row.remote),
    }


def _by_rate(made: PlanResult) -> list[tuple[str, tuple[float, float] | None]]:
    """Rows with their ranges, from the fastest uplink they are best at to the slowest; those best nowhere last."""
    return sorted(made.ranges.items(), key=lambda item: -item[1][1] if item[1] else math.inf)


def _range(name: str, rates: tuple[float, float] | None) -> dict[str, Any]:
    if rates is None:
        return {"name": name, "from_bytes_per_s": None, "to_bytes_per_s": None, "best_somewhere": False}
    slowest, fastest = rates
    most = fastest if math.isfinite(fastest) else None
    return {"name": name, "from_bytes_per_s": slowest, "to_bytes_per_s": most, "best_somewhere": True}


def _row_name(row: Any) -> dict[str, Any]:
    return {"name": row.name, "split_after": row.split_after, "compress": row.compress, "up_bytes": row.up_bytes}
