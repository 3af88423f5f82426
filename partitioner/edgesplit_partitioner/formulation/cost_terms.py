"""A question on any number of tiers as arrays, what an assignment to them uses, and what a tariff asks for that.

Every additive quantity of a plan (seconds, joules, bytes, loss, one stage of a pipeline) is a `Tariff`: so much per
layer and tier, per byte, per second of encoding and decoding, per link crossed. Memory is no tariff: see `peak_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from edgesplit.plan import Link, Power
from edgesplit_partitioner.costs.model import Costs, TensorCost

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
PACKED = "+zstd"
"""Ends the name of a codec as measured in a compressed request."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way for a tensor to cross one link."""

    codec: str
    bytes: float
    encode_s: float
    decode_s: float
    loss: float


@dataclass(frozen=True)
class Question:
    """A layer graph on ordered tiers. Tensors are numbered, inputs first; link k joins tier k to tier k + 1."""

    costs: Costs
    tiers: tuple[str, ...]
    links: tuple[Link, ...]
    codecs: frozenset[str]

    @cached_property
    def tensors(self) -> dict[str, TensorCost]:
        """Every tensor by name, in order."""
        known = dict(self.costs.inputs)
        for layer in self.costs.layers:
            known.update(layer.writes)
        return known

    @cached_property
    def number(self) -> dict[str, int]:
        """Each tensor's number."""
        return {name: position for position, name in enumerate(self.tensors)}

    @cached_property
    def maker(self) -> Ints:
        """By tensor: the layer that writes it, -1 for an input."""
        makers = [-1] * len(self.costs.inputs)
        for position, layer in enumerate(self.costs.layers):
            makers += [position] * len(layer.writes)
        return np.array(makers, dtype=np.intp)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """By tensor: the layers that read it, each once, in order."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for position, layer in enumerate(self.costs.layers):
            for name in dict.fromkeys(layer.reads):
                found[self.number[name]].append(position)
        return tuple(map(tuple, found))

    @cached_property
    def is_output(self) -> npt.NDArray[np.bool_]:
        """By tensor: must it arrive at the device?"""
        wanted = frozenset(self.costs.outputs)
        return np.array([name in wanted for name in self.tensors], dtype=np.bool_)

    @cached_property
    def raw_bytes(self) -> Floats:
        """By tensor."""
        return np.array([tensor.bytes for tensor in self.tensors.values()], dtype=np.float64)

    @cached_property
    def answer_bytes(self) -> Floats:
        """By layer: bytes of the answers it makes."""
        made = self.is_output & (self.maker >= 0)
        layers = len(self.costs.layers)
        return np.bincount(self.maker[made], self.raw_bytes[made], layers).astype(np.float64, copy=False)

    @cached_property
    def weight_bytes(self) -> Floats:
        """By layer."""
        return np.array([layer.weight_bytes for layer in self.costs.layers], dtype=np.float64)

    @cached_property
    def may_run(self) -> npt.NDArray[np.bool_]:
        """By layer and tier: is it allowed there?"""
        rows = [[tier in (layer.tiers or layer.seconds) for tier in self.tiers] for layer in self.costs.layers]
        return np.array(rows, dtype=np.bool_).reshape(len(rows), len(self.tiers))

    @cached_property
    def requests(self) -> tuple[bool, ...]:
        """Is the request compressed? Both, where both are allowed and differ."""
        measured = any(
            name.endswith(PACKED) and name in self.codecs for one in self.tensors.values() for name in one.codecs
        )
        plain = any(not name.endswith(PACKED) for name in self.codecs)
        return (False, True) if measured and plain else (True,) if measured else (False,)

    def ways(self, tensor: int, link: int, compress: bool, lossy: bool) -> tuple[Way, ...]:
        """How a tensor may cross a link in a request; a way beaten in everything is left out.

        In a compressed request a codec not measured compressed counts as it is.
        """
        return self._ways[tensor, link, compress, lossy]

    @cached_property
    def _ways(self) -> Mapping[tuple[int, int, bool, bool], tuple[Way, ...]]:
        return {
            (number, link, compress, lossy): _undominated(self._measured(tensor, link, compress, lossy))
            for number, tensor in enumerate(self.tensors.values())
            for link in range(len(self.links))
            for compress in self.requests
            for lossy in (False, True)
        }

    def _measured(self, tensor: TensorCost, link: int, compress: bool, lossy: bool) -> list[Way]:
        ends = self.tiers[link], self.tiers[link + 1]
        found: dict[str, Way] = {}
        allowed = {name.removesuffix(PACKED) for name in self.codecs if compress or not name.endswith(PACKED)}
        for base in sorted(allowed, key=lambda name: (name != "raw", name)):
            cost = (tensor.codecs.get(base + PACKED) if compress else None) or tensor.codecs.get(base)
            if cost is not None and (lossy or cost.loss <= 0):
                times = cost.encode_s.get(ends[0], 0.0), cost.decode_s.get(ends[1], 0.0)
                found[base] = Way(base, cost.bytes, *times, cost.loss)
            elif base == "raw":
                found[base] = Way(base, tensor.bytes, 0.0, 0.0, 0.0)
        return list(found.values()) or [Way("raw", tensor.bytes, 0.0, 0.0, 0.0)]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Every layer's tier and every crossing tensor's codec, with how sure it is that nothing is better."""

    tier_of: dict[str, str]
    codec_of: dict[tuple[str, str], str]
    """By tensor and link (`device-edge`)."""
    compress: bool
    value: float
    """Of the objective, evaluated again from the assignment."""
    bound: float
    """No assignment within the limits is below it."""

    @property
    def gap(self) -> float:
        """How far `value` is above `bound`, as a part of it."""
        return (self.value - self.bound) / self.value if self.value > 0 else 0.0


@dataclass(frozen=True)
class Placement:
    """An assignment by numbers: each layer's tier, and the way of every tensor over every link it crosses."""

    tier: Ints
    ways: dict[tuple[int, int], Way]
    """By tensor and link."""
    compress: bool


@dataclass(frozen=True)
class Tariff:
    """What is asked for each thing an assignment uses; by link where an array has one value per link."""

    layer: Floats
    """By layer and tier."""
    up_byte: Floats
    encode: Floats
    """Per second of encoding below a link."""
    decode: Floats
    """Per second of decoding above a link."""
    down_byte: Floats
    crossed: Floats
    """Once, where any layer runs beyond the link."""
    loss: float = 0.0

    @classmethod
    def nothing(cls, layers: int, tiers: int) -> Tariff:
        """Everything is free."""
        links = np.zeros(tiers - 1)
        return cls(np.zeros((layers, tiers)), links, links, links, links, links)

    def __add__(self, other: Tariff) -> Tariff:
        return Tariff(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Tariff)))

    def __mul__(self, factor: float) -> Tariff:
        return Tariff(*(getattr(self, one.name) * factor for one in fields(Tariff)))

    def way(self, way: Way, link: int) -> float:
        """For one tensor's crossing."""
        spent = self.up_byte[link] * way.bytes + self.encode[link] * way.encode_s + self.decode[link] * way.decode_s
        return float(spent) + self.loss * way.loss

    def of(self, question: Question, placement: Placement) -> float:
        """For all that a placement uses."""
        total = float(self.layer[np.arange(len(placement.tier)), placement.tier].sum())
        total += sum(self.way(way, link) for (_, link), way in sorted(placement.ways.items(), key=lambda one: one[0]))
        for link in range(len(question.links)):
            beyond = placement.tier > link
            if beyond.any():
                total += float(self.crossed[link] + self.down_byte[link] * question.answer_bytes[beyond].sum())
        return total


def latency_s(question: Question) -> Tariff:
    """Layers, encoding and decoding by their seconds; bytes over their link's rate; a round trip per link crossed."""
    up, down = _per_byte(question)
    free = _free(question)
    one = np.ones(len(question.links))
    crossed = np.array([link.rtt_s for link in question.links])
    return replace(free, layer=_seconds(question), up_byte=up, encode=one, decode=one, down_byte=down, crossed=crossed)


def energy_j(question: Question, power: Power) -> Tariff:
    """Joules of the device for one inference: `edgesplit.plan.energy_j`, term by term.

    Its layers by their joules, its encoding at busy power, everything it waits for at idle power, and the radio of the
    first link: per byte, per second that bytes move, and once for promotion and tail.
    """
    waited = latency_s(question)
    layer = waited.layer * power.idle_watts
    device = question.tiers[0]
    layer[:, 0] = [one.joules.get(device, 0.0) for one in question.costs.layers]
    up, down = _per_byte(question)
    first = np.arange(len(question.links)) == 0
    return Tariff(
        layer=layer,
        up_byte=up * power.idle_watts + first * (up * power.radio_watts + power.up_joules_per_byte),
        encode=np.where(first, power.busy_watts, power.idle_watts),
        decode=waited.decode * power.idle_watts,
        down_byte=down * power.idle_watts + first * (down * power.radio_watts + power.down_joules_per_byte),
        crossed=waited.crossed * power.idle_watts + first * power.wake_joules,
    )


def sent_bytes(question: Question) -> Tariff:
    """Bytes over all links, up and down."""
    one = np.ones(len(question.links))
    return replace(_free(question), up_byte=one, down_byte=one)


def lost(question: Question) -> Tariff:
    """The sum of the codecs' losses: each tensor's at each link that it crosses."""
    return replace(_free(question), loss=1.0)


def distance(question: Question) -> Tariff:
    """How far from the device layers run, in links: 0 is all-local."""
    tiers = np.arange(len(question.tiers), dtype=np.float64)
    return replace(_free(question), layer=np.tile(tiers, (len(question.costs.layers), 1)))


def stages_s(question: Question) -> dict[str, Tariff]:
    """Seconds per inference of every stage of a stream, which all work at once.

    A tier computes, decodes what comes up to it and encodes what it sends on; a link carries bytes, each direction for
    itself. Round trips delay the first answer and not the next, so they are in no stage.
    """
    free, seconds = _free(question), _seconds(question)
    up, down = _per_byte(question)
    links = len(question.links)
    found: dict[str, Tariff] = {}
    for tier, name in enumerate(question.tiers):
        here = np.zeros_like(seconds)
        here[:, tier] = seconds[:, tier]
        encode = np.array([float(link == tier) for link in range(links)])
        decode = np.array([float(link + 1 == tier) for link in range(links)])
        found[name] = replace(free, layer=here, encode=encode, decode=decode)
    for link in range(links):
        only = np.array([float(one == link) for one in range(links)])
        name = f"{question.tiers[link]}-{question.tiers[link + 1]}"
        found[name] = replace(free, up_byte=up * only)
        found[f"{name} down"] = replace(free, down_byte=down * only)
    return found


@dataclass(frozen=True, slots=True)
class Memory:
    """What a plan needs on the device, in bytes."""

    weight_bytes: int
    """Of the device's layers; of the whole model where the fallback is `warm`."""
    peak_bytes: int
    """The most that tensors take at once while the device runs its part."""
    fallback: str

    @property
    def bytes(self) -> int:
        """Both."""
        return self.weight_bytes + self.peak_bytes


def memory_of(question: Question, tier: Ints, fallback: str) -> Memory:
    """The device's memory, by each layer's tier."""
    counted = question.weight_bytes if fallback == "warm" else question.weight_bytes[tier == 0]
    return Memory(round(float(counted.sum())), round(peak_bytes(question, tier)), fallback)


def peak_bytes(question: Question, tier: Ints) -> float:
    """The most bytes that tensors take at once on the device, its layers run in the order of the costs.

    A tensor is there from when it is made (an input: from the start) until its last reader on the device has run; one
    that is sent or is an answer, until the device is done. Raw bytes; what a layer needs inside is not counted.
    """
    on_device = tier == 0
    change = np.zeros(len(tier) + 2)
    for number, readers in enumerate(question.readers):
        maker = int(question.maker[number])
        if (maker >= 0 and not on_device[maker]) or not (readers or question.is_output[number] or maker >= 0):
            continue
        stays = question.is_output[number] or not all(on_device[reader] for reader in readers)
        last = len(tier) if stays else max((maker, *readers))
        change[maker + 1] += question.raw_bytes[number]
        change[last + 2 if last < len(tier) else len(tier) + 1] -= question.raw_bytes[number]
    return float(np.cumsum(change)[: len(tier) + 1].max())


def _free(question: Question) -> Tariff:
    return Tariff.nothing(len(question.costs.layers), len(question.tiers))


def _seconds(question: Question) -> Floats:
    rows = [[layer.seconds.get(tier, 0.0) for tier in question.tiers] for layer in question.costs.layers]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(question.tiers))


def _per_byte(question: Question) -> tuple[Floats, Floats]:
    up = np.array([1.0 / link.up_bytes_per_s for link in question.links])
    return up, np.array([1.0 / link.down_bytes_per_s for link in question.links])


def _undominated(ways: list[Way]) -> tuple[Way, ...]:
    """Without those that another equals or beats in everything; of equals the first stays."""

    def beats(one: Way, other: Way) -> bool:
        pairs = zip(_figures(one), _figures(other), strict=True)
        return all(mine <= theirs for mine, theirs in pairs)

    kept: list[Way] = []
    for way in ways:
        if not any(beats(one, way) for one in kept):
            kept = [one for one in kept if not beats(way, one)] + [way]
    return tuple(kept)


def _figures(way: Way) -> tuple[float, ...]:
    return way.bytes, way.encode_s, way.decode_s, way.loss
