"""The tiers of a plan and the links between neighbours, read from a caller's values and checked.

A link may vary: a bandwidth given as a sequence is a bandwidth trace or a sample, each entry counted equally or by its
weight. All arithmetic is in seconds per byte, since those add up: the mean of a varying link is the mean of
1/bandwidth, its p95 the p95 of 1/bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from edgesplit.errors import UsageError
from edgesplit.plan import Link
from edgesplit_partitioner.arrays import Floats
from edgesplit_partitioner.costs.model import Costs, to_python_types
from edgesplit_partitioner.formulation.radio_energy import RADIOS, Radio

P95 = 0.95
MIN_RATE = 1e-100
"""Bytes per second. Below it the seconds of a file overflow."""
_SAME_ORDER = 1e-12
"""Seconds per byte that differ by less than this fraction are equal when moments are sorted."""


class VaryingLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A link as a caller may describe it: fixed or varying, with the radio that the device reaches it by."""

    up_bytes_per_s: float | tuple[float, ...]
    """One rate, or one per moment."""
    down_bytes_per_s: float | tuple[float, ...]
    """One rate, or one per moment; where both directions vary, their moments are the same ones."""
    rtt_s: float
    name: str = ""
    weights: tuple[float, ...] = ()
    """By moment, how often it occurs. Empty: all equally."""
    radio: Radio | str | None = None
    """Of the device, so read on the first link only: figures, or one of `radio_energy.RADIOS` by name."""


Links = Mapping[str, "Link | VaryingLink | Mapping[str, Any]"]
"""The links of a plan by the neighbouring tiers that each joins, as in `device-cloud`."""


@dataclass(frozen=True)
class TierLink:
    """A checked link between two neighbouring tiers."""

    name: str
    rtt_s: float
    up: Floats
    """Seconds per byte upwards, by moment."""
    down: Floats
    """Seconds per byte downwards, by moment."""
    weights: Floats
    """By moment, its fraction of the time; their sum is 1."""
    given: Link
    """The link as given: its name, and its rates where it does not vary."""
    radio: Radio | None

    @cached_property
    def varies(self) -> bool:
        """Whether the moments differ in either direction."""
        return bool(np.ptp(self.up) > 0 or np.ptp(self.down) > 0)

    @cached_property
    def mean(self) -> Link:
        """The link at its mean seconds per byte: its rates are harmonic means."""
        if not self.varies:
            return self.given
        return self._link(float(self.up @ self.weights), float(self.down @ self.weights))

    @cached_property
    def moves_as_one(self) -> bool:
        """Whether both directions are slow at the same moments, so that a quantile of one is that of the other too."""
        order = np.lexsort((self.down, self.up))
        up, down = self.up[order], self.down[order]
        return bool((np.diff(down) >= -_SAME_ORDER * down[1:]).all() or np.ptp(up) == 0)

    def at(self, fraction: float) -> Link:
        """The link at the seconds per byte that, in each direction, are not exceeded for this fraction of the time."""
        if not self.varies:
            return self.given
        return self._link(quantile(self.up, self.weights, fraction), quantile(self.down, self.weights, fraction))

    def _link(self, up_s: float, down_s: float) -> Link:
        return msgspec.structs.replace(self.given, up_bytes_per_s=_rate(up_s), down_bytes_per_s=_rate(down_s))


@dataclass(frozen=True)
class TierChain:
    """Ordered tiers and the link between each pair of neighbours."""

    tiers: tuple[str, ...]
    links: tuple[TierLink, ...]

    @property
    def varying(self) -> tuple[TierLink, ...]:
        """The links that vary."""
        return tuple(link for link in self.links if link.varies)

    @property
    def mean(self) -> tuple[Link, ...]:
        """Each link at its mean."""
        return tuple(link.mean for link in self.links)

    def at(self, fraction: float) -> tuple[Link, ...]:
        """Each link at this quantile of its own seconds per byte."""
        return tuple(link.at(fraction) for link in self.links)


def quantile(values: Floats, weights: Floats, fraction: float) -> float:
    """The least value that is not exceeded for this fraction of the weight: no interpolation, and 1 gives max()."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    # A running sum of weights may fall short of the fraction it stands for by its rounding error.
    place = int(np.searchsorted(reached, fraction * reached[-1] * (1 - 1e-12)))
    return float(values[order[min(place, len(values) - 1)]])


def parse_links(costs: Costs, links: Links) -> TierChain:
    """The tiers that the links join, from the device outwards; UsageError where they join none, or leave a gap."""
    device, example = costs.tiers[0], f"{costs.tiers[0]}-{costs.tiers[-1]}"
    if not isinstance(links, Mapping) or not links:
        raise UsageError(f"one link is supported between each pair of neighbouring tiers, as in {{'{example}': ...}}")
    tiers, tier_links, left = [device], list[TierLink](), dict(links)
    while left:
        rest = costs.tiers[costs.tiers.index(tiers[-1]) + 1 :]
        beyond = next((tier for tier in rest if f"{tiers[-1]}-{tier}" in left), "")
        if not beyond:
            known = ", ".join(f"{tiers[-1]}-{tier}" for tier in rest) or f"none, {tiers[-1]} is the last tier"
            raise UsageError(
                f"one link is supported between each pair of neighbours: {', '.join(map(repr, left))} joins no two "
                f"tiers of these costs, going out from {tiers[-1]!r}; supported: one of {known}"
            )
        name = f"{tiers[-1]}-{beyond}"
        tier_links.append(_tier_link(name, left.pop(name)))
        tiers.append(beyond)
    return TierChain(tuple(tiers), tuple(tier_links))


def _tier_link(name: str, given: Link | VaryingLink | Mapping[str, Any]) -> TierLink:
    figures = msgspec.structs.asdict(given) if isinstance(given, Link | VaryingLink) else given
    try:
        link = msgspec.convert(to_python_types(figures), VaryingLink)
    except msgspec.ValidationError as error:
        raise UsageError(f"link {name!r}: {error} (known: {', '.join(VaryingLink.__struct_fields__)})") from error
    rates = [np.atleast_1d(np.asarray(rate, np.float64)) for rate in (link.up_bytes_per_s, link.down_bytes_per_s)]
    moments = max(map(len, rates))
    weights = np.asarray(link.weights or np.ones(moments), np.float64)
    if any(len(rate) not in (1, moments) for rate in rates) or len(weights) != moments or min(map(len, rates)) == 0:
        raise UsageError(f"link {name!r}: rates up, rates down and weights must be as many as each other, or one")
    if not all((rate > MIN_RATE).all() for rate in rates) or not 0 <= link.rtt_s < math.inf:
        raise UsageError(
            f"link {name!r}: rates must be above 0 and the round trip at least 0, not {given} "
            "(a trace with moments of rate 0 has no mean: give those the lowest rate that you would wait for)"
        )
    if not (weights >= 0).all() or not 0 < weights.sum() < math.inf:
        raise UsageError(f"link {name!r}: weights must be at least 0, and some above")
    up, down = (np.broadcast_to(1.0 / rate, (moments,)) for rate in rates)
    as_given = Link(
        up_bytes_per_s=float(rates[0][0]), down_bytes_per_s=float(rates[1][0]), rtt_s=link.rtt_s, name=link.name
    )
    return TierLink(name, link.rtt_s, up, down, weights / weights.sum(), as_given, _radio(name, link.radio))


def _radio(link: str, given: Radio | str | None) -> Radio | None:
    if not isinstance(given, str):
        return given
    if given not in RADIOS:
        raise UsageError(f"link {link!r}: no radio is called {given!r}; known: {', '.join(RADIOS)}, or give figures")
    return RADIOS[given]


def _rate(seconds_per_byte: float) -> float:
    return 1.0 / seconds_per_byte if seconds_per_byte else math.inf
