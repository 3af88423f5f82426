"""The graph of a slice that was cut for one input at a time, made to take several stacked along their first length.

Only graphs of operators that treat all data alike come into question: none that branches, counts, sorts or picks by
value. Whether such a graph keeps the inputs of a stack apart is then tried, not proved (`gain`): what mixes them shows
on noise. Changed is what says "one": the declared shapes, and the targets of Reshape. Reads and writes protobuf's wire
format: servers have no `onnx` package.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from edgesplit.crypto.slice_encryption import SliceInMemory, SliceSource
from edgesplit.errors import TrustError
from edgesplit.release.onnx_graph import fields

GRAPH, WEIGHTS = "graph.onnx", "weights.bin"
ALIKE = frozenset(
    """
    Abs Add AveragePool BatchNormalization Cast Ceil Celu Clip Concat Conv ConvTranspose Cos DepthToSpace
    DequantizeLinear Div Dropout Elu Erf Exp Flatten Floor Gelu Gemm GlobalAveragePool GlobalMaxPool GroupNormalization
    HardSigmoid HardSwish Identity InstanceNormalization LRN LayerNormalization LeakyRelu Log LogSoftmax MatMul Max
    MaxPool Min Mish Mul Neg PRelu Pad Pow QLinearConv QLinearMatMul QuantizeLinear Reciprocal ReduceL1 ReduceL2
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize Round Selu Sigmoid Sin
    Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tanh ThresholdedRelu Transpose Unsqueeze Upsample
    """.split()  # noqa: SIM905
)
"""Operators of ai.onnx that do the same to every element, whatever it is."""
_MODEL_GRAPH, _MODEL_FUNCTIONS = 7, 25
_NODE, _INITIALIZER, _INPUT, _OUTPUT, _SPARSE = 1, 5, 11, 12, 15
_NODE_INPUT, _NODE_OP, _NODE_ATTRIBUTE, _NODE_DOMAIN = 1, 4, 5, 7
_ATTRIBUTE_NAME, _ATTRIBUTE_INT = 1, 3
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_INT64, _TENSOR_NAME, _TENSOR_RAW = 1, 2, 7, 8, 9
_INFO_NAME, _INFO_TYPE, _TYPE_TENSOR, _TENSOR_TYPE_ELEM = 1, 2, 1, 1
_INT64 = 7
_VARINT, _BYTES = 0, 2
Field = tuple[int, "int | memoryview"]


def source_of_many(source: SliceSource) -> SliceInMemory | None:
    """The slice in `source` as one that takes stacks, its weights still in the file that they were in; None where it
    does not come into question."""
    graph = of_many(source.read(GRAPH) if isinstance(source, SliceInMemory) else (source / GRAPH).read_bytes())
    if graph is None:
        return None
    many = SliceInMemory("stacked")
    many.add(GRAPH, [graph])
    weights = _weights(source)
    if weights is not None:
        many.take(WEIGHTS, os.open(weights, os.O_RDONLY | os.O_CLOEXEC))
    return many


def _weights(source: SliceSource) -> Path | None:
    """The slice's weights, where it has any outside of its graph."""
    if isinstance(source, SliceInMemory):
        return source.path(WEIGHTS) if source.has(WEIGHTS) else None
    return source / WEIGHTS if (source / WEIGHTS).is_file() else None


def of_many(model: bytes) -> bytes | None:
    """The ONNX model in these bytes, for stacks; None where it does not come into question."""
    try:
        parts = list(fields(memoryview(model)))
        graph = next(value for number, value in parts if number == _MODEL_GRAPH and _is_bytes(value))
        if any(number == _MODEL_FUNCTIONS for number, _ in parts):
            return None
        changed = _graph(list(fields(graph)))
    except (TrustError, StopIteration, UnicodeDecodeError, struct.error):
        return None
    if changed is None:
        return None
    return b"".join(_written(number, changed if number == _MODEL_GRAPH else value) for number, value in parts)


def _graph(parts: list[Field]) -> bytes | None:
    nodes = [list(fields(value)) for number, value in parts if number == _NODE and _is_bytes(value)]
    if any(number == _SPARSE for number, _ in parts) or not all(map(_is_alike, nodes)):
        return None
    targets = {_texts(node, _NODE_INPUT)[1] for node in nodes if _text(node, _NODE_OP) == "Reshape"}
    others = {
        name
        for node in nodes
        for place, name in enumerate(_texts(node, _NODE_INPUT))
        if place != 1 or _text(node, _NODE_OP) != "Reshape"
    }
    if targets & others:
        return None  # the same numbers mean something else there
    return b"".join(_written(number, _changed(number, value, targets)) for number, value in parts)


def _is_alike(node: list[Field]) -> bool:
    if _text(node, _NODE_DOMAIN) not in ("", "ai.onnx") or _text(node, _NODE_OP) not in ALIKE:
        return False
    return _text(node, _NODE_OP) != "Reshape" or (len(_texts(node, _NODE_INPUT)) == 2 and not _allows_zero(node))


def _allows_zero(node: list[Field]) -> bool:
    """Reshape with `allowzero`: a 0 is then no "as it is"."""
    attributes = [list(fields(value)) for number, value in node if number == _NODE_ATTRIBUTE and _is_bytes(value)]
    return any(_text(one, _ATTRIBUTE_NAME) == "allowzero" and (_ATTRIBUTE_INT, 1) in one for one in attributes)


def _is_bytes(value: int | memoryview) -> TypeGuard[memoryview]:
    return not isinstance(value, int)


def _changed(number: int, value: int | memoryview, targets: set[str]) -> int | bytes | memoryview:
    if isinstance(value, int):
        return value
    if number in (_INPUT, _OUTPUT):
        return _without_shape(value)
    if number == _INITIALIZER and _text(list(fields(value)), _TENSOR_NAME) in targets:
        return _target_for_many(list(fields(value)))
    return value


def _without_shape(info: memoryview) -> bytes:
    """The declaration with its name and element type alone."""
    parts = list(fields(info))
    (kind,) = (value for number, value in parts if number == _INFO_TYPE and _is_bytes(value))
    (tensor,) = (value for number, value in fields(kind) if number == _TYPE_TENSOR and _is_bytes(value))
    element = [_written(number, value) for number, value in fields(tensor) if number == _TENSOR_TYPE_ELEM]
    bare = _written(_INFO_TYPE, _written(_TYPE_TENSOR, b"".join(element)))
    return b"".join([*(_written(number, value) for number, value in parts if number != _INFO_TYPE), bare])


def _target_for_many(tensor: list[Field]) -> bytes:
    """A Reshape's target in which a leading 1 became "as it is"; TrustError where it is not a list of whole numbers."""
    raw = next((bytes(value) for number, value in tensor if number == _TENSOR_RAW and _is_bytes(value)), b"")
    if (_TENSOR_TYPE, _INT64) not in tensor or not raw or any(number == _TENSOR_INT64 for number, _ in tensor):
        raise TrustError("the target of a Reshape is kept in a way that is not read here")
    lengths = list(struct.unpack(f"<{len(raw) // 8}q", raw))
    if lengths[0] == 1:
        lengths[0] = 0
    kept = b"".join(_written(number, value) for number, value in tensor if number != _TENSOR_RAW)
    return kept + _written(_TENSOR_RAW, struct.pack(f"<{len(lengths)}q", *lengths))


def _texts(message: list[Field], wanted: int) -> list[str]:
    return [bytes(value).decode() for number, value in message if number == wanted and _is_bytes(value)]


def _text(message: list[Field], wanted: int) -> str:
    return next(iter(_texts(message, wanted)), "")


def _written(number: int, value: int | bytes | memoryview) -> bytes:
    """One field on the wire."""
    if isinstance(value, int):
        return bytes([*_varint(number << 3 | _VARINT), *_varint(value)])
    return bytes([*_varint(number << 3 | _BYTES), *_varint(len(value))]) + bytes(value)


def _varint(value: int) -> Iterator[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value
