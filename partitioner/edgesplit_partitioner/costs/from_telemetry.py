"""Correction of costs by what devices and servers measured at work (telemetry), for planning again.

Telemetry measures slices: groups of layers with the seconds that they took together. Layers of a group keep their
proportions and share the group's factor of measured over planned seconds; layers of no group take the factor of all
groups together. Differences below `NOISE_RATIO` are ignored, so that a plan does not oscillate with the noise of its
own measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from edgesplit.input_spec import FRAME
from edgesplit.plan import Link
from edgesplit.release.boundary_codecs import ZSTD_SUFFIX
from edgesplit_partitioner.costs.model import RAW, Costs, LayerCost, TensorCost, without_tier

NOISE_RATIO = 0.1
"""A factor that is within this ratio of 1 counts as 1."""
MAX_FACTOR = 50.0
"""A factor beyond this, or below its inverse, cannot be a measurement of these layers and is clipped."""


class SliceMeasurement(msgspec.Struct, frozen=True, array_like=True):
    """Layers that ran together as one slice."""

    layers: tuple[str, ...]
    seconds: Annotated[float, Meta(ge=0)]
    """Seconds of one run of all of them."""


class TransferMeasurement(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that crossed the first link together, with the bytes of the request body."""

    tensors: tuple[str, ...]
    codecs: dict[str, str]
    """Codec by tensor; a tensor left out travelled raw."""
    compress: bool
    """Whether the body was compressed with zstd."""
    bytes: Annotated[float, Meta(ge=0)]
    row: str = ""
    """The row in use, by its name in the plan in use."""


class FieldMeasurements(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Measurements of one device class at work, for one model."""

    link: Link
    """The first link, from the device outwards."""
    device: tuple[SliceMeasurement, ...] = ()
    """Slices on the device."""
    remote: tuple[SliceMeasurement, ...] = ()
    """Slices on the last tier; each entry has the layers of one row, so entries may share layers."""
    sent: tuple[TransferMeasurement, ...] = ()
    """Transfers over the first link: sizes of frames and of compressed tensors depend on their contents and are known
    only once they travel."""
    fixed_s: float = 0.0
    """Seconds of every request that crosses the first link beyond those planned: the server's work around the layers.
    """
    devices: int = 1
    """Number of devices whose measurements agree."""
    basis: str = "measured"
    """`measured`; or `emulated` or `simulated`, which are never used for a real device's plan."""

    @property
    def planned_link(self) -> Link:
        """The link to plan with: `fixed_s` is added to the round-trip time, because every request that crosses pays it
        once."""
        return msgspec.structs.replace(self.link, rtt_s=self.link.rtt_s + self.fixed_s)


def is_within_noise(measurements: FieldMeasurements, other: FieldMeasurements) -> bool:
    """Whether two plans made from these measurements would differ by noise alone."""
    pairs = [
        (measurements.link.up_bytes_per_s, other.link.up_bytes_per_s),
        (measurements.link.down_bytes_per_s, other.link.down_bytes_per_s),
        (measurements.planned_link.rtt_s, other.planned_link.rtt_s),
    ]
    for slices, other_slices in ((measurements.device, other.device), (measurements.remote, other.remote)):
        if [group.layers for group in slices] != [group.layers for group in other_slices]:
            return False
        pairs += [(first.seconds, second.seconds) for first, second in zip(slices, other_slices, strict=True)]
    if [sent.tensors for sent in measurements.sent] != [sent.tensors for sent in other.sent]:
        return False
    pairs += [(first.bytes, second.bytes) for first, second in zip(measurements.sent, other.sent, strict=True)]
    return all(min(pair) * (1.0 + NOISE_RATIO) >= max(pair) for pair in pairs)


def with_measurements(costs: Costs, measured: FieldMeasurements) -> Costs:
    """The costs with measured values in place of planned ones: device seconds and joules, remote seconds, transferred
    bytes."""
    device, remote = costs.tiers[0], costs.tiers[-1]
    factors = layer_factors(costs, device, measured.device)
    remote_factor = _ignore_noise(_overall_factor(costs, remote, measured.remote))
    size_factors = _size_factors(costs, measured.sent)
    sized = costs.with_tensors(lambda name, cost: _with_size_factors(cost, name, size_factors))
    layers = tuple(
        msgspec.structs.replace(
            layer,
            seconds=_scaled(_scaled(layer.seconds, device, factors[layer.name]), remote, remote_factor),
            joules=_scaled(layer.joules, device, factors[layer.name]),
            between=without_tier(layer.between, device) if measured.device else layer.between,
        )
        for layer in sized.layers
    )
    if not measured.device:
        return msgspec.structs.replace(sized, layers=layers)
    basis = {**costs.basis, device: f"{measured.basis}: at work, on {measured.devices} of {costs.device_class}"}
    return msgspec.structs.replace(sized, layers=layers, basis=basis, intervals=without_tier(costs.intervals, device))


def planned_transfer_bytes(costs: Costs, tensors: Iterable[str], codecs: Mapping[str, str], *, compress: bool) -> float:
    """Bytes of these tensors together by the costs, sent with these codecs; 0 where any of them is not in the costs."""
    sizes = costs.tensors
    total = 0.0
    for name in tensors:
        cost = sizes.get(name)
        if cost is None:
            return 0.0
        codec_key = _codec_key(cost, codecs.get(name, RAW), compress)
        if codec_key != RAW and codec_key not in cost.codecs:
            return 0.0
        total += cost.bytes if codec_key == RAW else cost.codecs[codec_key].bytes
    return total


def _size_factors(costs: Costs, transfers: Iterable[TransferMeasurement]) -> dict[tuple[str, str], float]:
    """Factor of measured over planned bytes, by tensor and codec key. Only compressed tensors and frames get one: the
    size of anything else is fixed by its shape."""
    factors, sizes = {}, costs.tensors
    for transfer in transfers:
        planned_bytes = planned_transfer_bytes(costs, transfer.tensors, transfer.codecs, compress=transfer.compress)
        for name in transfer.tensors if planned_bytes else ():
            codec_key = _codec_key(sizes[name], transfer.codecs.get(name, RAW), transfer.compress)
            # The transfer's sizes were measured in sum: every tensor of it takes the same factor.
            if codec_key.endswith(ZSTD_SUFFIX) or name == FRAME:
                factors[name, codec_key] = _ignore_noise(transfer.bytes / planned_bytes)
    return factors


def _with_size_factors(cost: TensorCost, name: str, size_factors: Mapping[tuple[str, str], float]) -> TensorCost:
    """The tensor's cost with its bytes multiplied by the factors of `size_factors`."""
    codecs = {
        codec_key: msgspec.structs.replace(codec, bytes=round(codec.bytes * size_factors.get((name, codec_key), 1.0)))
        for codec_key, codec in cost.codecs.items()
    }
    return TensorCost(bytes=round(cost.bytes * size_factors.get((name, RAW), 1.0)), codecs=codecs)


def _codec_key(cost: TensorCost, codec: str, compress: bool) -> str:
    """The codec's key in the costs, as the planner chooses it: a tensor whose compressed size was never measured counts
    as uncompressed in a compressed body."""
    return codec + ZSTD_SUFFIX if compress and codec + ZSTD_SUFFIX in cost.codecs else codec


def layer_factors(costs: Costs, tier: str, groups: Iterable[SliceMeasurement]) -> dict[str, float]:
    """Factor of measured over planned seconds on that tier, by layer."""
    groups = tuple(groups)
    by_layer = {layer.name: layer for layer in costs.layers}
    overall_factor = _ignore_noise(_overall_factor(costs, tier, groups))
    factors = dict.fromkeys(by_layer, overall_factor)
    for group in groups:
        planned_s = _planned_s(by_layer, tier, group)
        if planned_s > 0.0:
            factors |= dict.fromkeys(group.layers, _ignore_noise(group.seconds / planned_s))
    return {name: factors[name] for name in by_layer}


def _overall_factor(costs: Costs, tier: str, groups: Iterable[SliceMeasurement]) -> float:
    """Measured over planned seconds of all groups together; 1 where there are none."""
    by_layer = {layer.name: layer for layer in costs.layers}
    pairs = [(group.seconds, planned_s) for group in groups if (planned_s := _planned_s(by_layer, tier, group)) > 0.0]
    return sum(seconds for seconds, _ in pairs) / sum(planned_s for _, planned_s in pairs) if pairs else 1.0


def _planned_s(by_layer: Mapping[str, LayerCost], tier: str, group: SliceMeasurement) -> float:
    """Planned seconds of the group on the tier; 0 where a layer of it is not in the costs."""
    if not all(name in by_layer and tier in by_layer[name].seconds for name in group.layers):
        return 0.0
    return sum(by_layer[name].seconds[tier] for name in group.layers)


def _ignore_noise(factor: float) -> float:
    """The factor clipped to `MAX_FACTOR`, and 1 where it differs from 1 by noise only."""
    clipped = min(MAX_FACTOR, max(1.0 / MAX_FACTOR, factor))
    return 1.0 if 1.0 / (1.0 + NOISE_RATIO) <= clipped <= 1.0 + NOISE_RATIO else clipped


def _scaled(by_tier: Mapping[str, float], tier: str, factor: float) -> dict[str, float]:
    return {name: value * factor if name == tier else value for name, value in by_tier.items()}
