"""What a plan is to be least in, as prices that add up: so much per layer and tier, per tensor and link, per tier
reached.

Latency adds up the layers' seconds, encoding, bytes over rates, decoding, and a round trip per link crossed; device
energy is `edgesplit.plan.energy_j`, term by term; weights make one price of both. The p95 of latency is latency at the
p95 of a link's seconds per byte: exact where one link varies, since latency grows with it; `risk` has the other case.
Throughput is not a sum and is left to `milp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgesplit.errors import UsageError
from edgesplit.plan import Link, Power
from edgesplit_partitioner.algorithms.mincut import Floats
from edgesplit_partitioner.costs.model import plain
from edgesplit_partitioner.formulation.mincut_problem import Price, Problem, Travel

LATENCY, P95, ENERGY, THROUGHPUT = "latency", "latency_p95", "energy", "throughput"
OBJECTIVES = (LATENCY, P95, ENERGY, THROUGHPUT)
MOST_WEIGHT = 1e100


@dataclass(frozen=True, slots=True)
class Objective:
    """A weighted sum: per second of mean latency, per second of its p95, per joule of the device."""

    latency: float = 0.0
    latency_p95: float = 0.0
    energy: float = 0.0
    throughput: float = 0.0
    name: str = LATENCY
    """As the caller spelt it; a weighted sum as `2*latency + 0.1*energy`."""

    @property
    def weights(self) -> dict[str, float]:
        """By name, those that count."""
        every = {one: float(getattr(self, one)) for one in OBJECTIVES}
        return {one: weight for one, weight in every.items() if weight}

    @property
    def row_weights(self) -> dict[str, float]:
        """As a table carries them; empty where latency alone counts. At run time the link is known: p95 is latency."""
        if not self.energy and not self.throughput:
            return {}
        some = {LATENCY: self.latency + self.latency_p95, ENERGY: self.energy, THROUGHPUT: self.throughput}
        return {name: weight for name, weight in some.items() if weight}


def as_objective(given: str | Mapping[str, float]) -> Objective:
    """What a caller asked for; UsageError names what is supported."""
    if not isinstance(given, str | Mapping):
        raise UsageError(f"objective: give one of {', '.join(OBJECTIVES)}, or a mapping of weights, not {given!r}")
    weights = {given: 1.0} if isinstance(given, str) else plain(given)
    spelt = {str(name).replace("-", "_"): weight for name, weight in weights.items()}
    unknown = [name for name in spelt if name not in OBJECTIVES]
    if unknown:
        raise UsageError(f"objective {unknown[0]!r} is not supported; supported: {', '.join(OBJECTIVES)}")
    if not all(isinstance(weight, int | float) and 0 <= weight < MOST_WEIGHT for weight in spelt.values()):
        raise UsageError(f"objective: weights must be numbers of at least 0 and below {MOST_WEIGHT:g}, not {weights}")
    if not any(spelt.values()):
        raise UsageError("objective: at least one weight must be above 0")
    if spelt.get(THROUGHPUT) and len([weight for weight in spelt.values() if weight]) > 1:
        raise UsageError("objective: throughput is not a sum, so it cannot be weighed against others")
    name = next(iter(spelt)) if isinstance(given, str) else " + ".join(f"{spelt[one]:g}*{one}" for one in spelt)
    return Objective(**spelt, name=name)


@dataclass(frozen=True, slots=True)
class Scene:
    """One state of the world that is priced: every link at one rate, servers and device slowed by factors."""

    links: tuple[Link, ...]
    load: float = 1.0
    slowdown: float = 1.0
    latency: float = 1.0
    """Weight of each second."""
    energy: float = 0.0
    """Weight of each joule."""

    def with_first(self, link: Link) -> Scene:
        """The same with another first link."""
        return replace(self, links=(link, *self.links[1:]))


def price(problem: Problem, scenes: Sequence[Scene], power: Power, compress: bool, x: float | None = None) -> Price:
    """The sum of what the scenes charge, for one way of sending. `x` replaces the first link's seconds per byte up."""
    parts = [_price(problem, scene, power, problem.way(compress), x) for scene in scenes]
    if len(parts) == 1:
        return parts[0]
    return Price(
        sum((part.layers for part in parts[1:]), parts[0].layers),
        sum((part.sending for part in parts[1:]), parts[0].sending),
        sum((part.reached for part in parts[1:]), parts[0].reached),
    )


def _price(problem: Problem, scene: Scene, power: Power, ways: tuple[Travel, ...], x: float | None) -> Price:
    latency, load = scene.latency, scene.load
    waited = latency + scene.energy * power.idle_watts
    ups = [1.0 / link.up_bytes_per_s for link in scene.links]
    ups[0] = ups[0] if x is None else x
    downs = [1.0 / link.down_bytes_per_s for link in scene.links]
    layers = problem.seconds * (waited * load)
    layers[0] = problem.seconds[0] * (latency * scene.slowdown)
    if scene.energy:
        layers[0] += np.nan_to_num(problem.joules) * (scene.energy * scene.slowdown)
    sending = np.empty((len(ways), len(problem.tensors)))
    per_answer_byte = 0.0
    for number, (way, up, down) in enumerate(zip(ways, ups, downs, strict=True)):
        per_byte, per_answer, encoding = waited * up, waited * down, waited * load
        if number == 0:
            encoding = (latency + scene.energy * power.busy_watts) * scene.slowdown
            per_byte += scene.energy * (power.radio_watts * up + power.up_joules_per_byte)
            per_answer += scene.energy * (power.radio_watts * down + power.down_joules_per_byte)
        sending[number] = encoding * way.encode_s + (waited * load) * way.decode_s + way.bytes * per_byte
        per_answer_byte += per_answer
        layers[number + 1] += problem.answer_bytes * per_answer_byte
    return Price(layers, sending, _reached(scene, power, waited))


def _reached(scene: Scene, power: Power, waited: float) -> Floats:
    """Per tier: the round trips below it, and waking the radio."""
    trips = np.array([link.rtt_s for link in scene.links]) * waited
    trips[0] += scene.energy * power.wake_joules
    return np.concatenate([[0.0], np.cumsum(trips)])
