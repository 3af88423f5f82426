"""One planning question on two tiers: what was asked, checked, and the searches that answer it.

`best` is one minimum cut per way of sending; `rows` is the lower envelope over uplink bandwidth, searched only when
asked for. `planner` turns them into a Plan, `candidates` into a table for people.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import msgspec
import numpy as np

from edgesplit import plan as words
from edgesplit.errors import UsageError
from edgesplit.limits import LIMITS
from edgesplit.plan import REMOTE, Conditions, Link, Row
from edgesplit_partitioner.costs import Costs
from edgesplit_partitioner.envelope import Line, explore, lower_envelope, thinned
from edgesplit_partitioner.mincut import TIE, Mask
from edgesplit_partitioner.problem import RAW, ZSTD, Problem, Solution
from edgesplit_partitioner.side_limits import Limits, Sides, sides

CODECS = (RAW, ZSTD)
Links = Mapping[str, Link | Mapping[str, Any]]
What = TypeVar("What")


@dataclass(frozen=True)
class Search:
    """A question that was checked. Make it with `Search.of`."""

    problem: Problem
    link: Link
    limits: Limits
    codecs: tuple[str, ...]
    sides: Sides
    """Where layers must run, the forced cut included."""
    unforced: Sides
    """The same without the forced cut."""

    @classmethod
    def of(cls, costs: Costs, links: Links, limits: Limits, codecs: Iterable[str] | None) -> Search:
        """The question, or UsageError or InfeasibleLimits."""
        device, remote, link = _two_tiers(costs, links)
        if not costs.layers:
            raise UsageError("costs: there are no layers to plan")
        unforced = sides(costs, limits, device, remote, force=False)
        both = sides(costs, limits, device, remote) if limits.forced else unforced
        allowed = _codecs(codecs)
        problem = Problem.of(costs, device, remote, frozenset(allowed))
        return cls(problem, link, limits, allowed, both, unforced)

    def seconds(self, row: Row) -> float:
        """Latency on the planned link: the same arithmetic as on the device."""
        return words.latency_s(row, Conditions(link=self.link))

    @cached_property
    def best(self) -> Row:
        """The fastest cut on the planned link."""
        return self.problem.row(self._best.on_device, self._best.compress)

    @cached_property
    def lower_bound(self) -> float:
        """No allowed cut is faster: what crosses pays the round trip, and only all-local crosses nothing."""
        crossing = min(one.lower_bound for one in self._fastest) + self.link.rtt_s
        return min(crossing, self.figures_s(self.everything)) if self.sides.allow(self.everything) else crossing

    @cached_property
    def pure_s(self) -> tuple[float | None, float | None]:
        """Seconds of all-local and of all-remote, None where a layer cannot run there."""
        tiers = sides(self.problem.costs, Limits(), self.problem.device, self.problem.remote)
        local = self.figures_s(self.everything) if tiers.allow(self.everything) else None
        remote = min(self.figures_s(self.nothing, way) for way in self.problem.ways)
        return local, remote if tiers.allow(self.nothing) else None

    @property
    def better_pure_s(self) -> float | None:
        """Seconds of the better pure mode of those that the limits allow; a forced cut is no limit."""
        both = zip((self.everything, self.nothing), self.pure_s, strict=True)
        allowed = (took for mask, took in both if took is not None and self.unforced.allow(mask))
        return min(allowed, default=None)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The table: every cut that is best at some uplink bandwidth without round trip, the best one, and all-local.

        A forced cut stands alone, with all-local behind it as its fallback. A table that would outgrow a release
        loses the rows that are missed least.
        """
        kept = [self._line(self._best)]
        if not self.limits.forced:
            envelope = thinned([one.line for one in lower_envelope(self._explored())], LIMITS.rows - 2)
            kept += [line for line in envelope if not _same_line(line, kept[0])]
        local = self._line(Solution(self.everything, False, 0.0))
        if self.limits.fallback != "none" and self.unforced.allow(self.everything):
            kept.append(local)
        ordered = sorted(kept, key=lambda line: (bool(line.what.on_device.all()), -line.b, line.a))
        forced_first = kept if self.limits.forced else ordered
        return _named(_unique(self.problem.row(line.what.on_device, line.what.compress) for line in forced_first))

    @cached_property
    def raw_tensors(self) -> tuple[str, ...]:
        """What `keep_raw_input` holds on the device, in the order of the costs."""
        return tuple(name for name in self.problem.tensors if name in self.problem.costs.raw)

    @cached_property
    def everything(self) -> Mask:
        """All layers on the device."""
        return np.ones(len(self.problem.layers), dtype=np.bool_)

    @property
    def nothing(self) -> Mask:
        """No layer on the device."""
        return ~self.everything

    def figures_s(self, on_device: Mask, compress: bool = False) -> float:
        """Seconds of a cut on the planned link."""
        return self._seconds(Solution(on_device, compress, 0.0))

    def _seconds(self, solution: Solution) -> float:
        line = self._line(solution)
        crosses = not solution.on_device.all()
        return line.at(1.0 / self.link.up_bytes_per_s) + (self.link.rtt_s if crosses else 0.0)

    @cached_property
    def _fastest(self) -> list[Solution]:
        return self.problem.fastest(self.link, self.sides)

    @cached_property
    def _best(self) -> Solution:
        """Of the cuts found and all-local the fastest; equals go to fewer bytes, then to more on the device."""
        found = list(self._fastest)
        if self.sides.allow(self.everything):
            found.append(Solution(self.everything, False, 0.0))
        seconds = [self._seconds(one) for one in found]
        equal = [one for one, took in zip(found, seconds, strict=True) if took <= min(seconds) * (1 + 10 * TIE)]
        return min(equal, key=lambda one: (self._bytes(one), np.count_nonzero(~one.on_device)))

    def _bytes(self, solution: Solution) -> int:
        figures = self.problem.figures(solution.on_device, solution.compress)
        return figures.up_bytes + figures.down_bytes

    def _line(self, solution: Solution) -> Line[Solution]:
        return line_of(self.problem.figures(solution.on_device, solution.compress), self.link, 0.0, solution)

    def _explored(self) -> list[Line[Solution]]:
        """Every cut that is lowest at some x = 1/bandwidth."""
        endless = msgspec.structs.replace(self.link, up_bytes_per_s=math.inf)
        steep = map(self._line, self.problem.fastest(endless, self.sides))
        flat = map(self._line, self.problem.fewest_bytes(self.link, self.sides))

        def lowest(x: float) -> Line[Solution]:
            found = map(self._line, self.problem.roughly_fastest(self.link, self.sides, x))
            return min(found, key=lambda line: line.at(x))

        return explore(
            lowest, min(steep, key=lambda line: (line.a, line.b)), min(flat, key=lambda line: (line.b, line.a))
        )


def line_of(row: Row, link: Link, rtt_s: float, what: What) -> Line[What]:
    """A row's seconds over x = 1/uplink bandwidth, at the link's downlink rate."""
    down_s = row.down_bytes / link.down_bytes_per_s
    fixed_s = row.device_s + row.encode_s + row.decode_s + row.remote_s
    crosses = row.remote or row.up_bytes or row.down_bytes
    return Line(fixed_s + down_s + (rtt_s if crosses else 0.0), float(row.up_bytes), what)


def _same_line(one: Line[Solution], other: Line[Solution]) -> bool:
    return one.b == other.b and math.isclose(one.a, other.a, rel_tol=10 * TIE)


def _unique(rows: Iterable[Row]) -> list[Row]:
    """Each cut once per way of sending."""
    return list({(row.layers, row.compress): row for row in rows}.values())


def _named(rows: list[Row]) -> tuple[Row, ...]:
    """`cut-1` is the most remote; a second all-remote row is the compressed one."""
    named: dict[str, Row] = {}
    cuts = 0
    for row in rows:
        name = row.name
        if not name:
            cuts += 1
            name = f"cut-{cuts}"
        elif name == REMOTE and REMOTE in named:
            name = "remote-zstd"
        named[name] = msgspec.structs.replace(row, name=name)
    return tuple(named.values())


def _codecs(given: Iterable[str] | None) -> tuple[str, ...]:
    """The codecs to plan with; all lossless ones by default."""
    wanted = CODECS if given is None else tuple(dict.fromkeys([given] if isinstance(given, str) else given))
    unknown = [codec for codec in wanted if codec not in CODECS]
    if unknown or not wanted:
        raise UsageError(f"codecs {unknown or 'none'} not supported; supported: {', '.join(CODECS)}")
    return wanted


def _two_tiers(costs: Costs, links: Links) -> tuple[str, str, Link]:
    """The device, the tier beyond its link, and the link."""
    if not isinstance(links, Mapping) or len(links) != 1:
        raise UsageError(f"one link is supported, as in {{'{costs.tiers[0]}-{costs.tiers[-1]}': ...}}: two tiers")
    (name, given), device = next(iter(links.items())), costs.tiers[0]
    remote = next((tier for tier in costs.tiers[1:] if name == f"{device}-{tier}"), "")
    if not remote:
        known = ", ".join(f"{device}-{tier}" for tier in costs.tiers[1:])
        raise UsageError(f"link {name!r} joins no two tiers of these costs; supported: one of {known}")
    return device, remote, _as_link(name, given)


def _as_link(name: str, given: Link | Mapping[str, Any]) -> Link:
    try:
        link = given if isinstance(given, Link) else msgspec.convert(given, Link)
    except msgspec.ValidationError as error:
        raise UsageError(f"link {name!r}: {error}") from error
    rates = (link.up_bytes_per_s, link.down_bytes_per_s)
    if not all(rate > 0 for rate in rates) or not 0 <= link.rtt_s < math.inf:
        raise UsageError(f"link {name!r}: rates must be above 0 and the round trip at least 0, not {link}")
    return link
