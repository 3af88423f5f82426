"""Costs: what a plan is made from. The file format (`edgesplit.costs/1`) is documented in docs/costs.md.

Seconds and joules are per inference, by tier; bytes are those that travel. Everything is a plain frozen value.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from edgesplit.errors import UsageError

FORMAT: Final = "edgesplit.costs/1"
RAW: Final = "raw"
ZSTD: Final = "raw+zstd"
LOSSLESS: Final = (RAW, ZSTD)
LOSSY: Final = ("fp16", "fp16+zstd", "int8", "int8+zstd")
CODECS: Final = (*LOSSLESS, *LOSSY)
MOST: Final = 1e9
"""Seconds, joules, watts and losses are below it: what is not is a mistake, or infinity."""
SLIP: Final = 0.9
"""A codec's name that is so close to one of ours is a typo of it; any other is a codec of the file's own."""
MOST_BYTES: Final = 2**53
"""Sizes up to here add up exactly in floats."""


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
    between: dict[str, tuple[float, float]] = {}
    """By tier on which the seconds are predicted: between how many they are believed to lie."""
    joules: dict[str, float] = {}
    weight_bytes: int = 0
    tiers: tuple[str, ...] = ()
    """Tiers that may run it; empty means all that have seconds."""
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
    """Costs from a file or a mapping (whose numbers may be numpy's); UsageError says what is wrong, and where."""
    given: Any = None
    raw, name = b"", "" if isinstance(source, Mapping) else f"{str(source)[:200]}: "
    try:
        if isinstance(source, Mapping):
            given = plain(source)
        else:
            raw = Path(source).read_bytes()
            given = plain(msgspec.json.decode(raw))
        _check_spelling(given)
        costs = msgspec.convert(given, Costs)
        check_costs(costs)
    except OSError as error:
        raise UsageError(f"cannot read costs from {name.removesuffix(': ')}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}not a costs file ({FORMAT}): {_where(given)}{error}") from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError, ValueError) as error:
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


def plain(given: Any) -> Any:
    """The same of Python's own types alone: numpy's numbers and arrays are what measuring gives, and 1e6 is a size."""
    if isinstance(given, Mapping):
        return {key: plain(value) for key, value in given.items()}
    if isinstance(given, list | tuple):
        return [plain(value) for value in given]
    if isinstance(given, np.generic | np.ndarray):
        return plain(given.tolist())
    return int(given) if isinstance(given, float) and given.is_integer() and abs(given) <= MOST_BYTES else given


def check_costs(costs: Costs) -> None:
    """Tiers, names and numbers hang together, or UsageError."""
    if len(costs.tiers) < 2 or len(set(costs.tiers)) != len(costs.tiers):
        raise UsageError("costs: at least two different tiers are needed, ordered from the device outwards")
    if not costs.layers:
        raise UsageError("costs: there are no layers to plan")
    known = dict(costs.inputs)
    later = {tensor: layer.name for layer in costs.layers for tensor in layer.writes}
    for layer in costs.layers:
        for tensor in layer.reads:
            if tensor not in known:
                raise UsageError(f"costs: layer {layer.name!r} reads {tensor!r}, {_unwritten(tensor, known, later)}")
        for tensor, cost in layer.writes.items():
            if tensor in known:
                raise UsageError(f"costs: {tensor!r} is written twice, the second time by layer {layer.name!r}")
            known[tensor] = cost
        _check_layer(costs, layer)
    twice = next((name for name, count in Counter(layer.name for layer in costs.layers).items() if count > 1), None)
    if twice is not None:
        raise UsageError(f"costs: two layers share the name {twice!r}")
    for tensor in (*costs.outputs, *costs.raw_inputs):
        if tensor not in known:
            hint = _hint(tensor, known)
            raise UsageError(f"costs: {tensor!r} is named as an output or raw input but nothing writes it{hint}")
    for tier, factors in costs.intervals.items():
        _check_tiers(costs, "intervals", (tier,))
        if not (0 < factors.low <= 1 <= factors.high < math.inf and 0 < factors.coverage < 1):
            raise UsageError(f"costs: the interval of {tier!r} is none: low is at most 1, high at least 1")
    for name, tensor_cost in known.items():
        _check_tensor(costs, name, tensor_cost)
    _check_tiers(costs, "idle_watts", costs.idle_watts)
    _check_tiers(costs, "basis", costs.basis)
    for tier, watts in costs.idle_watts.items():
        _check_number(f"idle_watts on {tier!r}", watts)
    _check_names((costs.model, *costs.tiers, *known, *(layer.name for layer in costs.layers)))


def _unwritten(tensor: str, known: Iterable[str], later: Mapping[str, str]) -> str:
    """Why a layer cannot read it."""
    if tensor not in later:
        return f"which nothing before it writes, nor is it an input{_hint(tensor, known)}"
    return (
        f"which nothing before it writes, only layer {later[tensor]!r}: "
        "put the layers in an order in which they can run, without a cycle"
    )


def _check_layer(costs: Costs, layer: LayerCost) -> None:
    where = f"layer {layer.name!r}"
    allowed = layer.tiers or tuple(layer.seconds)
    for tier in allowed:
        _check_tiers(costs, f"{where} names the tier", (tier,))
        if tier not in layer.seconds:
            raise UsageError(f"costs: {where} may run on {tier!r} but has no seconds there")
    if not allowed:
        raise UsageError(f"costs: {where} may run nowhere: give its seconds on at least one tier")
    for what, costing in (("seconds", layer.seconds), ("joules", layer.joules)):
        _check_tiers(costs, f"{where}: {what}", costing)
        for tier, value in costing.items():
            _check_number(f"{where}: {what} on {tier!r}", value)
    for tier, (low, high) in layer.between.items():
        if not 0 <= low <= layer.seconds.get(tier, -1.0) <= high < math.inf:
            raise UsageError(f"costs: {where} is not between {low} and {high} on {tier!r}")
    _check_size(f"{where}: weight_bytes", layer.weight_bytes)


def _check_tensor(costs: Costs, name: str, tensor: TensorCost) -> None:
    _check_size(f"tensor {name!r}: bytes", tensor.bytes)
    for codec, cost in tensor.codecs.items():
        where = f"tensor {name!r}, codec {codec!r}"
        if codec not in CODECS and (near := difflib.get_close_matches(codec, CODECS, 1, SLIP)):
            raise UsageError(f"costs: {where} is not known; did you mean {near[0]!r}?")
        if codec == RAW and (cost.bytes != tensor.bytes or any(cost.encode_s.values()) or any(cost.decode_s.values())):
            raise UsageError(f"costs: {where}: raw is the tensor's own bytes and costs nothing else")
        if codec in LOSSLESS and (cost.loss or cost.confirmed_loss):
            raise UsageError(f"costs: {where} is lossless, so its loss must be 0")
        _check_size(f"{where}: bytes", cost.bytes)
        for what, costing in (("encode_s", cost.encode_s), ("decode_s", cost.decode_s)):
            _check_tiers(costs, f"{where}: {what}", costing)
            for tier, value in costing.items():
                _check_number(f"{where}: {what} on {tier!r}", value)
        _check_number(f"{where}: loss", cost.loss)
        _check_number(f"{where}: confirmed_loss", cost.confirmed_loss or 0.0)


def _check_tiers(costs: Costs, where: str, named: Iterable[str]) -> None:
    for tier in named:
        if tier not in costs.tiers:
            raise UsageError(f"costs: {where} {tier!r}, not one of {list(costs.tiers)}{_hint(tier, costs.tiers)}")


def _check_number(where: str, value: float) -> None:
    if not 0 <= value < MOST:
        raise UsageError(f"costs: {where} is {value}; it must be at least 0 and below {MOST:g}")


def _check_size(where: str, size: int) -> None:
    if not 0 <= size <= MOST_BYTES:
        raise UsageError(f"costs: {where} is {size}; a size must be at least 0 and at most 2^53")


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if not name or (not name.isascii() and _is_broken(name)):
            raise UsageError(f"costs: {name!r} is no name: give at least one character, all of them Unicode's")


def _is_broken(name: str) -> bool:
    """Half a surrogate pair cannot be written to a file."""
    return any("\ud800" <= letter <= "\udfff" for letter in name)


def _check_spelling(given: Any) -> None:
    """A field that nobody knows is ignored, but not if it is close to one that somebody does: that is a typo."""
    _check_fields("", given, Costs)
    inputs, layers = (given.get(name) if isinstance(given, dict) else None for name in ("inputs", "layers"))
    tensors = dict(inputs) if isinstance(inputs, dict) else {}
    for number, layer in enumerate(layers) if isinstance(layers, list) else ():
        named = isinstance(layer, dict)
        _check_fields(f"layer {layer.get('name', number)!r}: " if named else "", layer, LayerCost)
        writes = layer.get("writes") if named else None
        tensors.update(writes if isinstance(writes, dict) else {})
    for name, tensor in tensors.items():
        _check_fields(f"tensor {name!r}: ", tensor, TensorCost)
        codecs = tensor.get("codecs") if isinstance(tensor, dict) else None
        for codec, cost in codecs.items() if isinstance(codecs, dict) else ():
            _check_fields(f"tensor {name!r}, codec {codec!r}: ", cost, CodecCost)


def _check_fields(where: str, given: Any, kind: type[msgspec.Struct]) -> None:
    known = kind.__struct_fields__
    for name in given if isinstance(given, dict) else ():
        if name not in known and isinstance(name, str) and (hint := _hint(name, known)):
            raise UsageError(f"costs: {where}there is no field {name!r}{hint}")


def _where(given: Any) -> str:
    """Which layer or tensor cannot be read, by name: a position in a list says less."""
    if not isinstance(given, dict):
        return ""
    inputs, layers = given.get("inputs"), given.get("layers")
    for name, tensor in inputs.items() if isinstance(inputs, dict) else ():
        if not _reads_as(tensor, TensorCost):
            return f"input {name!r}: "
    for number, layer in enumerate(layers) if isinstance(layers, list) else ():
        if _reads_as(layer, LayerCost):
            continue
        place = f"layer {layer.get('name', number)!r}" if isinstance(layer, dict) else f"layer {number}"
        writes = layer.get("writes") if isinstance(layer, dict) else None
        tensors = writes.items() if isinstance(writes, dict) else ()
        wrong = next((name for name, tensor in tensors if not _reads_as(tensor, TensorCost)), None)
        return f"{place}: " if wrong is None else f"{place}, tensor {wrong!r}: "
    return ""


def _reads_as(given: Any, kind: type[msgspec.Struct]) -> bool:
    try:
        msgspec.convert(given, kind)
    except msgspec.ValidationError:
        return False
    return True


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1, 0.75)
    return f"; did you mean {near[0]!r}?" if near else ""
