"""How one tensor travels: `raw`, `fp16` or `int8`. The same code measures, sends and receives.

`fp16` is ONNX's Cast and `int8` ONNX's DynamicQuantizeLinear (ai.onnx 11): a foreign server undoes them with Cast and
DequantizeLinear, for which scale and zero point travel as two tensors of one element beside the eight bits. A tensor
that a codec would spoil (not finite, or beyond fp16's largest number) travels raw; its data type tells the receiver.
Compression of a request's body is not here: it is the transport's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from edgesplit.errors import UsageError
from edgesplit.lazy_import import later
from edgesplit.release.manifest import TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Tensor = npt.NDArray[Any]
else:
    np = later("numpy")
    Tensor = Any

RAW, FP16, INT8 = "raw", "fp16", "int8"
CODECS = (RAW, FP16, INT8)
LOSSY = (FP16, INT8)
ZSTD = "+zstd"
"""Ends the name of a codec in a compressed request, where costs are told: `raw+zstd`, `int8+zstd`."""
LARGEST_FP16 = 65504.0
ENTRY_BYTES = 80
"""About what a tensor's entry in a request's JSON takes beside its name."""
_LOSSY_FOR: dict[str, tuple[str, ...]] = {"FP64": LOSSY, "FP32": LOSSY, "FP16": (INT8,)}
_DTYPES = {"FP64": "float64", "FP32": "float32", "FP16": "float16"}


def scale_name(tensor: str) -> str:
    """The companion (FP32, [1]) that tells an int8 tensor's scale."""
    return f"{tensor}:scale"


def zero_point_name(tensor: str) -> str:
    """The companion (UINT8, [1]) that tells which of the 256 values stands for 0."""
    return f"{tensor}:zero_point"


def lossy_codecs(datatype: str) -> tuple[str, ...]:
    """The lossy codecs that this Open Inference Protocol data type may travel by: none unless it is a float."""
    return _LOSSY_FOR.get(datatype, ())


def encode(name: str, tensor: Tensor, codec: str) -> dict[str, Tensor]:
    """What travels for this tensor, by name: itself or its encoded form, with its companions if it has any."""
    if codec not in CODECS:
        raise UsageError(f"codec {codec!r} is not known; these are: {', '.join(CODECS)}")
    if codec == RAW or tensor.dtype.kind != "f" or not tensor.size:
        return {name: tensor}
    lowest, highest = float(tensor.min()), float(tensor.max())
    if codec == FP16:
        fits = lowest >= -LARGEST_FP16 and highest <= LARGEST_FP16  # false for NaN too
        return {name: tensor.astype(np.float16) if fits else tensor}
    scale = _scale(lowest, highest)
    if scale is None or max(highest, -lowest) + float(scale) > _largest(tensor):
        return {name: tensor}
    zero_point = np.clip(np.rint(np.float32(-min(lowest, 0.0)) / scale), 0, 255).astype(np.uint8)
    eight_bits = np.clip(np.rint(tensor / scale) + np.float32(zero_point), 0, 255).astype(np.uint8)
    return {name: eight_bits, scale_name(name): scale.reshape(1), zero_point_name(name): zero_point.reshape(1)}


def _largest(tensor: Tensor) -> float:
    """The largest number of a type that eight bits may round beyond."""
    return LARGEST_FP16 if tensor.dtype == np.float16 else math.inf


def _scale(lowest: float, highest: float) -> np.float32 | None:
    """DynamicQuantizeLinear's scale, over a range that holds 0; None where eight bits cannot tell the values apart."""
    if lowest == highest == 0.0:
        return np.float32(1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = (np.float32(max(highest, 0.0)) - np.float32(min(lowest, 0.0))) / np.float32(255)
        usable = scale >= np.finfo(np.float32).tiny and np.isfinite(scale * np.float32(255))
    return np.float32(scale) if usable else None


def encode_all(tensors: Mapping[str, Tensor], codecs: Mapping[str, str]) -> dict[str, Tensor]:
    """All that travels for these tensors, each by its codec; one left out of `codecs` travels raw."""
    sent: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        sent.update(encode(name, tensor, codecs.get(name, RAW)))
    return sent


def decode_all(sent: Mapping[str, Tensor], specs: Iterable[TensorSpec], codecs: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors as the model takes them, each in its spec's data type. Left alone is whatever no codec explains:
    `oip.check_tensors` refuses it. UsageError where a companion is missing or makes no sense."""
    tensors = dict(sent)
    for spec in specs:
        codec, given = codecs.get(spec.name, RAW), sent.get(spec.name)
        dtype = _DTYPES.get(spec.datatype)
        if given is None or dtype is None:
            continue
        if codec != RAW and given.dtype != dtype:
            _check_shape(spec, given)  # before anything is made of it: it grows fourfold
        if codec == FP16 and given.dtype == np.float16:
            tensors[spec.name] = given.astype(dtype)
        elif codec == INT8 and given.dtype == np.uint8:
            scale = _companion(tensors, scale_name(spec.name), np.float32)
            zero_point = _companion(tensors, zero_point_name(spec.name), np.uint8)
            if not (np.isfinite(scale) and scale > 0):
                raise UsageError(f"input {scale_name(spec.name)[:80]!r} is {scale}, but must be above 0")
            tensors[spec.name] = dequantized(given, scale, zero_point).astype(dtype, copy=False)
    return tensors


def _check_shape(spec: TensorSpec, given: Tensor) -> None:
    """UsageError unless the tensor has as many numbers as the model takes, in its shape."""
    fits = len(given.shape) == len(spec.shape) and all(
        want in (-1, length) for want, length in zip(spec.shape, given.shape, strict=True)
    )
    if not fits:
        raise UsageError(
            f"input {spec.name[:80]!r} has shape {list(given.shape)[:8]}, but must have {list(spec.shape)}"
        )


def dequantized(eight_bits: Tensor, scale: np.float32, zero_point: np.uint8) -> npt.NDArray[np.float32]:
    """ONNX's DequantizeLinear: (x - zero point) · scale, in FP32."""
    with np.errstate(over="ignore"):
        values: npt.NDArray[np.float32] = (eight_bits.astype(np.float32) - np.float32(zero_point)) * scale
    return values


def _companion(tensors: dict[str, Tensor], name: str, dtype: Any) -> Any:
    """The one element of a companion, which is taken out of `tensors`."""
    given = tensors.pop(name, None)
    if given is None or given.dtype != dtype or given.shape != (1,):
        raise UsageError(f"input {name[:80]!r} is missing, or is not one element of {np.dtype(dtype).name}")
    return given[0]


def decoded(name: str, sent: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """What the other side makes of `encode(name, like, …)`."""
    given = sent[name]
    if given.dtype == like.dtype:
        return given
    if given.dtype == np.float16:
        return given.astype(like.dtype)
    eight_bits = dequantized(given, sent[scale_name(name)][0], sent[zero_point_name(name)][0])
    return eight_bits.astype(like.dtype, copy=False)


def wire_specs(spec: TensorSpec, codec: str) -> tuple[TensorSpec, ...]:
    """What a server of this row tells that it takes for the tensor. It takes the tensor raw as well."""
    if codec not in lossy_codecs(spec.datatype):
        return (spec,)
    if codec == FP16:
        return (TensorSpec(spec.name, "FP16", spec.shape),)
    return (
        TensorSpec(spec.name, "UINT8", spec.shape),
        TensorSpec(scale_name(spec.name), "FP32", (1,)),
        TensorSpec(zero_point_name(spec.name), "UINT8", (1,)),
    )


def wire_bytes(name: str, sent: Mapping[str, Tensor]) -> int:
    """Bytes that travel for one encoded tensor: its own, and all of its companions'."""
    return sum(one.nbytes + (0 if key == name else ENTRY_BYTES + len(key)) for key, one in sent.items())


def split(name: str) -> tuple[str, bool]:
    """The base codec and whether the body is compressed, of a codec as costs name it (`int8+zstd`)."""
    return name.removesuffix(ZSTD), name.endswith(ZSTD)
