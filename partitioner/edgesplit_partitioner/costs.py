"""Costs: what a plan is made from. The file format (`edgesplit.costs/1`) is documented in docs/costs.md.

Seconds and joules are per inference, by tier; bytes are those that travel. Everything is a plain frozen value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from edgesplit.errors import UsageError

FORMAT: Final = "edgesplit.costs/1"


class CodecCost(msgspec.Struct, frozen=True, kw_only=True):
    """One way for a tensor to travel. `raw+zstd` is raw bytes in a compressed request."""

    bytes: int
    encode_s: dict[str, float] = {}
    """By the tier that sends."""
    decode_s: dict[str, float] = {}
    """By the tier that receives."""
    loss: float = 0.0
    """End-to-end output error that this codec alone causes; 0 is lossless."""
    confirmed_loss: float | None = None
    """The same on samples that choices are not made by; None where nobody has measured it."""


class TensorCost(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor's size when it travels raw, and by every other codec that was measured."""

    bytes: int
    codecs: dict[str, CodecCost] = {}


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """Between which factors of what is predicted the truth lies, and how often."""

    low: float
    high: float
    coverage: float = 0.9


class LayerCost(msgspec.Struct, frozen=True, kw_only=True):
    """A layer: what it reads and writes, and what it costs on each tier that may run it."""

    name: str
    reads: tuple[str, ...]
    writes: dict[str, TensorCost]
    seconds: dict[str, float]
    joules: dict[str, float] = {}
    weight_bytes: int = 0
    tiers: tuple[str, ...] = ()
    """Tiers that may run it; empty means all that have seconds."""
    between: dict[str, tuple[float, float]] = {}
    """By tier on which the seconds are predicted: between how many they are believed to lie."""
    operator: str = ""
    """Class of its main operator, for people: conv, depthwise, gemm, elementwise, ..."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """A layer graph with its costs. Layers stand in an order in which they can run."""

    format: Literal["edgesplit.costs/1"] = FORMAT
    model: str
    tiers: tuple[str, ...]
    """Ordered from the device outwards; at least two."""
    inputs: dict[str, TensorCost]
    outputs: tuple[str, ...]
    layers: tuple[LayerCost, ...]
    idle_watts: dict[str, float] = {}
    raw_inputs: tuple[str, ...] = ()
    """Tensors that still show the raw input (the inputs and what is only decoded, moved or rescaled from them).
    Empty means: the inputs."""
    device_class: str = ""
    basis: dict[str, str] = {}
    """By tier: `measured` or `predicted`, with on what."""
    intervals: dict[str, Factors] = {}
    """By predicted tier: how far off whole networks are, an error that all layers share."""

    @property
    def tensors(self) -> tuple[TensorCost, ...]:
        """Every tensor, inputs first, then what the layers write, in order."""
        return (*self.inputs.values(), *(tensor for layer in self.layers for tensor in layer.writes.values()))

    @property
    def raw(self) -> frozenset[str]:
        """Tensors that `keep_raw_input` holds on the device."""
        return frozenset(self.raw_inputs or self.inputs)


def load_costs(source: str | Path | Mapping[str, Any]) -> Costs:
    """Costs from a file or a mapping; UsageError says what is wrong, and where."""
    raw, name = b"", "" if isinstance(source, Mapping) else f"{source}: "
    try:
        if isinstance(source, Mapping):
            costs = msgspec.convert(source, Costs, strict=False)
        else:
            raw = Path(source).read_bytes()
            costs = msgspec.json.decode(raw, type=Costs)
        check_costs(costs)
    except OSError as error:
        raise UsageError(f"cannot read costs from {source}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{name}not a costs file ({FORMAT}): {_with_line(str(error), raw)}") from error
    except UsageError as error:
        raise UsageError(f"{name}{error}") from error
    return costs


def _with_line(text: str, raw: bytes) -> str:
    """`(byte 127)` with the line that an editor shows."""
    found = re.search(r"\(byte (\d+)\)", text)
    if not found:
        return text
    before = raw[: int(found[1])]
    return text.replace(found[0], f"(line {before.count(10) + 1}, column {len(before) - before.rfind(10)})")


def check_costs(costs: Costs) -> None:
    """Tiers, names and numbers hang together, or UsageError."""
    if len(costs.tiers) < 2 or len(set(costs.tiers)) != len(costs.tiers):
        raise UsageError("costs: at least two different tiers are needed, ordered from the device outwards")
    known = dict(costs.inputs)
    for layer in costs.layers:
        for tensor in layer.reads:
            if tensor not in known:
                raise UsageError(f"costs: layer {layer.name!r} reads {tensor!r}, which nothing before it writes")
        for tensor, cost in layer.writes.items():
            if tensor in known:
                raise UsageError(f"costs: {tensor!r} is written twice")
            known[tensor] = cost
        _check_layer(costs, layer)
    if len({layer.name for layer in costs.layers}) != len(costs.layers):
        raise UsageError("costs: two layers share a name")
    for tensor in (*costs.outputs, *costs.raw_inputs):
        if tensor not in known:
            raise UsageError(f"costs: {tensor!r} is named as an output or raw input but nothing writes it")
    for tier, one in costs.intervals.items():
        if tier not in costs.tiers or not (0 < one.low <= 1 <= one.high < math.inf and 0 < one.coverage < 1):
            raise UsageError(f"costs: the interval of {tier!r} is none, or {tier!r} is no tier")
    for name, tensor_cost in known.items():
        if tensor_cost.bytes < 0 or any(codec.bytes < 0 for codec in tensor_cost.codecs.values()):
            raise UsageError(f"costs: {name!r} has a negative size")


def _check_layer(costs: Costs, layer: LayerCost) -> None:
    allowed = layer.tiers or tuple(layer.seconds)
    for tier in allowed:
        if tier not in costs.tiers:
            raise UsageError(f"costs: layer {layer.name!r} names the tier {tier!r}, not one of {list(costs.tiers)}")
        if tier not in layer.seconds:
            raise UsageError(f"costs: layer {layer.name!r} may run on {tier!r} but has no seconds there")
    if not allowed:
        raise UsageError(f"costs: layer {layer.name!r} may run nowhere")
    for what in (layer.seconds, layer.joules):
        for tier, value in what.items():
            if not 0 <= value < 1e9:
                raise UsageError(f"costs: layer {layer.name!r} costs {value} on {tier!r}")
    for tier, (low, high) in layer.between.items():
        if not 0 <= low <= layer.seconds.get(tier, -1.0) <= high < math.inf:
            raise UsageError(f"costs: layer {layer.name!r} is not between {low} and {high} on {tier!r}")
