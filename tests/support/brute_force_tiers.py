"""Plans for random graphs on any number of tiers by trying every assignment: slow, and written from the definition.

Independent of the planner: an assignment is walked layer by layer and tensor by tensor, and its charges are added up.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgesplit.plan import Link
from edgesplit_partitioner import Costs, load_costs

TIERS = ("device", "edge", "cloud", "far")


@dataclass(frozen=True)
class Radio:
    """Figures of Huang et al., in the units of the paper."""

    up_mw_per_mbps: float
    down_mw_per_mbps: float
    base_mw: float
    promotion_s: float
    promotion_mw: float
    tail_s: float
    tail_mw: float


@dataclass(frozen=True)
class Tried:
    """One assignment, one way of sending it, and what it moves."""

    tier_of: tuple[int, ...]
    compress: bool
    seconds_at: tuple[float, ...]
    """Layers' seconds by tier."""
    joules: float
    encode_s: tuple[float, ...]
    """By link, as all that follow."""
    decode_s: tuple[float, ...]
    up_bytes: tuple[int, ...]
    down_bytes: tuple[int, ...]

    @property
    def reach(self) -> int:
        """The furthest tier."""
        return max(self.tier_of)

    @property
    def rank(self) -> tuple[int, int]:
        """Among equals the lowest is to be taken: fewer bytes over all links, then nearer the device."""
        return sum(self.up_bytes) + sum(self.down_bytes), sum(self.tier_of)

    def link_s(self, links: Sequence[Link]) -> list[float]:
        """Seconds on each link crossed."""
        return [
            links[k].rtt_s + self.up_bytes[k] / links[k].up_bytes_per_s + self.down_bytes[k] / links[k].down_bytes_per_s
            for k in range(self.reach)
        ]

    def latency_s(self, links: Sequence[Link], load: float = 1.0, slowdown: float = 1.0) -> float:
        """From the input to the answer."""
        here = self.seconds_at[0] + self.encode_s[0]
        there = sum(self.seconds_at[1:]) + sum(self.encode_s[1:]) + sum(self.decode_s)
        return here * slowdown + there * load + sum(self.link_s(links))

    def energy_j(self, links: Sequence[Link], idle_w: float, busy_w: float, radio: Radio | None) -> float:
        """Of the device."""
        spent = self.joules + busy_w * self.encode_s[0]
        if self.reach == 0:
            return spent
        waited = self.latency_s(links) - self.seconds_at[0] - self.encode_s[0]
        spent += idle_w * waited
        if radio is not None:
            up_s = self.up_bytes[0] / links[0].up_bytes_per_s
            down_s = self.down_bytes[0] / links[0].down_bytes_per_s
            up_mbps, down_mbps = (rate * 8 / 1e6 for rate in (links[0].up_bytes_per_s, links[0].down_bytes_per_s))
            spent += up_s * (radio.up_mw_per_mbps * up_mbps + radio.base_mw) / 1e3
            spent += down_s * (radio.down_mw_per_mbps * down_mbps + radio.base_mw) / 1e3
            spent += (radio.promotion_s * radio.promotion_mw + radio.tail_s * radio.tail_mw) / 1e3
        return spent


def random_tier_costs(rng: random.Random, layers: int, tiers: int, *, bound: float = 0.0) -> Costs:
    """A graph with shared tensors, branches and several inputs and outputs; half of them with round numbers, so that
    equals are common. `bound` is the chance that a layer runs on some tiers only.
    """
    names, round_numbers = TIERS[:tiers], rng.random() < 0.5

    def figure(scale: float) -> float:
        return rng.randrange(0, 5) * scale / 2 if round_numbers else rng.lognormvariate(0, 1) * scale

    def tensor() -> dict[str, Any]:
        size = rng.randrange(0, 6) * 1000 if round_numbers else rng.randrange(0, 20_000)
        if rng.random() < 0.4:
            return {"bytes": size}
        spent = {
            "encode_s": {name: figure(0.002) for name in names[:-1]},
            "decode_s": {name: figure(0.001) for name in names[1:]},
        }
        return {"bytes": size, "codecs": {"raw+zstd": {"bytes": size * rng.choice([1, 2, 3]) // 4, **spent}}}

    inputs = {f"in{i}": tensor() for i in range(rng.choice([1, 1, 2]))}
    known, rows = list(inputs), []
    for i in range(layers):
        reads = rng.sample(known[-5:], min(len(known[-5:]), rng.choice([0, 1, 1, 2, 3]) if i else 1))
        writes = {f"t{i}{end}": tensor() for end in "ab"[: rng.choice([1, 1, 2])]}
        seconds = {name: figure(0.02 / 3**number) for number, name in enumerate(names)}
        row = {"name": f"l{i}", "reads": reads, "writes": writes, "seconds": seconds, "joules": {"device": figure(0.1)}}
        if rng.random() < bound:
            row["tiers"] = rng.sample(names, rng.randrange(1, tiers + 1))
        rows.append(row)
        known += writes
    outputs = {known[-1], *rng.sample(known, min(len(known), rng.choice([0, 1, 2])))}
    return load_costs(
        {
            "model": "random",
            "tiers": list(names),
            "inputs": inputs,
            "outputs": sorted(outputs),
            "layers": rows,
            "idle_watts": {"device": rng.choice([0.0, 2.0])},
        }
    )


def every_assignment(costs: Costs, ways: tuple[bool, ...] = (False, True)) -> Iterator[Tried]:
    """Every allowed assignment of layers to tiers in which nothing returns, sent each way."""
    maker = {name: i for i, layer in enumerate(costs.layers) for name in layer.writes}
    pairs = [(maker[name], i) for i, layer in enumerate(costs.layers) for name in layer.reads if name in maker]
    may = [
        [tier for tier, name in enumerate(costs.tiers) if name in (one.tiers or one.seconds)] for one in costs.layers
    ]
    for tier_of in itertools.product(*may):
        if all(tier_of[before] <= tier_of[after] for before, after in pairs):
            for compress in ways:
                yield _tried(costs, tier_of, compress, maker)


def _tried(costs: Costs, tier_of: tuple[int, ...], compress: bool, maker: dict[str, int]) -> Tried:
    links = len(costs.tiers) - 1
    sizes = {**costs.inputs, **{name: cost for layer in costs.layers for name, cost in layer.writes.items()}}
    encode_s, decode_s, up_bytes, down_bytes = [0.0] * links, [0.0] * links, [0] * links, [0] * links
    for name, cost in sizes.items():
        made = tier_of[maker[name]] if name in maker else 0
        read = max((tier_of[i] for i, layer in enumerate(costs.layers) if name in layer.reads), default=0)
        codec = cost.codecs.get("raw+zstd") if compress else None
        for link in range(made, read):
            up_bytes[link] += codec.bytes if codec else cost.bytes
            encode_s[link] += codec.encode_s[costs.tiers[link]] if codec else 0.0
            decode_s[link] += codec.decode_s[costs.tiers[link + 1]] if codec else 0.0
        for link in range(made if name in costs.outputs else 0):
            down_bytes[link] += cost.bytes
    seconds_at = [0.0] * (links + 1)
    for layer, tier in zip(costs.layers, tier_of, strict=True):
        seconds_at[tier] += layer.seconds[costs.tiers[tier]]
    joules = sum(layer.joules["device"] for layer, tier in zip(costs.layers, tier_of, strict=True) if tier == 0)
    moved = (tuple(encode_s), tuple(decode_s), tuple(up_bytes), tuple(down_bytes))
    return Tried(tier_of, compress, tuple(seconds_at), joules, *moved)


def busy_watts(costs: Costs) -> float:
    """What the device draws while its layers run, on average; what it draws idle where they take no time."""
    seconds = sum(layer.seconds["device"] for layer in costs.layers)
    joules = sum(layer.joules["device"] for layer in costs.layers)
    return joules / seconds if seconds else costs.idle_watts.get("device", 0.0)
