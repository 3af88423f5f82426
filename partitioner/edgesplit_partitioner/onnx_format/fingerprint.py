"""The fingerprint of an ONNX model, which the release key signs: digests of its operators, declarations and weights
that are the same for every way of cutting it (`edgesplit.release.fingerprint`).

Computed by the functions that write slices, so that a slice's operators, declarations and weights have these digests
wherever the cuts are. The same model gives the same bytes.
"""

from __future__ import annotations

import hashlib

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]

from edgesplit.release.fingerprint import (
    Fingerprint,
    LayerFingerprint,
    TensorFingerprint,
    embedded_weight_digest,
    external_weight_digest,
    sha256_of,
    sparse_weight_digest,
)
from edgesplit.release.manifest import TensorSpec
from edgesplit_partitioner.ir.chunking import Data
from edgesplit_partitioner.ir.graph import Layer, LayerGraph
from edgesplit_partitioner.onnx_format import archive
from edgesplit_partitioner.onnx_format import nodes as onnx_nodes
from edgesplit_partitioner.onnx_format.slices import data_in_weights_file, declaration


def onnx_fingerprint(model: onnx.ModelProto, data: Data, graph: LayerGraph) -> Fingerprint | None:
    """The fingerprint of `model`, whose data file holds `data`, with the layers of `graph` (the model's own, or with an
    input layer). None where an operator attribute, function or sparse weight has its bytes in a data file: the digest
    of the operator would not cover what it computes with."""
    embedded = [tensor for node in model.graph.node for tensor in _stored_tensors(node)]
    embedded += onnx_nodes.function_tensors(model)
    embedded += [sparse.values for sparse in model.graph.sparse_initializer]
    embedded += [sparse.indices for sparse in model.graph.sparse_initializer]
    # A digest of the operator would cover the reference to the data file, not the bytes in it.
    if any(archive.is_external(tensor) for tensor in embedded):
        return None
    used_names = {name for layer in graph.layers for name in layer.weights}
    weights = [_weight_digest(tensor, data) for tensor in model.graph.initializer if tensor.name in used_names]
    weights += [sparse_weight_digest(_bytes(sparse)) for sparse in model.graph.sparse_initializer]
    return Fingerprint(
        ir_version=model.ir_version,
        opsets=tuple((opset.domain, opset.version) for opset in model.opset_import),
        functions=tuple(sha256_of(_bytes(function)) for function in model.functions),
        layers=tuple(_layer_parts(model, layer) for layer in graph.layers),
        tensors=tuple(
            TensorFingerprint(spec, sha256_of(_bytes(declaration(spec))))
            for tensor in graph.tensors.values()
            if tensor.datatype in onnx_nodes.DATATYPES.values()
            for spec in [TensorSpec(tensor.name, tensor.datatype, tensor.shape)]
        ),
        weights=tuple(sorted(weights)),
    )


def _stored_tensors(node: onnx.NodeProto) -> list[onnx.TensorProto]:
    """Every tensor stored in a node, including its subgraphs."""
    direct = [tensor for attribute in node.attribute for tensor in onnx_nodes.attribute_tensors(attribute)]
    return direct + [tensor for graph in onnx_nodes.subgraphs(node) for tensor in onnx_nodes.stored_tensors(graph)]


def _layer_parts(model: onnx.ModelProto, layer: Layer) -> LayerFingerprint:
    nodes = tuple(sha256_of(_bytes(model.graph.node[place])) for place in sorted(set(layer.nodes)))
    return LayerFingerprint(layer.name, layer.reads, layer.writes, nodes)


def _weight_digest(tensor: onnx.TensorProto, data: Data) -> str:
    content = data_in_weights_file(tensor, data)
    if content is None:
        return embedded_weight_digest(_bytes(tensor))
    return external_weight_digest(
        tensor.name, tensor.data_type, tuple(tensor.dims), hashlib.sha256(content).hexdigest()
    )


def _bytes(message: Message) -> bytes:
    """The message serialised as a slice's file holds it."""
    raw: bytes = message.SerializeToString(deterministic=True)
    return raw
