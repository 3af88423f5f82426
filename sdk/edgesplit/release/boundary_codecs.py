"""Boundary codecs: how a tensor that crosses a cut is encoded: `raw`, `fp16`, `int8`, `int6` or `int4`. Profiling,
sending and receiving all use this code.

`fp16` is ONNX's Cast and `int8` ONNX's DynamicQuantizeLinear (ai.onnx 11): a third-party server decodes them with Cast
and DequantizeLinear, for which scale and zero point travel as two tensors of one element beside the 8-bit tensor.
`int6` uses 64 of the 256 levels and is the same on the wire; what it saves, compression saves. `int4` has 16 levels,
two to a byte, over a share of the tensor's range (its clip); only edgesplit decodes it (docs/protocol.md). A tensor
that a codec would corrupt (not finite, or beyond fp16's largest number) travels raw; the receiver sees this by its data
type. Compression of the request's body is done by the transport, not here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from edgesplit.errors import UsageError
from edgesplit.lazy_import import Tensor, np, npt
from edgesplit.release.manifest import TensorSpec

RAW, FP16, INT8, INT6, INT4 = "raw", "fp16", "int8", "int6", "int4"
CODECS = (RAW, FP16, INT8, INT6, INT4)
"""Names of all codecs."""
LOSSY = (FP16, INT8, INT6, INT4)
"""Codecs that lose precision, the finest first."""
PACKED = (INT4,)
"""Codecs with several values in a byte, which ONNX's operators do not decode: no foreign server receives them."""
STEPS = {INT8: 255, INT6: 63, INT4: 15}
"""Steps of the range of each quantising codec: one less than its levels."""
ZSTD_SUFFIX = "+zstd"
"""Suffix of a codec's name in cost tables for a compressed request: `raw+zstd`, `int8+zstd`."""
LARGEST_FP16 = 65504.0
"""Largest finite FP16 number."""
ENTRY_BYTES = 80
"""Approximate size of a tensor's entry in a request's JSON, without its name."""
_LOSSY_FOR: dict[str, tuple[str, ...]] = {"FP64": LOSSY, "FP32": LOSSY, "FP16": LOSSY[1:]}
_DTYPES = {"FP64": "float64", "FP32": "float32", "FP16": "float16"}


def scale_name(tensor: str) -> str:
    """Name of the companion tensor (FP32, [1]) with a quantised tensor's scale."""
    return f"{tensor}:scale"


def zero_point_name(tensor: str) -> str:
    """Name of the companion tensor (UINT8, [1]) with a quantised tensor's zero point."""
    return f"{tensor}:zero_point"


def lossy_codecs(datatype: str) -> tuple[str, ...]:
    """The lossy codecs for this Open Inference Protocol data type: none unless it is a float."""
    return _LOSSY_FOR.get(datatype, ())


def encode(name: str, tensor: Tensor, codec: str, clip: float = 1.0) -> dict[str, Tensor]:
    """Encode one tensor. Returns the tensors to send by name: the tensor or its encoded form, and its companions if it
    has any. `clip`: share of the tensor's own range that `int4` divides into its levels; values beyond it saturate."""
    if codec not in CODECS:
        raise UsageError(f"codec {codec!r} is not known; these are: {', '.join(CODECS)}")
    if codec == RAW or tensor.dtype.kind != "f" or not tensor.size:
        return {name: tensor}
    lowest, highest = float(tensor.min()), float(tensor.max())
    if codec == FP16:
        fits = lowest >= -LARGEST_FP16 and highest <= LARGEST_FP16  # false for NaN too
        return {name: tensor.astype(np.float16) if fits else tensor}
    # DynamicQuantizeLinear: y = clip(round(x / scale) + zero_point, 0, steps), over a range that includes 0.
    # Sent raw where there is no scale, or where rounding by up to one step could overflow the original type.
    share = clip if codec == INT4 else 1.0
    lowest, highest = share * lowest, share * highest
    scale = _scale(lowest, highest, STEPS[codec])
    if scale is None or max(highest, -lowest) + float(scale) > _largest(tensor):
        return {name: tensor}
    zero_point = np.clip(np.rint(np.float32(-min(lowest, 0.0)) / scale), 0, STEPS[codec]).astype(np.uint8)
    steps = np.asarray(
        tensor / scale
    )  # from here on in place: a new array per operation takes longer than the operation
    np.rint(steps, out=steps)
    steps += np.float32(zero_point)
    quantized = np.clip(steps, 0, STEPS[codec], out=steps).astype(np.uint8)
    return {
        name: _pack(quantized) if codec in PACKED else quantized,
        scale_name(name): scale.reshape(1),
        zero_point_name(name): zero_point.reshape(1),
    }


def _largest(tensor: Tensor) -> float:
    """Largest number of the tensor's type that the rounding to few levels could exceed."""
    return LARGEST_FP16 if tensor.dtype == np.float16 else math.inf


def _scale(lowest: float, highest: float, steps: int) -> np.float32 | None:
    """Scale of DynamicQuantizeLinear, over a range that contains 0; None where the range has no such scale in FP32."""
    if lowest == highest == 0.0:
        return np.float32(1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = (np.float32(max(highest, 0.0)) - np.float32(min(lowest, 0.0))) / np.float32(steps)
        usable = scale >= np.finfo(np.float32).tiny and np.isfinite(scale * np.float32(steps))
    return np.float32(scale) if usable else None


def _pack(quantized: Tensor) -> Tensor:
    """Values below 16 as a vector of half as many bytes, rounded up: the even places in the lower four bits, the odd
    ones in the upper; the last upper four bits are 0 where the count is odd."""
    flat = quantized.reshape(-1)
    packed = flat[0::2].copy()
    packed[: flat.size // 2] |= flat[1::2] << 4
    return packed


def encode_tensors(
    tensors: Mapping[str, Tensor], codecs: Mapping[str, str], clips: Mapping[str, float]
) -> dict[str, Tensor]:
    """Encode these tensors, each by its codec in `codecs`, by default raw, and its clip in `clips`, by default the
    whole range. Returns the tensors to send by name."""
    sent: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        sent.update(encode(name, tensor, codecs.get(name, RAW), clips.get(name, 1.0)))
    return sent


def decode_tensors(
    sent: Mapping[str, Tensor], specs: Iterable[TensorSpec], codecs: Mapping[str, str]
) -> dict[str, Tensor]:
    """Decode received tensors to the data types of their specs. Tensors that match no codec are left unchanged, for
    `oip.check_tensors` to refuse. UsageError where a companion is missing or invalid."""
    tensors = dict(sent)
    for spec in specs:
        codec, received = codecs.get(spec.name, RAW), sent.get(spec.name)
        dtype = _DTYPES.get(spec.datatype)
        if received is None or dtype is None:
            continue
        if codec != RAW and received.dtype != dtype:
            _check_shape(spec, received, codec)  # before anything is made of it: it grows four- or eightfold
        if codec == FP16 and received.dtype == np.float16:
            tensors[spec.name] = received.astype(dtype)
        elif codec in STEPS and received.dtype == np.uint8:
            scale = _pop_companion(tensors, scale_name(spec.name), np.float32)
            zero_point = _pop_companion(tensors, zero_point_name(spec.name), np.uint8)
            if not (np.isfinite(scale) and scale > 0):
                raise UsageError(f"input {scale_name(spec.name)[:80]!r} is {scale}, but must be above 0")
            values = _dequantize_sent(received, scale, zero_point, codec, spec.shape)
            tensors[spec.name] = values.astype(dtype, copy=False)
    return tensors


def _check_shape(spec: TensorSpec, received: Tensor, codec: str) -> None:
    """UsageError unless the tensor has the shape in which the codec sends what the model takes."""
    is_packed = codec in PACKED and received.dtype == np.uint8
    if is_packed and min(spec.shape, default=1) < 0:
        raise UsageError(f"input {spec.name[:80]!r} has no fixed shape, so {codec} cannot carry it: send it raw")
    shape = (_packed_bytes(spec.shape),) if is_packed else spec.shape
    fits = len(received.shape) == len(shape) and all(
        want in (-1, length) for want, length in zip(shape, received.shape, strict=True)
    )
    if not fits:
        raise UsageError(f"input {spec.name[:80]!r} has shape {list(received.shape)[:8]}, but must have {list(shape)}")


def _packed_bytes(shape: Iterable[int]) -> int:
    """Bytes of a tensor of this fixed shape at two values to a byte."""
    return (math.prod(shape) + 1) // 2


def _dequantize_sent(
    received: Tensor, scale: np.float32, zero_point: np.uint8, codec: str, shape: Iterable[int]
) -> npt.NDArray[np.float32]:
    """The values, of that fixed shape if the codec packs them, of a tensor as it was received."""
    if codec not in PACKED:
        return dequantize(received, scale, zero_point)
    sizes = tuple(shape)
    # A table of both values of each possible byte, copied as one number of 64 bits: one look-up a byte.
    values = dequantize(np.arange(16, dtype=np.uint8), scale, zero_point)
    pairs = np.stack([np.tile(values, 16), np.repeat(values, 16)], axis=1).view(np.uint64).reshape(256)
    return pairs[received.reshape(-1)].view(np.float32)[: math.prod(sizes)].reshape(sizes)


def dequantize(quantized: Tensor, scale: np.float32, zero_point: np.uint8) -> npt.NDArray[np.float32]:
    """ONNX's DequantizeLinear: (x - zero point) · scale, in FP32."""
    with np.errstate(over="ignore"):
        values: npt.NDArray[np.float32] = (quantized.astype(np.float32) - np.float32(zero_point)) * scale
    return values


def _pop_companion(tensors: dict[str, Tensor], name: str, dtype: Any) -> Any:
    """Remove a companion tensor from `tensors` and return its only element; UsageError where it is missing or
    malformed."""
    companion = tensors.pop(name, None)
    if companion is None or companion.dtype != dtype or companion.shape != (1,):
        raise UsageError(f"input {name[:80]!r} is missing, or is not one element of {np.dtype(dtype).name}")
    return companion[0]


def decode_like(name: str, sent: Mapping[str, Tensor], like: Tensor, codec: str) -> Tensor:
    """Decode one tensor of `encode(name, like, codec, …)` to the type of `like`, as the receiver does."""
    received = sent[name]
    if received.dtype == like.dtype:
        return received
    if received.dtype == np.float16:
        return received.astype(like.dtype)
    scale, zero_point = sent[scale_name(name)][0], sent[zero_point_name(name)][0]
    return _dequantize_sent(received, scale, zero_point, codec, like.shape).astype(like.dtype, copy=False)


def wire_specs(spec: TensorSpec, codec: str) -> tuple[TensorSpec, ...]:
    """Tensors that a server of this row declares for the encoded tensor. It also accepts the tensor raw."""
    if codec not in lossy_codecs(spec.datatype):
        return (spec,)
    if codec == FP16:
        return (TensorSpec(spec.name, "FP16", spec.shape),)
    is_fixed = min(spec.shape, default=1) >= 0
    packed_shape = (_packed_bytes(spec.shape) if is_fixed else -1,)
    return (
        TensorSpec(spec.name, "UINT8", packed_shape if codec in PACKED else spec.shape),
        TensorSpec(scale_name(spec.name), "FP32", (1,)),
        TensorSpec(zero_point_name(spec.name), "UINT8", (1,)),
    )


def wire_bytes(name: str, sent: Mapping[str, Tensor]) -> int:
    """Bytes that one encoded tensor takes on the wire, including its companions."""
    return sum(tensor.nbytes + (0 if key == name else ENTRY_BYTES + len(key)) for key, tensor in sent.items())


def split_codec_name(name: str) -> tuple[str, bool]:
    """Split a codec's name in cost tables (`int8+zstd`) into the codec and whether the body is compressed."""
    return name.removesuffix(ZSTD_SUFFIX), name.endswith(ZSTD_SUFFIX)
