"""The files of one ONNX slice: `graph.onnx`, and its larger weights in `weights.bin` beside it.

onnxruntime maps the weights from their file. Small ones stay in the graph, because shape inference reads them there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx
from onnx import numpy_helper

from edgesplit.release.manifest import FileName, TensorSpec
from edgesplit_partitioner.ir.chunking import Bytes, Piece, padded_bytes, plain_runs, weight_runs
from edgesplit_partitioner.ir.graph import Layer
from edgesplit_partitioner.ir.prepared_model import Boundary
from edgesplit_partitioner.onnx_format import archive, nodes

WEIGHTS = "weights.bin"
INLINE_SHAPE_BYTES = 1024
"""Whole numbers up to this size stay in the graph: they may be shapes, which onnxruntime wants before any weight."""
INLINE_BYTES = 16
"""Anything up to this size stays in the graph (scalars; Resize's four scales)."""
_WHOLE_NUMBERS = frozenset({onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL})


def onnx_files(
    model: onnx.ModelProto, data: archive.Data, members: Sequence[Layer], boundary: Boundary, shared: Collection[str]
) -> dict[FileName, list[Bytes]]:
    """The chunks of each file of the slice with these layers of `model`, whose data file holds `data`."""
    pieces = _pieces(members, nodes.initializers(model.graph), data, shared)
    proto = _slice_proto(model, members, boundary, pieces)
    runs = weight_runs(pieces.values())
    files: dict[FileName, list[Bytes]] = {"graph.onnx": plain_runs(proto.SerializeToString(deterministic=True))}
    if runs:
        files["weights.bin"] = runs
    return files


def _pieces(
    members: Sequence[Layer], stored: Mapping[str, onnx.TensorProto], data: archive.Data, shared: Collection[str]
) -> dict[str, Piece]:
    """The weights that go into the weights file, in the order of their first use; shared ones come last, so that what
    a layer owns lies together in whatever slice it is."""
    owned: dict[str, Piece] = {}
    free: dict[str, Piece] = {}
    for layer in members:
        for name in layer.weights:
            piece = None if name in owned or name in free else data_beside(stored[name], data)
            if piece and name in shared:
                free[name] = Piece("", piece)
            elif piece:
                owned[name] = Piece(layer.name, piece)
    return {**owned, **free}


def data_beside(tensor: onnx.TensorProto, data: archive.Data) -> Bytes | None:
    """The tensor's bytes as the weights file holds them, or None if it stays in the graph."""
    if archive.is_external(tensor):
        _, offset, length = archive.external(tensor)
        return memoryview(data)[offset : offset + length]
    if tensor.data_type == onnx.TensorProto.STRING:
        return None
    size = nodes.tensor_bytes(tensor)
    if size <= INLINE_BYTES or (tensor.data_type in _WHOLE_NUMBERS and size < INLINE_SHAPE_BYTES):
        return None
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    if tensor.data_type not in nodes.DATATYPES:
        return None
    return numpy_helper.to_array(tensor).tobytes()


def _slice_proto(
    source: onnx.ModelProto, members: Sequence[Layer], boundary: Boundary, pieces: Mapping[str, Piece]
) -> onnx.ModelProto:
    """The ONNX model of one slice; its larger weights lie in the weights file beside it."""
    stored = nodes.initializers(source.graph)
    cut = onnx.ModelProto(ir_version=source.ir_version, producer_name="edgesplit")
    cut.graph.name = "slice"
    cut.graph.node.extend(source.graph.node[place] for place in _places(members))
    cut.graph.input.extend(declaration(one) for one in boundary.inputs)
    cut.graph.output.extend(declaration(one) for one in boundary.outputs)
    offset = 0
    for name, piece in pieces.items():
        cut.graph.initializer.append(_pointer(stored[name], offset, len(piece.data)))
        offset += padded_bytes(len(piece.data))
    used = dict.fromkeys(name for layer in members for name in layer.weights)
    cut.graph.initializer.extend(stored[name] for name in used if name not in pieces)
    read = {name for node in cut.graph.node for name in nodes.reads(node)}
    cut.graph.sparse_initializer.extend(one for one in source.graph.sparse_initializer if one.values.name in read)
    cut.functions.extend(source.functions)
    domains = nodes.domains(cut.graph) | {node.domain for one in source.functions for node in one.node}
    cut.opset_import.extend(
        one for one in source.opset_import if ("" if one.domain == "ai.onnx" else one.domain) in domains
    )
    return cut


def _places(members: Sequence[Layer]) -> list[int]:
    """Positions of the layers' nodes, each once, in the model's order."""
    return sorted({place for layer in members for place in layer.nodes})


def _pointer(tensor: onnx.TensorProto, offset: int, length: int) -> onnx.TensorProto:
    pointer = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    pointer.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", WEIGHTS), ("offset", str(offset)), ("length", str(length))):
        pointer.external_data.add(key=key, value=value)
    return pointer


_ONNX_TYPES = {name: number for number, name in nodes.DATATYPES.items()}


def declaration(one: TensorSpec) -> onnx.ValueInfoProto:
    """The tensor's declaration; without a shape where a length depends on the data."""
    shape = None if -1 in one.shape else one.shape
    return onnx.helper.make_tensor_value_info(one.name, _ONNX_TYPES[one.datatype], shape)
