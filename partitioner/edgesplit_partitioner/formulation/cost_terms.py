"""Prices for what an assignment uses: every additive quantity of a plan as a `CostTerm`.

Seconds, joules, bytes, loss and each stage of a pipeline are sums of so much per layer and tier, per byte, per second
of encoding and decoding, per link crossed. Both solvers price by the same terms: `mincut_problem.arc_prices` puts one
on the arcs of a network, `edgesplit_partitioner.milp.model` on the variables of a program. Memory is no sum over
layers, see `peak_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from edgesplit.plan import Link, Power
from edgesplit_partitioner.arrays import Floats, Ints
from edgesplit_partitioner.formulation.cost_model import CostModel, TransferOption


@dataclass(frozen=True)
class Placement:
    """An assignment by numbers: each layer's tier, and the codec of every tensor on every link that it crosses."""

    tier_of: Ints
    transfers: dict[tuple[int, int], TransferOption]
    """By tensor and link."""
    compress: bool


@dataclass(frozen=True)
class CostTerm:
    """The price of each thing an assignment uses; by link where an array has one value per link."""

    layer: Floats
    """By tier and layer, paid where the layer runs."""
    up_byte: Floats
    encode: Floats
    """Per second of encoding below a link."""
    decode: Floats
    """Per second of decoding above a link."""
    down_byte: Floats
    crossed: Floats
    """Once, where any layer runs beyond the link."""
    loss: float = 0.0
    """Per unit of a codec's loss."""
    lossy: float = 0.0
    """Per crossing by a lossy codec."""

    @classmethod
    def zero(cls, model: CostModel) -> CostTerm:
        """A term by which everything is free."""
        links = np.zeros(model.link_count)
        return cls(np.zeros((len(model.tiers), len(model.layers))), links, links, links, links, links)

    def __add__(self, other: CostTerm) -> CostTerm:
        return CostTerm(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(CostTerm)))

    def __mul__(self, factor: float) -> CostTerm:
        return CostTerm(*(getattr(self, part.name) * factor for part in fields(CostTerm)))

    def of_transfer(self, option: TransferOption, link: int) -> float:
        """The price of one tensor's crossing."""
        spent = (
            self.up_byte[link] * option.bytes
            + self.encode[link] * option.encode_s
            + self.decode[link] * option.decode_s
        )
        return float(spent) + self.loss * option.loss + self.lossy * option.is_lossy

    def of_placement(self, model: CostModel, placement: Placement) -> float:
        """The price of everything that a placement uses."""
        total = float(self.layer[placement.tier_of, np.arange(len(placement.tier_of))].sum())
        crossings = sorted(placement.transfers.items(), key=lambda crossing: crossing[0])
        total += sum(self.of_transfer(option, link) for (_, link), option in crossings)
        for link in range(model.link_count):
            beyond = placement.tier_of > link
            if beyond.any():
                total += float(self.crossed[link] + self.down_byte[link] * model.answer_bytes[beyond].sum())
        return total


@dataclass(frozen=True, slots=True)
class LinkScenario:
    """One state of the links and machines that is priced: every link at one rate, servers and device slowed."""

    links: tuple[Link, ...]
    load: float = 1.0
    """Factor on the seconds of every tier beyond the device."""
    slowdown: float = 1.0
    """Factor on the seconds and joules of the device."""
    latency: float = 1.0
    """Weight of each second."""
    energy: float = 0.0
    """Weight of each joule of the device."""

    def with_first_link(self, link: Link) -> LinkScenario:
        """The scenario with another first link."""
        return replace(self, links=(link, *self.links[1:]))


def scenario_term(
    model: CostModel, scenario: LinkScenario, power: Power, up_s_per_byte: float | None = None
) -> CostTerm:
    """The weighted latency and device energy of one inference in a scenario.

    Latency adds up the layers' seconds, encoding, bytes over rates, decoding, and a round trip per link crossed
    (Neurosurgeon, Kang et al., ASPLOS 2017, with the codecs' times added). Energy is `edgesplit.plan.energy_j`, term by
    term: the device's layers by their joules, its encoding at busy power, everything it waits for at idle power, and
    the radio of the first link, per byte, per second that bytes move, and once for promotion and tail (Huang et al.,
    MobiSys 2012). `up_s_per_byte` replaces that of the first link.
    """
    latency, energy, load = scenario.latency, scenario.energy, scenario.load
    # A second in which the device only waits costs its latency and its idle power.
    waited = latency + energy * power.idle_watts
    layer = model.seconds * (waited * load)
    # The device's own layers have measured joules, which replace idle power there.
    layer[0] = model.seconds[0] * (latency * scenario.slowdown)
    if energy:
        layer[0] += np.nan_to_num(model.joules) * (energy * scenario.slowdown)
    up = np.array([1.0 / link.up_bytes_per_s for link in scenario.links])
    if up_s_per_byte is not None:
        up[0] = up_s_per_byte
    down = np.array([1.0 / link.down_bytes_per_s for link in scenario.links])
    up_byte, down_byte = waited * up, waited * down
    encode, decode = np.full(len(up), waited * load), np.full(len(up), waited * load)
    crossed = np.array([link.rtt_s for link in scenario.links]) * waited
    # Only the first link is the device's: it encodes there at busy power, and its radio moves the bytes.
    encode[0] = (latency + energy * power.busy_watts) * scenario.slowdown
    up_byte[0] += energy * (power.radio_watts * up[0] + power.up_joules_per_byte)
    down_byte[0] += energy * (power.radio_watts * down[0] + power.down_joules_per_byte)
    crossed[0] += energy * power.wake_joules
    return CostTerm(layer, up_byte, encode, decode, down_byte, crossed)


def latency_s(model: CostModel, links: tuple[Link, ...]) -> CostTerm:
    """Seconds from the first input byte to the last answer on these links."""
    return scenario_term(model, LinkScenario(links), Power())


def energy_j(model: CostModel, links: tuple[Link, ...], power: Power) -> CostTerm:
    """Joules of the device for one inference on these links."""
    return scenario_term(model, LinkScenario(links, latency=0.0, energy=1.0), power)


def sent_bytes(model: CostModel) -> CostTerm:
    """Bytes over all links, up and down."""
    each = np.ones(model.link_count)
    return replace(CostTerm.zero(model), up_byte=each, down_byte=each)


def codec_loss(model: CostModel) -> CostTerm:
    """The sum of the codecs' losses: each tensor's at each link that it crosses."""
    return replace(CostTerm.zero(model), loss=1.0)


def lossy_crossings(model: CostModel) -> CostTerm:
    """The number of crossings by a lossy codec."""
    return replace(CostTerm.zero(model), lossy=1.0)


def distance(model: CostModel) -> CostTerm:
    """How far from the device layers run, in links: 0 is all-local."""
    tiers = np.arange(len(model.tiers), dtype=np.float64)
    return replace(CostTerm.zero(model), layer=np.tile(tiers[:, None], (1, len(model.layers))))


def stages_s(model: CostModel, links: Sequence[Link]) -> list[CostTerm]:
    """Seconds per inference of every stage of a stream, which all work at the same time.

    A tier computes, decodes what comes up to it and encodes what it sends on; a link carries bytes, each direction for
    itself. Round trips delay the first answer and not the next, so they are in no stage.
    """
    zero = CostTerm.zero(model)
    by_link = np.eye(model.link_count)
    stages: list[CostTerm] = []
    for tier in range(len(model.tiers)):
        layer = np.zeros_like(model.seconds)
        layer[tier] = model.seconds[tier]
        encode = by_link[tier] if tier < model.link_count else np.zeros(model.link_count)
        decode = by_link[tier - 1] if tier else np.zeros(model.link_count)
        stages.append(replace(zero, layer=layer, encode=encode, decode=decode))
    for only, link in zip(by_link, links, strict=True):
        stages.append(replace(zero, up_byte=only * (1.0 / link.up_bytes_per_s)))
        stages.append(replace(zero, down_byte=only * (1.0 / link.down_bytes_per_s)))
    return stages


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
        """Weights and peak together."""
        return self.weight_bytes + self.peak_bytes


def memory_of(model: CostModel, tier_of: Ints, fallback: str) -> Memory:
    """The device's memory when each layer runs on the tier that `tier_of` gives it."""
    counted = model.weight_bytes if fallback == "warm" else model.weight_bytes[tier_of == 0]
    return Memory(round(float(counted.sum())), round(peak_bytes(model, tier_of)), fallback)


def peak_bytes(model: CostModel, tier_of: Ints) -> float:
    """The most bytes that tensors take at once on the device, its layers run in the order of the costs.

    A tensor is there from when it is made (an input: from the start) until its last reader on the device has run; one
    that is sent or is an output, until the device is done. Raw bytes; what a layer needs inside is not counted.
    """
    on_device = tier_of == 0
    # Changes of the bytes alive by step: step 0 is the start, layer v runs at step v + 1. Their running sum is what is
    # alive at each step, and its greatest value the peak.
    change = np.zeros(len(tier_of) + 2)
    for tensor, readers in enumerate(model.readers):
        maker = int(model.maker[tensor])
        # Made elsewhere, or an input that nothing reads or returns: it takes no room here.
        if (maker >= 0 and not on_device[maker]) or not (readers or model.is_output[tensor] or maker >= 0):
            continue
        stays = model.is_output[tensor] or not all(on_device[reader] for reader in readers)
        last = len(tier_of) if stays else max((maker, *readers))
        change[maker + 1] += model.raw_bytes[tensor]
        change[last + 2 if last < len(tier_of) else len(tier_of) + 1] -= model.raw_bytes[tensor]
    return float(np.cumsum(change)[: len(tier_of) + 1].max())
