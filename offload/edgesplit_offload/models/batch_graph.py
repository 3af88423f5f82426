"""Rewrites the ONNX graph of a slice that was cut for a batch size of one, so that it accepts stacked inputs.

Only graphs whose operators treat all elements alike qualify: none that branches, counts, sorts or selects by value.
Whether such a graph keeps the inputs of a batch independent is then tested, not proved
(`edgesplit_offload.models.batch_benefit`): dependence shows on noise. What is rewritten is every mention of the batch
size: the declared shapes, and the targets of Reshape. Works on protobuf's wire format, because servers have no `onnx`
package.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TypeGuard

from edgesplit.crypto.slice_encryption import SliceInMemory, SliceSource
from edgesplit.errors import TrustError
from edgesplit.release.protobuf import encode_field, iter_fields

GRAPH, WEIGHTS = "graph.onnx", "weights.bin"
ELEMENTWISE_SAFE = frozenset(
    """
    Abs Add AveragePool BatchNormalization Cast Ceil Celu Clip Concat Conv ConvTranspose Cos DepthToSpace
    DequantizeLinear Div Dropout Elu Erf Exp Flatten Floor Gelu Gemm GlobalAveragePool GlobalMaxPool GroupNormalization
    HardSigmoid HardSwish Identity InstanceNormalization LRN LayerNormalization LeakyRelu Log LogSoftmax MatMul Max
    MaxPool Min Mish Mul Neg PRelu Pad Pow QLinearConv QLinearMatMul QuantizeLinear Reciprocal ReduceL1 ReduceL2
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize Round Selu Sigmoid Sin
    Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tanh ThresholdedRelu Transpose Unsqueeze Upsample
    """.split()  # noqa: SIM905
)
"""Operators of ai.onnx that apply the same computation whatever the values are."""
_MODEL_GRAPH, _MODEL_FUNCTIONS = 7, 25
_NODE, _INITIALIZER, _INPUT, _OUTPUT, _SPARSE = 1, 5, 11, 12, 15
_NODE_INPUT, _NODE_OP, _NODE_ATTRIBUTE, _NODE_DOMAIN = 1, 4, 5, 7
_ATTRIBUTE_NAME, _ATTRIBUTE_INT = 1, 3
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_INT64, _TENSOR_NAME, _TENSOR_RAW = 1, 2, 7, 8, 9
_INFO_NAME, _INFO_TYPE, _TYPE_TENSOR, _TENSOR_TYPE_ELEM = 1, 2, 1, 1
_INT64 = 7
Field = tuple[int, "int | memoryview"]


def batched_source(source: SliceSource) -> SliceInMemory | None:
    """The slice in `source` rewritten for batches, its weights still in their original file; None if it does not
    qualify."""
    graph = batched_model(source.read(GRAPH) if isinstance(source, SliceInMemory) else (source / GRAPH).read_bytes())
    if graph is None:
        return None
    batched = SliceInMemory("stacked")
    batched.add(GRAPH, [graph])
    weights = _weights(source)
    if weights is not None:
        batched.adopt(WEIGHTS, os.open(weights, os.O_RDONLY | os.O_CLOEXEC))
    return batched


def _weights(source: SliceSource) -> Path | None:
    """Path of the slice's weights, if they are outside of its graph."""
    if isinstance(source, SliceInMemory):
        return source.path(WEIGHTS) if source.has(WEIGHTS) else None
    return source / WEIGHTS if (source / WEIGHTS).is_file() else None


def batched_model(model: bytes) -> bytes | None:
    """The ONNX model in these bytes rewritten for batches; None if it does not qualify."""
    try:
        parts = list(iter_fields(memoryview(model)))
        graph = next(value for number, value in parts if number == _MODEL_GRAPH and _is_bytes(value))
        if any(number == _MODEL_FUNCTIONS for number, _ in parts):
            return None
        changed = _rewrite_graph(list(iter_fields(graph)))
    except (TrustError, StopIteration, UnicodeDecodeError, struct.error):
        return None
    if changed is None:
        return None
    return b"".join(encode_field(number, changed if number == _MODEL_GRAPH else value) for number, value in parts)


def _rewrite_graph(parts: list[Field]) -> bytes | None:
    nodes = [list(iter_fields(value)) for number, value in parts if number == _NODE and _is_bytes(value)]
    if any(number == _SPARSE for number, _ in parts) or not all(map(_is_supported, nodes)):
        return None
    targets = {_texts(node, _NODE_INPUT)[1] for node in nodes if _text(node, _NODE_OP) == "Reshape"}
    other_inputs = {
        name
        for node in nodes
        for index, name in enumerate(_texts(node, _NODE_INPUT))
        if index != 1 or _text(node, _NODE_OP) != "Reshape"
    }
    if targets & other_inputs:
        return None  # the constant is also used as data, where it must not change
    return b"".join(encode_field(number, _rewritten(number, value, targets)) for number, value in parts)


def _is_supported(node: list[Field]) -> bool:
    if _text(node, _NODE_DOMAIN) not in ("", "ai.onnx") or _text(node, _NODE_OP) not in ELEMENTWISE_SAFE:
        return False
    return _text(node, _NODE_OP) != "Reshape" or (len(_texts(node, _NODE_INPUT)) == 2 and not _allows_zero(node))


def _allows_zero(node: list[Field]) -> bool:
    """Whether a Reshape has `allowzero`, with which a 0 does not mean "keep this dimension"."""
    attributes = [list(iter_fields(value)) for number, value in node if number == _NODE_ATTRIBUTE and _is_bytes(value)]
    return any(
        _text(attribute, _ATTRIBUTE_NAME) == "allowzero" and (_ATTRIBUTE_INT, 1) in attribute
        for attribute in attributes
    )


def _is_bytes(value: int | memoryview) -> TypeGuard[memoryview]:
    return not isinstance(value, int)


def _rewritten(number: int, value: int | memoryview, targets: set[str]) -> int | bytes | memoryview:
    if isinstance(value, int):
        return value
    if number in (_INPUT, _OUTPUT):
        return _without_shape(value)
    if number == _INITIALIZER and _text(list(iter_fields(value)), _TENSOR_NAME) in targets:
        return _batched_target(list(iter_fields(value)))
    return value


def _without_shape(info: memoryview) -> bytes:
    """The tensor declaration without its shape."""
    parts = list(iter_fields(info))
    (kind,) = (value for number, value in parts if number == _INFO_TYPE and _is_bytes(value))
    (tensor,) = (value for number, value in iter_fields(kind) if number == _TYPE_TENSOR and _is_bytes(value))
    element = [encode_field(number, value) for number, value in iter_fields(tensor) if number == _TENSOR_TYPE_ELEM]
    bare = encode_field(_INFO_TYPE, encode_field(_TYPE_TENSOR, b"".join(element)))
    return b"".join([*(encode_field(number, value) for number, value in parts if number != _INFO_TYPE), bare])


def _batched_target(tensor: list[Field]) -> bytes:
    """A Reshape target whose leading 1 is replaced by 0 ("keep this dimension"). TrustError if it is not an int64 list
    in raw form."""
    raw = next((bytes(value) for number, value in tensor if number == _TENSOR_RAW and _is_bytes(value)), b"")
    if (_TENSOR_TYPE, _INT64) not in tensor or not raw or any(number == _TENSOR_INT64 for number, _ in tensor):
        raise TrustError("the target of a Reshape is stored in an unsupported way")
    lengths = list(struct.unpack(f"<{len(raw) // 8}q", raw))
    if lengths[0] == 1:
        lengths[0] = 0
    unchanged = b"".join(encode_field(number, value) for number, value in tensor if number != _TENSOR_RAW)
    return unchanged + encode_field(_TENSOR_RAW, struct.pack(f"<{len(lengths)}q", *lengths))


def _texts(message: list[Field], wanted: int) -> list[str]:
    return [bytes(value).decode() for number, value in message if number == wanted and _is_bytes(value)]


def _text(message: list[Field], wanted: int) -> str:
    return next(iter(_texts(message, wanted)), "")
