"""What an ONNX node or graph reads, writes and stores, including subgraphs: queries on the protobuf without any
decision.

Everything is keyed by name, never by `id(node)`, because protobuf's Python wrappers are temporary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import onnx

from edgesplit_partitioner.ir.tensor_types import NUMBER_DTYPES, item_bytes

DATATYPES: Mapping[int, str] = {
    onnx.helper.np_dtype_to_tensor_dtype(dtype): name for name, dtype in NUMBER_DTYPES.items()
}
"""Open Inference Protocol names of the types that may exist between layers, by ONNX's number."""
ELEMENT_TYPES: Mapping[str, int] = {name: number for number, name in DATATYPES.items()}
"""ONNX's numbers of these types, by their Open Inference Protocol names."""


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs directly inside a node's attributes (If, Loop, Scan), without those nested deeper."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """This graph and every graph inside it."""
    pending = [graph]
    while pending:
        current = pending.pop()
        yield current
        pending.extend(inner for node in current.node for inner in subgraphs(node))


def initializers(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Dense initializers of this graph by name."""
    return {tensor.name: tensor for tensor in graph.initializer}


def constant_names(graph: onnx.GraphProto) -> set[str]:
    """Names of all initializers of this graph, dense and sparse."""
    return {tensor.name for tensor in graph.initializer} | {sparse.values.name for sparse in graph.sparse_initializer}


def inputs_of(node: onnx.NodeProto) -> list[str]:
    """Names that the node needs, each once: its inputs, and what its subgraphs capture from outside."""
    captured = (name for graph in subgraphs(node) for name in _captured_names(graph))
    return list(dict.fromkeys(name for name in (*node.input, *captured) if name))


def outputs_of(node: onnx.NodeProto) -> list[str]:
    """Names of the node's outputs."""
    return [name for name in node.output if name]


def _captured_names(graph: onnx.GraphProto) -> list[str]:
    """Names that this subgraph uses and does not define."""
    defined = {value.name for value in graph.input} | constant_names(graph)
    defined |= {name for node in graph.node for name in node.output}
    used = [name for node in graph.node for name in inputs_of(node)] + [value.name for value in graph.output]
    return [name for name in used if name not in defined]


def inner_weight_bytes(node: onnx.NodeProto) -> int:
    """Bytes of the initializers inside the node's subgraphs."""
    inside = (inner for graph in subgraphs(node) for inner in all_graphs(graph))
    return sum(tensor_bytes(tensor) for graph in inside for tensor in graph.initializer)


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Size of a stored tensor in bytes."""
    if tensor.HasField("raw_data"):
        return len(tensor.raw_data)
    return int(prod(tensor.dims)) * item_bytes(DATATYPES.get(tensor.data_type, ""))


def stored_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every tensor stored in the graph and its subgraphs: dense initializers, sparse ones, attributes."""
    for current in all_graphs(graph):
        yield from current.initializer
        for sparse in current.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        for node in current.node:
            for attribute in node.attribute:
                yield from attribute_tensors(attribute)


def attribute_tensors(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    """The dense and sparse tensors stored in an attribute itself; those in its graphs are left out."""
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
        yield from (sparse.values, sparse.indices)


def function_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor stored in the model's own functions."""
    for function in model.functions:
        for node in function.node:
            for attribute in node.attribute:
                yield from attribute_tensors(attribute)
            for graph in subgraphs(node):
                yield from stored_tensors(graph)


def rename_reads(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Rename a tensor in the inputs of every node, and in the outputs of subgraphs that return a captured tensor."""
    for current in all_graphs(graph):
        for node in current.node:
            for position, name in enumerate(node.input):
                if name == old:
                    node.input[position] = new
        for output in current.output if current is not graph else ():
            if output.name == old:
                output.name = new


def int_attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    """The integer attribute of that name."""
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), default)


def ints_attribute(node: onnx.NodeProto, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The attribute of that name that is a list of integers."""
    return next((tuple(attribute.ints) for attribute in node.attribute if attribute.name == name), default)


def domains(graph: onnx.GraphProto) -> set[str]:
    """Operator domains in use, including those in subgraphs."""
    return {plain_domain(node.domain) for current in all_graphs(graph) for node in current.node}


def plain_domain(name: str) -> str:
    """The domain of an operator set; empty for ONNX's own, which has two names."""
    return "" if name == "ai.onnx" else name
