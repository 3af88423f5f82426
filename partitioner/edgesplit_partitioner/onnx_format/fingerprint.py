"""What an ONNX model consists of, whatever its cut: the digests that the release key signs
(`edgesplit.release.fingerprint`).

Made of the same functions that write slices, so that a slice's operators, declarations and weights have these digests
wherever the cuts are. The same model gives the same bytes.
"""

from __future__ import annotations

import hashlib

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]

from edgesplit.release.fingerprint import (
    Anatomy,
    LayerParts,
    TensorPart,
    digest,
    sparse_weight,
    weight_beside,
    weight_inside,
)
from edgesplit.release.manifest import TensorSpec
from edgesplit_partitioner.ir.graph import Layer, LayerGraph
from edgesplit_partitioner.onnx_format import archive
from edgesplit_partitioner.onnx_format import nodes as onnx_nodes
from edgesplit_partitioner.onnx_format.slices import data_beside, declaration


def onnx_anatomy(model: onnx.ModelProto, data: archive.Data, graph: LayerGraph) -> Anatomy | None:
    """The anatomy of `model`, whose data file holds `data`, with the layers of `graph` (its own, or with an input
    layer). None where an operator has data in a file: its bytes would not tell what it computes with."""
    inside = [tensor for node in model.graph.node for tensor in _held(node)]
    inside += onnx_nodes.function_tensors(model)
    inside += [one.values for one in model.graph.sparse_initializer]
    inside += [one.indices for one in model.graph.sparse_initializer]
    if any(archive.is_external(tensor) for tensor in inside):
        return None
    used = {name for layer in graph.layers for name in layer.weights}
    weights = [_weight(one, data) for one in model.graph.initializer if one.name in used]
    weights += [sparse_weight(_bytes(one)) for one in model.graph.sparse_initializer]
    return Anatomy(
        ir_version=model.ir_version,
        opsets=tuple((one.domain, one.version) for one in model.opset_import),
        functions=tuple(digest(_bytes(one)) for one in model.functions),
        layers=tuple(_layer(model, layer) for layer in graph.layers),
        tensors=tuple(
            TensorPart(spec, digest(_bytes(declaration(spec))))
            for one in graph.tensors.values()
            if one.datatype in onnx_nodes.DATATYPES.values()
            for spec in [TensorSpec(one.name, one.datatype, one.shape)]
        ),
        weights=tuple(sorted(weights)),
    )


def _held(node: onnx.NodeProto) -> list[onnx.TensorProto]:
    """Every tensor stored in a node, in its subgraphs too."""
    own = [tensor for attribute in node.attribute for tensor in onnx_nodes.attribute_tensors(attribute)]
    return own + [tensor for graph in onnx_nodes.subgraphs(node) for tensor in onnx_nodes.stored_tensors(graph)]


def _layer(model: onnx.ModelProto, layer: Layer) -> LayerParts:
    nodes = tuple(digest(_bytes(model.graph.node[place])) for place in sorted(set(layer.nodes)))
    return LayerParts(layer.name, layer.reads, layer.writes, nodes)


def _weight(tensor: onnx.TensorProto, data: archive.Data) -> str:
    content = data_beside(tensor, data)
    if content is None:
        return weight_inside(_bytes(tensor))
    return weight_beside(tensor.name, tensor.data_type, tuple(tensor.dims), hashlib.sha256(content).hexdigest())


def _bytes(message: Message) -> bytes:
    """As a slice's file holds it."""
    raw: bytes = message.SerializeToString(deterministic=True)
    return raw
