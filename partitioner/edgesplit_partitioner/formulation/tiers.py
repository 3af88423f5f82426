"""The tiers of a plan and the links between neighbours: what a caller gave, read and checked.

A link may vary: a bandwidth given as a sequence is a trace or a sample, each entry as likely as the others or as its
weight says. Everything here works on seconds per byte, for it is those that add up: the mean of a varying link is the
mean of 1/bandwidth, its p95 that of 1/bandwidth.
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
from edgesplit_partitioner.algorithms.mincut import Floats
from edgesplit_partitioner.costs.model import Costs, plain
from edgesplit_partitioner.formulation.radio_energy import RADIOS, Radio

P95 = 0.95
LEAST_RATE = 1e-100
"""Bytes per second. Below it the seconds of a file are no number."""
_SAME_ORDER = 1e-12
"""Seconds per byte that differ by less than this part are equal when moments are put in order."""


class VaryingLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A link as a caller may describe it: fixed or varying, with the radio that the device reaches it by."""

    up_bytes_per_s: float | tuple[float, ...]
    """One rate, or one per moment."""
    down_bytes_per_s: float | tuple[float, ...]
    """The same; where both directions vary, their moments are the same ones."""
    rtt_s: float
    name: str = ""
    weights: tuple[float, ...] = ()
    """By moment, how often it is seen. Empty: all alike."""
    radio: Radio | str | None = None
    """Of the device, so read on the first link only: figures, or one of `radio.RADIOS` by name."""


Links = Mapping[str, "Link | VaryingLink | Mapping[str, Any]"]


@dataclass(frozen=True)
class TierLink:
    """A checked link between two neighbouring tiers."""

    name: str
    rtt_s: float
    up: Floats
    """Seconds per byte upwards, by moment: one of them, or as many as `down` and `weights` have."""
    down: Floats
    weights: Floats
    """By moment, its part of the time; their sum is 1."""
    given: Link
    """What it is called, and its rates where it does not vary."""
    radio: Radio | None

    @property
    def varies(self) -> bool:
        """More than one moment that differs."""
        return bool(np.ptp(self.up) > 0 or np.ptp(self.down) > 0)

    @cached_property
    def mean(self) -> Link:
        """The link whose seconds per byte are the mean ones: its rates are harmonic means."""
        if not self.varies:
            return self.given
        return self._link(float(self.up @ self.weights), float(self.down @ self.weights))

    @cached_property
    def moves_as_one(self) -> bool:
        """Both directions are slow at the same moments, so that one of them says how slow both are."""
        order = np.lexsort((self.down, self.up))
        up, down = self.up[order], self.down[order]
        return bool((np.diff(down) >= -_SAME_ORDER * down[1:]).all() or np.ptp(up) == 0)

    def at(self, part: float) -> Link:
        """The link whose seconds per byte are, in each direction, those not exceeded for this part of the time."""
        if not self.varies:
            return self.given
        return self._link(quantile(self.up, self.weights, part), quantile(self.down, self.weights, part))

    def _link(self, up_s: float, down_s: float) -> Link:
        return msgspec.structs.replace(self.given, up_bytes_per_s=_rate(up_s), down_bytes_per_s=_rate(down_s))


@dataclass(frozen=True)
class Chain:
    """Ordered tiers and the link between each pair of neighbours."""

    tiers: tuple[str, ...]
    links: tuple[TierLink, ...]

    @property
    def varying(self) -> tuple[TierLink, ...]:
        """Those that vary."""
        return tuple(link for link in self.links if link.varies)

    @property
    def mean(self) -> tuple[Link, ...]:
        """Each at its mean."""
        return tuple(link.mean for link in self.links)

    def at(self, part: float) -> tuple[Link, ...]:
        """Each at the same quantile of its own."""
        return tuple(link.at(part) for link in self.links)


def quantile(values: Floats, weights: Floats, part: float) -> float:
    """The least value that is not exceeded for this part of the weight: no interpolation, so max() is part 1."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    # A sum of weights falls short of the part it means by its rounding.
    place = int(np.searchsorted(reached, part * reached[-1] * (1 - 1e-12)))
    return float(values[order[min(place, len(values) - 1)]])


def chain_of(costs: Costs, links: Links) -> Chain:
    """The tiers that the links join, from the device outwards; UsageError where they join none, or leave a gap."""
    device, example = costs.tiers[0], f"{costs.tiers[0]}-{costs.tiers[-1]}"
    if not isinstance(links, Mapping) or not links:
        raise UsageError(f"one link is supported between each pair of neighbouring tiers, as in {{'{example}': ...}}")
    tiers, found, left = [device], [], dict(links)
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
        found.append(_tier_link(name, left.pop(name)))
        tiers.append(beyond)
    return Chain(tuple(tiers), tuple(found))


def _tier_link(name: str, given: Link | VaryingLink | Mapping[str, Any]) -> TierLink:
    figures = msgspec.structs.asdict(given) if isinstance(given, Link | VaryingLink) else given
    try:
        link = msgspec.convert(plain(figures), VaryingLink)
    except msgspec.ValidationError as error:
        raise UsageError(f"link {name!r}: {error} (known: {', '.join(VaryingLink.__struct_fields__)})") from error
    rates = [np.atleast_1d(np.asarray(rate, np.float64)) for rate in (link.up_bytes_per_s, link.down_bytes_per_s)]
    moments = max(map(len, rates))
    weights = np.asarray(link.weights or np.ones(moments), np.float64)
    if any(len(rate) not in (1, moments) for rate in rates) or len(weights) != moments or min(map(len, rates)) == 0:
        raise UsageError(f"link {name!r}: rates up, rates down and weights must be as many as each other, or one")
    if not all((rate > LEAST_RATE).all() for rate in rates) or not 0 <= link.rtt_s < math.inf:
        raise UsageError(
            f"link {name!r}: rates must be above 0 and the round trip at least 0, not {given} "
            "(a trace with dead moments has no mean: give them the rate at which you would wait)"
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
