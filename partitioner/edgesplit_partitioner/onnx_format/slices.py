"""Writes the files of one ONNX slice: `graph.onnx`, and its larger weights in `weights.bin` beside it.

onnxruntime maps the weights from their file. Small ones stay in the graph, because shape inference reads them there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx
from onnx import numpy_helper

from edgesplit.release.manifest import FileName, TensorSpec
from edgesplit_partitioner.ir.chunking import Bytes, Data, WeightData, padded_size, split_into_chunks, weight_chunks
from edgesplit_partitioner.ir.graph import Layer
from edgesplit_partitioner.ir.prepared_model import Boundary
from edgesplit_partitioner.onnx_format import archive, nodes

WEIGHTS_FILE: FileName = "weights.bin"
"""Name of the weights file of a slice."""
INLINE_SHAPE_BYTES = 1024
"""Integer tensors below this size stay in the graph: they may be shapes, which onnxruntime needs before any weight."""
INLINE_BYTES = 16
"""Any tensor up to this size stays in the graph (scalars; Resize's four scales)."""
_INTEGER_TYPES = frozenset({onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL})


def onnx_slice_files(
    model: onnx.ModelProto, data: Data, members: Sequence[Layer], boundary: Boundary, shared: Collection[str]
) -> dict[FileName, list[Bytes]]:
    """The chunks of each file of the slice with these layers of `model`, whose data file holds `data`."""
    pieces = _weights_in_file(members, nodes.initializers(model.graph), data, shared)
    proto = _slice_proto(model, members, boundary, pieces)
    runs = weight_chunks(pieces.values())
    files: dict[FileName, list[Bytes]] = {"graph.onnx": split_into_chunks(proto.SerializeToString(deterministic=True))}
    if runs:
        files[WEIGHTS_FILE] = runs
    return files


def _weights_in_file(
    members: Sequence[Layer], stored: Mapping[str, onnx.TensorProto], data: Data, shared: Collection[str]
) -> dict[str, WeightData]:
    """The weights that go into the weights file, in the order of their first use. Shared ones come last, so that what a
    layer owns is contiguous whichever slice it is in."""
    owned: dict[str, WeightData] = {}
    free: dict[str, WeightData] = {}
    for layer in members:
        for name in layer.weights:
            piece = None if name in owned or name in free else data_in_weights_file(stored[name], data)
            if piece and name in shared:
                free[name] = WeightData("", piece)
            elif piece:
                owned[name] = WeightData(layer.name, piece)
    return {**owned, **free}


def data_in_weights_file(tensor: onnx.TensorProto, data: Data) -> Bytes | None:
    """The tensor's bytes as the weights file holds them, or None where the tensor stays in the graph."""
    if archive.is_external(tensor):
        _, offset, length = archive.external_location(tensor)
        return memoryview(data)[offset : offset + length]
    if tensor.data_type == onnx.TensorProto.STRING:
        return None
    size = nodes.tensor_bytes(tensor)
    if size <= INLINE_BYTES or (tensor.data_type in _INTEGER_TYPES and size < INLINE_SHAPE_BYTES):
        return None
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    if tensor.data_type not in nodes.DATATYPES:
        return None
    return numpy_helper.to_array(tensor).tobytes()


def _slice_proto(
    source: onnx.ModelProto, members: Sequence[Layer], boundary: Boundary, pieces: Mapping[str, WeightData]
) -> onnx.ModelProto:
    """The ONNX model of one slice; its larger weights are references into the weights file."""
    stored = nodes.initializers(source.graph)
    cut = onnx.ModelProto(ir_version=source.ir_version, producer_name="edgesplit")
    cut.graph.name = "slice"
    positions = sorted({position for layer in members for position in layer.nodes})
    cut.graph.node.extend(source.graph.node[position] for position in positions)
    cut.graph.input.extend(declaration(spec) for spec in boundary.inputs)
    cut.graph.output.extend(declaration(spec) for spec in boundary.outputs)
    offset = 0
    for name, piece in pieces.items():
        cut.graph.initializer.append(_external_reference(stored[name], offset, len(piece.data)))
        offset += padded_size(len(piece.data))
    weight_names = dict.fromkeys(name for layer in members for name in layer.weights)
    cut.graph.initializer.extend(stored[name] for name in weight_names if name not in pieces)
    read_names = {name for node in cut.graph.node for name in nodes.inputs_of(node)}
    cut.graph.sparse_initializer.extend(
        sparse for sparse in source.graph.sparse_initializer if sparse.values.name in read_names
    )
    cut.functions.extend(source.functions)
    domains = nodes.domains(cut.graph) | {node.domain for function in source.functions for node in function.node}
    cut.opset_import.extend(opset for opset in source.opset_import if nodes.plain_domain(opset.domain) in domains)
    return cut


def _external_reference(tensor: onnx.TensorProto, offset: int, length: int) -> onnx.TensorProto:
    """The weight without its bytes, referring to them in the weights file."""
    pointer = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    archive.set_external_location(pointer, WEIGHTS_FILE, offset, length)
    return pointer


def declaration(spec: TensorSpec) -> onnx.ValueInfoProto:
    """The tensor's declaration as ONNX; without a shape where a length depends on the data."""
    shape = None if -1 in spec.shape else spec.shape
    return onnx.helper.make_tensor_value_info(spec.name, nodes.ELEMENT_TYPES[spec.datatype], shape)
