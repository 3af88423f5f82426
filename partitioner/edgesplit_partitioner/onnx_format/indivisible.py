"""Why no cut goes inside a layer of several operators, or inside an operator with graphs of its own.

Asked after the layers were made, and of what is really in them: nothing here decides what belongs together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import onnx

from edgesplit_partitioner.ir.graph import Layer
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.onnx_format import nodes as onnx_nodes
from edgesplit_partitioner.onnx_format.model import OnnxModel


class Inside(msgspec.Struct, frozen=True, kw_only=True):
    """The boundaries between the operators of one layer."""

    layer: str
    operators: tuple[str, ...]
    """Types, in order."""
    boundaries: int
    """Positions between operators that no cut uses; those inside an If, Loop or Scan are counted too."""
    why: str


def insides(model: PreparedModel) -> tuple[Inside, ...]:
    """Every layer that holds more than one operator."""
    if isinstance(model, OnnxModel):
        found = (_onnx_inside(model, layer) for layer in model.graph.layers)
    else:
        found = (_plain_inside(model, layer) for layer in model.graph.layers)
    return tuple(one for one in found if one is not None)


def _plain_inside(model: PreparedModel, layer: Layer) -> Inside | None:
    """Of a format whose operators only `work` tells of."""
    if len(layer.nodes) < 2:
        return None
    operators = tuple(work.operator for work in layer.work)
    return Inside(
        layer=layer.name, operators=operators, boundaries=len(layer.nodes) - 1, why="the runtime runs them as one"
    )


def _onnx_inside(model: OnnxModel, layer: Layer) -> Inside | None:
    nodes = [model.proto.graph.node[place] for place in layer.nodes]
    inner = [len(graph.node) for node in nodes for graph in onnx_nodes.subgraphs(node)]
    boundaries = max(len(nodes) - 1, 0) + sum(max(count - 1, 0) for count in inner)
    if not boundaries:
        return None
    operators = tuple(node.op_type for node in nodes)
    return Inside(layer=layer.name, operators=operators, boundaries=boundaries, why=_onnx_reason(model, nodes))


def _onnx_reason(model: OnnxModel, nodes: Sequence[onnx.NodeProto]) -> str:
    """The strongest of the reasons: what cannot travel, then what cannot be divided, then what is not worth it."""
    between = _between(nodes)
    untold = [name for name in between if name in model.types and not model.types[name].datatype]
    if untold:
        return (
            f"{untold[0]!r} between them is no tensor of numbers (a sequence, strings, 8-bit floats): it cannot travel"
        )
    whole = [node.op_type for node in nodes if any(True for _ in onnx_nodes.subgraphs(node))]
    if whole:
        return f"{_listed(whole)} runs as one, with the graphs inside it and what they capture"
    fixed = _fixed(model, nodes)
    if len(fixed) >= len(nodes) - 1:
        return f"{_listed(node.op_type for node in fixed)} works on weights alone: part of every layer that uses it"
    quantisers = [node.op_type for node in nodes if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    if quantisers:
        return f"{_listed(quantisers)} stays with its neighbour: what crosses is int8, not the floats inside"
    return f"a fused group: the runtime runs {_listed(node.op_type for node in nodes)} as one"


def _between(nodes: Sequence[onnx.NodeProto]) -> list[str]:
    """Tensors that one of the nodes makes and another reads."""
    made = {name for node in nodes for name in onnx_nodes.writes(node)}
    return [name for node in nodes for name in onnx_nodes.reads(node) if name in made]


def _fixed(model: OnnxModel, nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Those of the nodes that compute from weights alone."""
    known = onnx_nodes.constant_names(model.proto.graph)
    fixed = []
    for node in nodes:
        if known.issuperset(onnx_nodes.reads(node)):
            fixed.append(node)
            known.update(onnx_nodes.writes(node))
    return fixed


def _listed(names: Iterable[str]) -> str:
    """Each once, at most six."""
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:6]) + (", ..." if len(unique) > 6 else "")
