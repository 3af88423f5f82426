"""Plans for any number of tiers under any limits by trying every assignment, written from the definition alone.

An instance is a random layer graph with links, a power, an objective and limits; a `Trial` is one assignment with
everything that a plan is judged by.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgesplit.plan import Link, Power
from edgesplit_partitioner import Costs, load_costs
from edgesplit_partitioner.formulation.constraints import Limits

PACKED = "+zstd"
TIERS = ("device", "edge", "cloud")


@dataclass(frozen=True)
class Instance:
    """One question."""

    costs: Costs
    links: tuple[Link, ...]
    power: Power
    codecs: tuple[str, ...]

    @property
    def tiers(self) -> tuple[str, ...]:
        return self.costs.tiers


@dataclass(frozen=True)
class Trial:
    """One assignment, and its figures."""

    tier: tuple[int, ...]
    codecs: tuple[tuple[tuple[str, int], str], ...]
    compress: bool
    latency: float
    energy: float
    throughput: float
    memory: float
    warm_memory: float
    loss: float
    bytes: float
    up_bytes: float
    """Over the first link."""

    @property
    def distance(self) -> int:
        """Links between the device and each layer, added up."""
        return sum(self.tier)

    def value(self, objective: str | Mapping[str, float]) -> float:
        """The objective."""
        weights = {objective: 1.0} if isinstance(objective, str) else objective
        return sum(weight * getattr(self, name) for name, weight in weights.items())

    def figure(self, limit: str, fallback: str) -> float:
        """What a limit speaks about."""
        memory = self.warm_memory if fallback == "warm" else self.memory
        return {
            "memory_bytes": memory,
            "energy_joules": self.energy,
            "deadline_s": self.latency,
            "max_loss": self.loss,
        }[limit]


def random_instance(rng: random.Random, layers: int, tiers: int, *, lossy: bool, decades: float = 0.0) -> Instance:
    """A graph with shared tensors, several inputs and outputs; every second has round numbers, where equals abound.

    Seconds, joules, losses and rates are multiplied by powers of ten, from -`decades` to `decades`.
    """
    names, rounded = TIERS[:tiers] if tiers > 2 else (TIERS[0], TIERS[2]), rng.random() < 0.5

    def amount(scale: float) -> float:
        scale *= 10 ** rng.uniform(-decades, decades) if decades else 1.0
        return rng.randrange(0, 5) * scale / 2 if rounded else rng.lognormvariate(0, 1) * scale

    def tensor() -> dict[str, Any]:
        size = rng.randrange(0, 6) * 1000 if rounded else rng.randrange(0, 20_000)
        codecs: dict[str, Any] = {}
        for name, part, loss in (("raw+zstd", 2, 0.0), ("fp16", 2, 0.1), ("int8", 4, 1.0), ("int8+zstd", 6, 1.0)):
            if rng.random() < 0.6 and (lossy or name.startswith("raw")):
                spent = {tier: amount(0.002) for tier in names}
                back = {tier: amount(0.001) for tier in names}
                codecs[name] = {"bytes": size // part, "encode_s": spent, "decode_s": back, "loss": amount(0.01) * loss}
        return {"bytes": size, "codecs": codecs}

    inputs = {f"in{i}": tensor() for i in range(rng.choice([1, 1, 2, 3]))}
    known, rows = list(inputs), []
    for i in range(layers):
        recent = known[-6:]
        reads = rng.sample(recent, min(len(recent), rng.choice([0, 1, 1, 1, 2, 2, 3]) if i else 1))
        writes = {f"t{i}{end}": tensor() for end in "ab"[: rng.choice([1, 1, 1, 2])]}
        speeds = (0.02, 0.01, 0.006) if tiers > 2 else (0.02, 0.006)
        row: dict[str, Any] = {"name": f"l{i}", "reads": reads, "writes": writes, "joules": {"device": amount(0.05)}}
        row["seconds"] = {tier: amount(speed) for tier, speed in zip(names, speeds, strict=True)}
        row["weight_bytes"] = rng.randrange(0, 5) * 1000 if rounded else rng.randrange(0, 30_000)
        if rng.random() < 0.08:
            row["tiers"] = sorted(rng.sample(names, rng.randrange(1, len(names))), key=names.index)
        rows.append(row)
        known += writes
    outputs = {known[-1], *rng.sample(known, min(len(known), rng.choice([0, 1, 2])))}
    costs = load_costs(
        {"model": "random", "tiers": names, "inputs": inputs, "outputs": sorted(outputs), "layers": rows}
    )
    codecs = ("raw", "raw+zstd", "fp16", "int8", "fp16+zstd", "int8+zstd") if lossy else ("raw", "raw+zstd")
    links = tuple(_link(rng, decades) for _ in names[1:])
    return Instance(costs, links, _power(rng), codecs if rng.random() < 0.8 else codecs[:1])


def _link(rng: random.Random, decades: float) -> Link:
    if decades:
        up, down = (10 ** rng.uniform(5 - decades, 5 + decades) for _ in range(2))
        return Link(up_bytes_per_s=up, down_bytes_per_s=down, rtt_s=0.01)
    rates = [1e5, 1e6, 10 ** rng.uniform(4, 7)]
    up, down = rng.choice(rates), rng.choice(rates)
    return Link(up_bytes_per_s=up, down_bytes_per_s=down, rtt_s=rng.choice([0.0, 0.01, 0.05]))


def _power(rng: random.Random) -> Power:
    return Power(
        idle_watts=rng.choice([0.0, 2.0]),
        busy_watts=rng.choice([0.0, 5.0]),
        radio_watts=rng.choice([0.0, 1.3]),
        up_joules_per_byte=rng.choice([0.0, 3e-6]),
        down_joules_per_byte=rng.choice([0.0, 1e-6]),
        wake_joules=rng.choice([0.0, 0.05]),
    )


def every_trial(instance: Instance, *, lossy: bool) -> list[Trial]:
    """All assignments in which nothing comes back to an earlier tier, with every choice of codecs, sent each way."""
    return [trial for tier in _placements(instance) for trial in _sent(instance, tier, lossy)]


def _placements(instance: Instance) -> Iterator[tuple[int, ...]]:
    made_by = {name: i for i, layer in enumerate(instance.costs.layers) for name in layer.writes}
    needs = [[made_by[name] for name in layer.reads if name in made_by] for layer in instance.costs.layers]
    allowed = [
        [k for k, tier in enumerate(instance.tiers) if tier in (layer.tiers or layer.seconds)]
        for layer in instance.costs.layers
    ]
    for tier in itertools.product(*allowed):
        if all(tier[before] <= tier[i] for i, befores in enumerate(needs) for before in befores):
            yield tier


def _sent(instance: Instance, tier: tuple[int, ...], lossy: bool) -> Iterator[Trial]:
    crossing = _crossing(instance.costs, tier)
    measured = {name for one in _tensors(instance.costs).values() for name in one.codecs}
    packed = any(name.endswith(PACKED) for name in measured.intersection(instance.codecs))
    for compress in (False, True) if packed else (False,):
        options = [_options(instance, name, compress, lossy) for name, _ in crossing]
        for chosen in itertools.product(*options):
            yield _trial(instance, tier, tuple(zip(crossing, chosen, strict=True)), compress)


def _options(instance: Instance, tensor: str, compress: bool, lossy: bool) -> list[str]:
    """Codecs by the name they are measured under; `raw` where nothing is spent on it."""
    codecs = _tensors(instance.costs)[tensor].codecs
    found = []
    for base in {name.removesuffix(PACKED) for name in instance.codecs if compress or not name.endswith(PACKED)}:
        name = base + PACKED if compress and base + PACKED in codecs else base
        if base == "raw" or (name in codecs and (lossy or codecs[name].loss == 0)):
            found.append(name)
    return sorted(found)


def _tensors(costs: Costs) -> dict[str, Any]:
    known = dict(costs.inputs)
    for layer in costs.layers:
        known.update(layer.writes)
    return known


def _crossing(costs: Costs, tier: tuple[int, ...]) -> list[tuple[str, int]]:
    """Each tensor with each link it crosses, once."""
    made = dict.fromkeys(costs.inputs, 0) | {name: tier[i] for i, one in enumerate(costs.layers) for name in one.writes}
    found = []
    for name, start in made.items():
        read = [tier[i] for i, layer in enumerate(costs.layers) if name in layer.reads]
        found += [(name, link) for link in range(start, max(read, default=start))]
    return found


def _trial(
    instance: Instance, tier: tuple[int, ...], codecs: tuple[tuple[tuple[str, int], str], ...], compress: bool
) -> Trial:
    costs, power, tiers, tensors = instance.costs, instance.power, instance.tiers, _tensors(instance.costs)
    busy = [0.0] * len(tiers)
    joules, loss = 0.0, 0.0
    for layer, k in zip(costs.layers, tier, strict=True):
        busy[k] += layer.seconds[tiers[k]]
        joules += layer.joules["device"] if k == 0 else 0.0
    up, down, encode = [0] * len(instance.links), [0] * len(instance.links), 0.0
    for (name, link), codec in codecs:
        cost = tensors[name].codecs.get(codec)
        up[link] += cost.bytes if cost else tensors[name].bytes
        if cost:
            busy[link] += cost.encode_s[tiers[link]]
            busy[link + 1] += cost.decode_s[tiers[link + 1]]
            encode += cost.encode_s[tiers[link]] if link == 0 else 0.0
            loss += cost.loss
    for layer, k in zip(costs.layers, tier, strict=True):
        for name in set(costs.outputs) & set(layer.writes):
            for link in range(k):
                down[link] += tensors[name].bytes
    up_s = [size / link.up_bytes_per_s for size, link in zip(up, instance.links, strict=True)]
    down_s = [size / link.down_bytes_per_s for size, link in zip(down, instance.links, strict=True)]
    trips = sum(link.rtt_s for k, link in enumerate(instance.links) if max(tier) > k)
    waited = sum(busy[1:]) + sum(up_s) + sum(down_s) + trips
    joules += power.busy_watts * encode + power.idle_watts * waited + power.radio_watts * (up_s[0] + down_s[0])
    joules += up[0] * power.up_joules_per_byte + down[0] * power.down_joules_per_byte
    joules += power.wake_joules if max(tier) > 0 else 0.0
    peak = _peak(costs, tier)
    weights = [layer.weight_bytes for layer in costs.layers]
    here = sum(size for size, k in zip(weights, tier, strict=True) if k == 0)
    slowest = max(*busy, *up_s, *down_s)
    both = sum(up) + sum(down)
    latency = busy[0] + waited
    return Trial(tier, codecs, compress, latency, joules, slowest, here + peak, sum(weights) + peak, loss, both, up[0])


def _peak(costs: Costs, tier: tuple[int, ...]) -> int:
    """Run the device's layers one after the other, and look at what lies around each time."""
    sizes = {name: tensor.bytes for name, tensor in _tensors(costs).items()}
    read_later = {name: [i for i, layer in enumerate(costs.layers) if name in layer.reads] for name in sizes}
    held = {name for name in costs.inputs if read_later[name] or name in costs.outputs}
    most = sum(sizes[name] for name in held)
    for i, layer in enumerate(costs.layers):
        if tier[i] > 0:
            continue
        held |= set(layer.writes)
        most = max(most, sum(sizes[name] for name in held))
        held = {
            name
            for name in held
            if name in costs.outputs or any(reader > i or tier[reader] > 0 for reader in read_later[name])
        }
    return most


def keeps(trial: Trial, instance: Instance, limits: Limits, names: Iterable[str] | None = None) -> bool:
    """Are these limits kept (all of them by default)? A value that is only rounding above a limit keeps it."""
    given = limits.as_text()
    asked = set(given if names is None else names)
    layers = instance.costs.layers
    if "keep_raw_input" in asked and any(
        k > 0 and not instance.costs.raw.isdisjoint(layer.reads) for layer, k in zip(layers, trial.tier, strict=True)
    ):
        return False
    if "keep_first" in asked and any(k > 0 for k in trial.tier[: limits.keep_first]):
        return False
    if "force" in asked and not _as_forced(trial, instance, limits.force):
        return False
    warm = limits.fallback if names is None or "fallback" in asked else "none"
    return all(
        trial.figure(name, warm) <= getattr(limits, name) * (1 + 1e-9) + 1e-300
        for name in ("memory_bytes", "energy_joules", "deadline_s", "max_loss")
        if name in asked and getattr(limits, name) is not None
    )


def _as_forced(trial: Trial, instance: Instance, force: str) -> bool:
    if force in ("device", "cloud"):
        return set(trial.tier) == {0 if force == "device" else len(instance.tiers) - 1}
    made_by = {name: layer.name for layer in instance.costs.layers for name in layer.writes}
    reads = {layer.name: layer.reads for layer in instance.costs.layers}
    needed, left = set(), [force]
    while left:
        name = left.pop()
        needed.add(name)
        left += [made_by[tensor] for tensor in reads[name] if tensor in made_by]
    return {layer.name for layer, k in zip(instance.costs.layers, trial.tier, strict=True) if k == 0} == needed
