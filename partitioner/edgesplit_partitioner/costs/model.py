"""Costs: the input of the planner. The file format (`edgesplit.costs/1`) is documented in docs/costs.md.

Seconds and joules are per inference and by tier; bytes are those sent over a link. All classes are frozen values.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec
import numpy as np

from edgesplit.errors import UsageError
from edgesplit.release import boundary_codecs

T = TypeVar("T")

FORMAT: Final = "edgesplit.costs/1"
"""Format identifier that a costs file states."""
RAW: Final = "raw"
ZSTD: Final = "raw+zstd"
LOSSLESS: Final = (RAW, ZSTD)
"""Codecs that change no value."""
LOSSY: Final = tuple(name + suffix for name in boundary_codecs.LOSSY for suffix in ("", boundary_codecs.ZSTD_SUFFIX))
"""Codecs that lose precision, raw or within a compressed request."""
CODECS: Final = (*LOSSLESS, *LOSSY)
MAX_VALUE: Final = 1e9
"""Upper bound (exclusive) of seconds, joules, watts and losses: anything else is a mistake, or infinity."""
TYPO_SIMILARITY: Final = 0.9
"""Similarity (difflib ratio) from which an unknown codec name is refused as a typo of a known one; a name further off
is a codec of the file's own."""
MAX_BYTES: Final = 2**53
"""Largest size in bytes: integers up to here add up exactly in floats."""


class ChangeCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many samples' answers a codec changes, alone on its tensor."""

    chosen: int = 0
    """Of the samples by which codecs are chosen."""
    choosing_samples: int = 0
    confirmed: int = 0
    """Of the samples that chose nothing."""
    confirming_samples: int = 0


class CodecCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of sending a tensor with one codec. `raw+zstd` is raw bytes in a compressed request."""

    bytes: int
    """Bytes that are sent."""
    encode_s: dict[str, float] = {}
    """Seconds of encoding, by the tier that sends."""
    decode_s: dict[str, float] = {}
    """Seconds of decoding, by the tier that receives."""
    loss: float = 0.0
    """End-to-end output error that this codec alone causes; 0 is lossless."""
    confirmed_loss: float | None = None
    """That error on samples that were not used to choose the codec; None where it was not measured."""
    clip: float = 1.0
    """Share of a tensor's own range that `int4` divides into levels."""
    changes: ChangeCounts | None = None
    """The answers that this codec alone changes; None where they were not compared."""


class TensorCost(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor's size when sent raw, and its costs with every other codec that was measured."""

    bytes: int
    codecs: dict[str, CodecCost] = {}

    def with_codec_seconds(self, change: Callable[[Mapping[str, float]], dict[str, float]]) -> TensorCost:
        """The tensor's costs with what `change` returns for each codec's seconds by tier, of encoding and decoding."""
        codecs = {
            name: msgspec.structs.replace(codec, encode_s=change(codec.encode_s), decode_s=change(codec.decode_s))
            for name, codec in self.codecs.items()
        }
        return msgspec.structs.replace(self, codecs=codecs)


class PictureInput(msgspec.Struct, frozen=True, kw_only=True):
    """A model input that most likely is a picture and is sent as numbers, for want of an input spec."""

    jpeg_bytes: int
    """Typical size of its JPEG."""
    input_spec: str
    """The input spec that would send the JPEG, but for scale, mean and std, which are the model's own."""


class RelativeInterval(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction interval relative to the predicted value: the true value lies between `low` and `high` times it with
    probability `coverage`."""

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
    """Prediction interval in seconds (low, high), by tier whose seconds are predicted."""
    joules: dict[str, float] = {}
    weight_bytes: int = 0
    tiers: tuple[str, ...] = ()
    """Tiers that may run it; empty means all that have seconds."""
    operator: str = ""
    """Class of its main operator, for display: conv, depthwise, gemm, elementwise, ..."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """A layer graph with its costs. The layers are in an order in which they can run."""

    format: Literal["edgesplit.costs/1"] = FORMAT
    model: str
    tiers: tuple[str, ...]
    """Ordered from the device outwards; at least two."""
    inputs: dict[str, TensorCost]
    outputs: tuple[str, ...]
    layers: tuple[LayerCost, ...]
    idle_watts: dict[str, float] = {}
    raw_inputs: tuple[str, ...] = ()
    """Tensors that still show the raw input (the inputs and what is only decoded, moved or rescaled from them). Empty
    means: the inputs."""
    pictures: dict[str, PictureInput] = {}
    """Inputs that most likely are pictures and are sent as numbers. No plan depends on them."""
    device_class: str = ""
    basis: dict[str, str] = {}
    """By tier: `measured` or `predicted`, followed by the machine or profile."""
    intervals: dict[str, RelativeInterval] = {}
    """By predicted tier: the prediction interval of whole networks, an error that all layers share."""

    @property
    def tensors(self) -> dict[str, TensorCost]:
        """Every tensor by name: inputs first, then those that the layers write, in order."""
        tensors = dict(self.inputs)
        for layer in self.layers:
            tensors.update(layer.writes)
        return tensors

    def with_tensors(self, change: Callable[[str, TensorCost], TensorCost]) -> Costs:
        """The costs with what `change` returns for each tensor's name and cost."""

        def changed(tensors: Mapping[str, TensorCost]) -> dict[str, TensorCost]:
            return {name: change(name, cost) for name, cost in tensors.items()}

        layers = tuple(msgspec.structs.replace(layer, writes=changed(layer.writes)) for layer in self.layers)
        return msgspec.structs.replace(self, inputs=changed(self.inputs), layers=layers)

    @property
    def raw(self) -> frozenset[str]:
        """Names of the tensors that the limit `keep_raw_input` keeps on the device."""
        return frozenset(self.raw_inputs or self.inputs)


def without_tier(by_tier: Mapping[str, T], tier: str) -> dict[str, T]:
    """The mapping without the tier."""
    return {name: value for name, value in by_tier.items() if name != tier}


def load_costs(source: str | Path | Mapping[str, Any]) -> Costs:
    """Costs from a file or a mapping, which may contain numpy values; UsageError states what is wrong, and where."""
    document: Any = None
    raw, name = b"", "" if isinstance(source, Mapping) else f"{str(source)[:200]}: "
    try:
        if isinstance(source, Mapping):
            document = to_python_types(source)
        else:
            raw = Path(source).read_bytes()
            document = to_python_types(msgspec.json.decode(raw))
        _check_spelling(document)
        costs = msgspec.convert(document, Costs)
        check_costs(costs)
    except OSError as error:
        raise UsageError(f"cannot read costs from {name.removesuffix(': ')}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}not a costs file ({FORMAT}): {_invalid_element(document)}{error}") from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError, ValueError) as error:
        raise UsageError(f"{name}not a costs file ({FORMAT}): {_with_line(str(error), raw)}") from error
    except UsageError as error:
        raise UsageError(f"{name}{error}") from error
    return costs


def _with_line(text: str, raw: bytes) -> str:
    """The decoder's message with `(byte 127)` replaced by line and column."""
    position = re.search(r"\(byte (\d+)\)", text)
    if not position:
        return text
    before = raw[: int(position[1])]
    return text.replace(position[0], f"(line {before.count(10) + 1}, column {len(before) - before.rfind(10)})")


def to_python_types(value: Any) -> Any:
    """The value in Python's own types: numpy scalars and arrays are converted, and whole floats become integers (1e6 is
    a valid size)."""
    if isinstance(value, Mapping):
        return {key: to_python_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_python_types(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return to_python_types(value.tolist())
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_BYTES else value


def check_costs(costs: Costs) -> None:
    """UsageError unless tiers, names and numbers are consistent: every tensor is written before it is read, names are
    unique, values are in range."""
    if len(costs.tiers) < 2 or len(set(costs.tiers)) != len(costs.tiers):
        raise UsageError("costs: at least two different tiers are needed, ordered from the device outwards")
    if not costs.layers:
        raise UsageError("costs: there are no layers to plan")
    known = dict(costs.inputs)
    writer_of = {tensor: layer.name for layer in costs.layers for tensor in layer.writes}
    for layer in costs.layers:
        for tensor in layer.reads:
            if tensor not in known:
                raise UsageError(
                    f"costs: layer {layer.name!r} reads {tensor!r}, {_unwritten_reason(tensor, known, writer_of)}"
                )
        for tensor, cost in layer.writes.items():
            if tensor in known:
                raise UsageError(f"costs: {tensor!r} is written twice, the second time by layer {layer.name!r}")
            known[tensor] = cost
        _check_layer(costs, layer)
    repeated = next((name for name, count in Counter(layer.name for layer in costs.layers).items() if count > 1), None)
    if repeated is not None:
        raise UsageError(f"costs: two layers share the name {repeated!r}")
    for tensor in (*costs.outputs, *costs.raw_inputs):
        if tensor not in known:
            hint = _suggestion(tensor, known)
            raise UsageError(f"costs: {tensor!r} is named as an output or raw input but nothing writes it{hint}")
    for name, picture in costs.pictures.items():
        if name not in costs.inputs:
            raise UsageError(f"costs: pictures: {name!r} is no input{_suggestion(name, costs.inputs)}")
        if picture.jpeg_bytes < 1:
            raise UsageError(
                f"costs: pictures: the JPEG of {name!r} has {picture.jpeg_bytes} bytes; at least 1 is needed"
            )
    for tier, factors in costs.intervals.items():
        _check_tiers(costs, "intervals", (tier,))
        if not (0 < factors.low <= 1 <= factors.high < math.inf and 0 < factors.coverage < 1):
            raise UsageError(f"costs: the interval of {tier!r} is not valid: low is at most 1, high at least 1")
    for name, tensor_cost in known.items():
        _check_tensor(costs, name, tensor_cost)
    _check_tiers(costs, "idle_watts", costs.idle_watts)
    _check_tiers(costs, "basis", costs.basis)
    for tier, watts in costs.idle_watts.items():
        _check_number(f"idle_watts on {tier!r}", watts)
    _check_names((costs.model, *costs.tiers, *known, *(layer.name for layer in costs.layers)))


def _unwritten_reason(tensor: str, known: Iterable[str], writer_of: Mapping[str, str]) -> str:
    """The end of the error message for a tensor that is read before it is written."""
    if tensor not in writer_of:
        return f"which nothing before it writes, nor is it an input{_suggestion(tensor, known)}"
    return (
        f"which nothing before it writes, only layer {writer_of[tensor]!r}: "
        "put the layers in an order in which they can run, without a cycle"
    )


def _check_layer(costs: Costs, layer: LayerCost) -> None:
    """UsageError unless the layer has seconds on each of its tiers, and all its figures are in range."""
    where = f"layer {layer.name!r}"
    allowed = layer.tiers or tuple(layer.seconds)
    for tier in allowed:
        _check_tiers(costs, f"{where} names the tier", (tier,))
        if tier not in layer.seconds:
            raise UsageError(f"costs: {where} may run on {tier!r} but has no seconds there")
    if not allowed:
        raise UsageError(f"costs: {where} may run nowhere: give its seconds on at least one tier")
    for what, by_tier in (("seconds", layer.seconds), ("joules", layer.joules)):
        _check_tiers(costs, f"{where}: {what}", by_tier)
        for tier, value in by_tier.items():
            _check_number(f"{where}: {what} on {tier!r}", value)
    for tier, (low, high) in layer.between.items():
        if not 0 <= low <= layer.seconds.get(tier, -1.0) <= high < math.inf:
            raise UsageError(f"costs: {where} is not between {low} and {high} on {tier!r}")
    _check_size(f"{where}: weight_bytes", layer.weight_bytes)


def _check_tensor(costs: Costs, name: str, tensor: TensorCost) -> None:
    """UsageError unless sizes, seconds and losses of the tensor's codecs are in range and consistent."""
    _check_size(f"tensor {name!r}: bytes", tensor.bytes)
    for codec, cost in tensor.codecs.items():
        where = f"tensor {name!r}, codec {codec!r}"
        if codec not in CODECS and (close_names := difflib.get_close_matches(codec, CODECS, 1, TYPO_SIMILARITY)):
            raise UsageError(f"costs: {where} is not known; did you mean {close_names[0]!r}?")
        if codec == RAW and (cost.bytes != tensor.bytes or any(cost.encode_s.values()) or any(cost.decode_s.values())):
            raise UsageError(f"costs: {where}: raw is the tensor's own bytes and costs nothing else")
        if codec in LOSSLESS and (cost.loss or cost.confirmed_loss):
            raise UsageError(f"costs: {where} is lossless, so its loss must be 0")
        _check_size(f"{where}: bytes", cost.bytes)
        for what, by_tier in (("encode_s", cost.encode_s), ("decode_s", cost.decode_s)):
            _check_tiers(costs, f"{where}: {what}", by_tier)
            for tier, value in by_tier.items():
                _check_number(f"{where}: {what} on {tier!r}", value)
        _check_number(f"{where}: loss", cost.loss)
        _check_number(f"{where}: confirmed_loss", cost.confirmed_loss or 0.0)
        if not 0 < cost.clip <= 1:
            raise UsageError(f"costs: {where}: clip is {cost.clip}; it must be above 0 and at most 1")
        changes = cost.changes or ChangeCounts()
        if not (
            0 <= changes.chosen <= changes.choosing_samples and 0 <= changes.confirmed <= changes.confirming_samples
        ):
            raise UsageError(f"costs: {where}: changes must count no more answers than samples, and none below 0")


def _check_tiers(costs: Costs, where: str, named: Iterable[str]) -> None:
    for tier in named:
        if tier not in costs.tiers:
            raise UsageError(f"costs: {where} {tier!r}, not one of {list(costs.tiers)}{_suggestion(tier, costs.tiers)}")


def _check_number(where: str, value: float) -> None:
    if not 0 <= value < MAX_VALUE:
        raise UsageError(f"costs: {where} is {value}; it must be at least 0 and below {MAX_VALUE:g}")


def _check_size(where: str, size: int) -> None:
    if not 0 <= size <= MAX_BYTES:
        raise UsageError(f"costs: {where} is {size}; a size must be at least 0 and at most 2^53")


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if not name or (not name.isascii() and _is_broken(name)):
            raise UsageError(f"costs: {name!r} is no name: give at least one character, all of them Unicode's")


def _is_broken(name: str) -> bool:
    """Whether the name contains half a surrogate pair, which cannot be written to a file."""
    return any("\ud800" <= letter <= "\udfff" for letter in name)


def _check_spelling(document: Any) -> None:
    """Unknown fields are ignored (a newer version may have written them), unless the name is close to a known one: that
    is a typo, and UsageError."""
    _check_fields("", document, Costs)
    inputs, layers = (document.get(name) if isinstance(document, dict) else None for name in ("inputs", "layers"))
    tensors = dict(inputs) if isinstance(inputs, dict) else {}
    for number, layer in enumerate(layers) if isinstance(layers, list) else ():
        is_object = isinstance(layer, dict)
        _check_fields(f"layer {layer.get('name', number)!r}: " if is_object else "", layer, LayerCost)
        writes = layer.get("writes") if is_object else None
        tensors.update(writes if isinstance(writes, dict) else {})
    for name, tensor in tensors.items():
        _check_fields(f"tensor {name!r}: ", tensor, TensorCost)
        codecs = tensor.get("codecs") if isinstance(tensor, dict) else None
        for codec, cost in codecs.items() if isinstance(codecs, dict) else ():
            _check_fields(f"tensor {name!r}, codec {codec!r}: ", cost, CodecCost)


def _check_fields(where: str, document: Any, kind: type[msgspec.Struct]) -> None:
    known = kind.__struct_fields__
    for name in document if isinstance(document, dict) else ():
        if name not in known and isinstance(name, str) and (hint := _suggestion(name, known)):
            raise UsageError(f"costs: {where}there is no field {name!r}{hint}")


def _invalid_element(document: Any) -> str:
    """Name of the first layer or tensor that cannot be parsed, to put before msgspec's message, which gives only a
    position in a list."""
    if not isinstance(document, dict):
        return ""
    inputs, layers = document.get("inputs"), document.get("layers")
    for name, tensor in inputs.items() if isinstance(inputs, dict) else ():
        if not _is_convertible(tensor, TensorCost):
            return f"input {name!r}: "
    for number, layer in enumerate(layers) if isinstance(layers, list) else ():
        if _is_convertible(layer, LayerCost):
            continue
        place = f"layer {layer.get('name', number)!r}" if isinstance(layer, dict) else f"layer {number}"
        writes = layer.get("writes") if isinstance(layer, dict) else None
        tensors = writes.items() if isinstance(writes, dict) else ()
        invalid = next((name for name, tensor in tensors if not _is_convertible(tensor, TensorCost)), None)
        return f"{place}: " if invalid is None else f"{place}, tensor {invalid!r}: "
    return ""


def _is_convertible(value: Any, kind: type[msgspec.Struct]) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _suggestion(name: str, known: Iterable[str]) -> str:
    """A question for the closest known name, to append to an error message; empty where none is close."""
    close_names = difflib.get_close_matches(name, list(known), 1, 0.75)
    return f"; did you mean {close_names[0]!r}?" if close_names else ""
