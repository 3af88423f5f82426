"""The reason why no cut goes inside a layer of several operators, or inside an operator with subgraphs, for reports.

Derived from the finished layers and the operators in them; nothing here decides how operators are grouped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import onnx

from edgesplit_partitioner.ir.graph import Layer
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.onnx_format import nodes as onnx_nodes
from edgesplit_partitioner.onnx_format.model import OnnxModel


class IndivisibleLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that holds boundaries between operators which no cut uses."""

    layer: str
    """Name of the layer."""
    operators: tuple[str, ...]
    """Operator types, in order."""
    boundaries: int
    """Number of positions between operators that no cut uses, including those inside an If, Loop or Scan."""
    reason: str
    """The reason, as a phrase for the report."""


def indivisible_layers(model: PreparedModel) -> tuple[IndivisibleLayer, ...]:
    """Every layer that holds more than one operator, or an operator with subgraphs of more than one."""
    if isinstance(model, OnnxModel):
        candidates = (_onnx_layer(model, layer) for layer in model.graph.layers)
    else:
        candidates = (_plain_layer(model, layer) for layer in model.graph.layers)
    return tuple(candidate for candidate in candidates if candidate is not None)


def _plain_layer(model: PreparedModel, layer: Layer) -> IndivisibleLayer | None:
    """The indivisible layer for a format other than ONNX, whose operators are only known from `Layer.work`."""
    if len(layer.nodes) < 2:
        return None
    operators = tuple(work.operator for work in layer.work)
    return IndivisibleLayer(
        layer=layer.name, operators=operators, boundaries=len(layer.nodes) - 1, reason="the runtime runs them as one"
    )


def _onnx_layer(model: OnnxModel, layer: Layer) -> IndivisibleLayer | None:
    nodes = [model.proto.graph.node[place] for place in layer.nodes]
    inner = [len(graph.node) for node in nodes for graph in onnx_nodes.subgraphs(node)]
    boundaries = max(len(nodes) - 1, 0) + sum(max(count - 1, 0) for count in inner)
    if not boundaries:
        return None
    operators = tuple(node.op_type for node in nodes)
    return IndivisibleLayer(
        layer=layer.name, operators=operators, boundaries=boundaries, reason=_onnx_reason(model, nodes)
    )


def _onnx_reason(model: OnnxModel, nodes: Sequence[onnx.NodeProto]) -> str:
    """The strongest reason that applies: what cannot travel comes first, then what cannot be divided, then what is not
    worth dividing."""
    between = _inner_tensors(nodes)
    untyped = [name for name in between if name in model.types and not model.types[name].datatype]
    if untyped:
        return (
            f"{untyped[0]!r} between them is no tensor of numbers (a sequence, strings, 8-bit floats): it cannot travel"
        )
    control_flow = [node.op_type for node in nodes if any(True for _ in onnx_nodes.subgraphs(node))]
    if control_flow:
        return f"{_listed(control_flow)} runs as one, with the graphs inside it and what they capture"
    fixed = _constant_nodes(model, nodes)
    if len(fixed) >= len(nodes) - 1:
        return f"{_listed(node.op_type for node in fixed)} works on weights alone: part of every layer that uses it"
    quantisers = [node.op_type for node in nodes if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    if quantisers:
        return f"{_listed(quantisers)} stays with its neighbour: what crosses is int8, not the floats inside"
    return f"a fused group: the runtime runs {_listed(node.op_type for node in nodes)} as one"


def _inner_tensors(nodes: Sequence[onnx.NodeProto]) -> list[str]:
    """Tensors that one of the nodes writes and another reads."""
    written = {name for node in nodes for name in onnx_nodes.outputs_of(node)}
    return [name for node in nodes for name in onnx_nodes.inputs_of(node) if name in written]


def _constant_nodes(model: OnnxModel, nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes that compute from weights alone."""
    known = onnx_nodes.constant_names(model.proto.graph)
    fixed = []
    for node in nodes:
        if known.issuperset(onnx_nodes.inputs_of(node)):
            fixed.append(node)
            known.update(onnx_nodes.outputs_of(node))
    return fixed


def _listed(names: Iterable[str]) -> str:
    """The names as one phrase, each once, at most six."""
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:6]) + (", ..." if len(unique) > 6 else "")
