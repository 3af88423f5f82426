"""Random layer graphs, and plans for them by trying every cut: slow, and written from the definition alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgesplit_partitioner import Costs, load_costs


@dataclass(frozen=True)
class Tried:
    """One cut, one way of sending it, and what it costs without the round trip."""

    on_device: frozenset[str]
    compress: bool
    fixed_s: float
    up_bytes: int
    down_bytes: int
    crosses: bool

    def seconds(self, up: float, down: float, rtt: float) -> float:
        """Latency on a link."""
        return self.fixed_s + self.up_bytes / up + self.down_bytes / down + (rtt if self.crosses else 0.0)

    def rank(self, layers: int) -> tuple[int, int]:
        """Among equals the lowest is to be taken: fewer bytes, then more on the device."""
        return self.up_bytes + self.down_bytes, layers - len(self.on_device)


def random_costs(rng: random.Random, layers: int, *, round_numbers: bool = False, tiers: float = 0.0) -> Costs:
    """A graph with shared tensors, several inputs and outputs, some of them read onward, some passed through.

    `round_numbers` makes equal cuts likely; `tiers` is the chance that a layer runs on one side only.
    """

    def seconds(scale: float) -> float:
        return rng.randrange(0, 5) * scale / 2 if round_numbers else rng.lognormvariate(0, 1) * scale

    def tensor() -> dict[str, Any]:
        size = rng.randrange(0, 6) * 1000 if round_numbers else rng.randrange(0, 20_000)
        if rng.random() < 0.4:
            return {"bytes": size}
        packed = size * rng.choice([1, 2, 3]) // 4
        spent = {"encode_s": {"device": seconds(0.002)}, "decode_s": {"cloud": seconds(0.001)}}
        return {"bytes": size, "codecs": {"raw+zstd": {"bytes": packed, **spent}}}

    inputs = {f"in{i}": tensor() for i in range(rng.choice([1, 1, 2, 3]))}
    known, rows = list(inputs), []
    for i in range(layers):
        recent = known[-6:]
        reads = rng.sample(recent, min(len(recent), rng.choice([0, 1, 1, 1, 2, 2, 3]) if i else 1))
        writes = {f"t{i}{end}": tensor() for end in "ab"[: rng.choice([1, 1, 1, 2])]}
        row = {
            "name": f"l{i}",
            "reads": reads,
            "writes": writes,
            "seconds": {"device": seconds(0.02), "cloud": seconds(0.006)},
        }
        if rng.random() < tiers:
            row["tiers"] = [rng.choice(["device", "cloud"])]
        rows.append(row)
        known += writes
    outputs = {known[-1], *rng.sample(known, min(len(known), rng.choice([0, 1, 2])))}
    return load_costs(
        {"model": "random", "tiers": ["device", "cloud"], "inputs": inputs, "outputs": sorted(outputs), "layers": rows}
    )


def every_cut(costs: Costs, ways: tuple[str, ...] = ("raw", "raw+zstd")) -> Iterator[Tried]:
    """Every closed set of layers, sent each way; tiers are not looked at."""
    made_by = {name: layer.name for layer in costs.layers for name in layer.writes}
    for bits in range(1 << len(costs.layers)):
        on_device = frozenset(layer.name for i, layer in enumerate(costs.layers) if bits >> i & 1)
        kept = (layer for layer in costs.layers if layer.name in on_device)
        if all(made_by.get(name, layer.name) in on_device for layer in kept for name in layer.reads):
            for way in ways:
                yield _tried(costs, on_device, way, made_by)


def _tried(costs: Costs, on_device: frozenset[str], way: str, made_by: dict[str, str]) -> Tried:
    sizes = dict(costs.inputs)
    fixed_s, up_bytes, down_bytes = 0.0, 0, 0
    wanted: set[str] = set()
    for layer in costs.layers:
        sizes.update(layer.writes)
        fixed_s += layer.seconds["device" if layer.name in on_device else "cloud"]
        if layer.name not in on_device:
            wanted.update(name for name in layer.reads if name not in made_by or made_by[name] in on_device)
    for name in sorted(wanted):
        codec = sizes[name].codecs.get(way)
        up_bytes += codec.bytes if codec else sizes[name].bytes
        fixed_s += codec.encode_s["device"] + codec.decode_s["cloud"] if codec else 0.0
    for name in set(costs.outputs):
        if name in made_by and made_by[name] not in on_device:
            down_bytes += sizes[name].bytes
    return Tried(on_device, way != "raw", fixed_s, up_bytes, down_bytes, len(on_device) < len(costs.layers))


def allowed_by_tiers(costs: Costs, cut: Tried) -> bool:
    """Every layer is on a tier that may run it."""
    return all(
        not one.tiers or ("device" if one.name in cut.on_device else "cloud") in one.tiers for one in costs.layers
    )


def fastest(cuts: list[Tried], up: float, down: float, rtt: float) -> float:
    """Seconds of the best."""
    return min(cut.seconds(up, down, rtt) for cut in cuts)
