"""`plan`: costs and links in, the best cut and the switching table out. Pure; nothing is measured or sent here.

Two tiers and mean latency, exactly: a minimum cut per way of sending, compared with all-local, the round trip added
to whatever crosses. What the cuts are made of is `problem`, which of them limits allow is `side_limits`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from edgesplit import plan as words
from edgesplit.errors import UsageError
from edgesplit.plan import Link, Row
from edgesplit_partitioner.costs import Costs
from edgesplit_partitioner.envelope import lower_envelope
from edgesplit_partitioner.search import Links, Search, line_of
from edgesplit_partitioner.side_limits import Limits, as_limits

OBJECTIVES = ("latency",)


@dataclass(frozen=True, slots=True)
class Certificate:
    """How sure the answer is, and what the pure modes cost, in seconds; None where a tier cannot run every layer."""

    lower_bound: float
    """No cut within the limits is faster."""
    gap: float
    """How far above the bound the plan is, as a part of its seconds; 0 but for the noise of adding doubles."""
    all_local: float | None
    all_remote: float | None
    """Compressed or not, whichever is faster."""


@dataclass(frozen=True)
class Plan:
    """The best cut for one link, with its proof; `table` holds the cuts for all other links."""

    costs: Costs = field(repr=False)
    tiers: tuple[str, str]
    link: Link
    limits: Limits
    codecs: tuple[str, ...]
    objective: str
    cut: dict[str, tuple[str, ...]]
    """Layer names by tier."""
    seconds: float
    joules: float | None
    """Of the device's layers; None where the costs have none for one of them."""
    bytes: int
    """Up and down."""
    split: dict[str, float]
    """`seconds` as device, encode, link, decode and remote."""
    certificate: Certificate
    gain: float | None
    """How many times faster than the better of the pure modes that the limits allow; None if they allow neither."""
    _best: Row = field(repr=False)
    _search: Search = field(repr=False, compare=False)

    @cached_property
    def row(self) -> Row:
        """The best cut as it stands in the table."""
        return next(
            row for row in self.table.rows if row.layers == self._best.layers and row.compress == self._best.compress
        )

    @cached_property
    def table(self) -> words.Plan:
        """The switching table: every cut that is best at some uplink bandwidth, computed when first asked for.

        Exact for every round trip at the link's downlink rate; all-local is among the rows unless it cannot run or
        the fallback is `none`.
        """
        rows = self._search.rows
        return words.Plan(
            model=self.costs.model,
            device_class=self.costs.device_class,
            rows=rows,
            link=self.link,
            fallback=self.limits.fallback if any(row.is_local for row in rows) else "none",
            objective=self.objective,
            limits=self.limits.as_text(),
            never_leaves=self._search.raw_tensors if self.limits.keep_raw_input else (),
            basis=(self.costs.basis.get(self.tiers[0], "").split() or ["predicted"])[0],
            forced=rows[0].name if self.limits.forced else "",
        )

    @cached_property
    def ranges(self) -> dict[str, tuple[float, float] | None]:
        """Per row of the table: the uplink bytes per second at which it is best at the planned round trip.

        None for a row that is best nowhere, kept as a fallback or for shorter round trips.
        """
        lines = [line_of(row, self.link, self.link.rtt_s, row.name) for row in self.table.rows]
        best = {one.line.what: (_rate(one.end), _rate(one.start)) for one in lower_envelope(lines)}
        return {row.name: best.get(row.name) for row in self.table.rows}

    def to_builtins(self) -> dict[str, Any]:
        """Everything as plain values, for JSON. An infinite bandwidth becomes null."""
        ranges = {
            name: None if found is None else [rate if math.isfinite(rate) else None for rate in found]
            for name, found in self.ranges.items()
        }
        plain = {
            "model": self.costs.model,
            "tiers": self.tiers,
            "link": self.link,
            "objective": self.objective,
            "limits": self.limits.as_text(),
            "row": self.row.name,
            "cut": self.cut,
            "seconds": self.seconds,
            "joules": self.joules,
            "bytes": self.bytes,
            "split": self.split,
            "certificate": self.certificate,
            "gain": self.gain,
            "ranges": ranges,
            "table": self.table,
        }
        return {name: msgspec.to_builtins(value) for name, value in plain.items()}


def plan(
    costs: Costs,
    links: Links,
    *,
    objective: str = "latency",
    limits: Limits | Mapping[str, Any] | None = None,
    codecs: Iterable[str] | None = None,
) -> Plan:
    """The cut of least latency from the first input byte to the last answer, and the table of cuts around it.

    `links` names the two tiers, as in
    `{"device-cloud": {"up_bytes_per_s": 1e6, "down_bytes_per_s": 1e6, "rtt_s": 0.04}}`.
    UsageError where something cannot be read or is not known yet, InfeasibleLimits where no cut keeps the limits.
    """
    if objective not in OBJECTIVES:
        raise UsageError(f"objective {objective!r} is not supported; supported: {', '.join(OBJECTIVES)}")
    search = Search.of(costs, links, as_limits(limits), codecs)
    row, link = search.best, search.link
    seconds = search.seconds(row)
    local, remote = search.pure_s
    bound = min(search.lower_bound, seconds)
    return Plan(
        costs=costs,
        tiers=(search.problem.device, search.problem.remote),
        link=link,
        limits=search.limits,
        codecs=search.codecs,
        objective=objective,
        cut={search.problem.device: row.device, search.problem.remote: row.remote},
        seconds=seconds,
        joules=row.device_joules,
        bytes=row.up_bytes + row.down_bytes,
        split={
            "device": row.device_s,
            "encode": row.encode_s,
            "link": words.link_s(row, link),
            "decode": row.decode_s,
            "remote": row.remote_s,
        },
        certificate=Certificate(bound, (seconds - bound) / seconds if seconds else 0.0, local, remote),
        gain=search.better_pure_s / seconds if search.better_pure_s and seconds else None,
        _best=row,
        _search=search,
    )


def _rate(x: float) -> float:
    """Bytes per second of x seconds per byte."""
    return 1.0 / x if x else math.inf
