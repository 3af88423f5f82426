"""A model as onnxruntime saves it becomes a plain one, the same bytes each time.

Topological order, nothing dead, every node named, only the operator sets in use, no free text, and every output is
computed by some node or is an input.
"""

from __future__ import annotations

import onnx

from edgesplit_partitioner.ir.fusion import topological
from edgesplit_partitioner.onnx_format import nodes as onnx_nodes


def tidy(model: onnx.ModelProto, outputs: list[str]) -> None:
    """Make the saved model plain, in place, with the outputs of these names in this order."""
    graph = model.graph
    _restore_outputs(graph, outputs)
    nodes = _live_nodes(graph)
    _name_nodes(nodes)
    del graph.node[:]
    graph.node.extend(nodes)
    _drop_dead_weights(graph)
    for one in onnx_nodes.all_graphs(graph):
        del one.value_info[:]
        one.doc_string = ""
        del one.metadata_props[:]
        for node in one.node:
            node.doc_string = ""
            del node.metadata_props[:]
    _keep_used_opsets(model)
    graph.name = "edgesplit"
    model.ir_version = max(model.ir_version, 4)  # below 4, initializers must be inputs too
    model.doc_string = ""
    del model.metadata_props[:]


def _restore_outputs(graph: onnx.GraphProto, outputs: list[str]) -> None:
    """Outputs in the order given, and an output that was folded into a weight is computed by a node again."""
    by_name = {one.name: one for one in graph.output}
    del graph.output[:]
    graph.output.extend(by_name[name] for name in outputs)
    for tensor in graph.initializer:
        if tensor.name in by_name:
            output, tensor.name = tensor.name, f"{tensor.name}/constant"
            _rename_reads(graph, output, tensor.name)
            graph.node.append(onnx.helper.make_node("Identity", [tensor.name], [output]))


def _rename_reads(graph: onnx.GraphProto, old: str, new: str) -> None:
    for one in onnx_nodes.all_graphs(graph):
        for node in one.node:
            for position, name in enumerate(node.input):
                if name == old:
                    node.input[position] = new


def _live_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Copies of the nodes that some output needs, in topological order, earlier ones first."""
    writer = {name: place for place, node in enumerate(graph.node) for name in onnx_nodes.writes(node)}
    needs = {
        place: {writer[name] for name in onnx_nodes.reads(node) if name in writer}
        for place, node in enumerate(graph.node)
    }
    live: set[int] = set()
    pending = [writer[one.name] for one in graph.output if one.name in writer]
    while pending:
        place = pending.pop()
        if place not in live:
            live.add(place)
            pending.extend(needs[place])
    order = topological({place: needs[place] for place in sorted(live)})
    copies = []
    for place in order:
        copy = onnx.NodeProto()
        copy.CopyFrom(graph.node[place])
        copies.append(copy)
    return copies


def _name_nodes(nodes: list[onnx.NodeProto]) -> None:
    """Every node gets a name of its own: `conv1`, `conv2` where the file gives none."""
    taken = {node.name for node in nodes}
    used: set[str] = set()
    counts: dict[str, int] = {}
    for node in nodes:
        name = node.name
        while not name or name in used or (name != node.name and name in taken):
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
            name = f"{node.op_type.lower()}{counts[node.op_type]}"
        node.name = name
        used.add(name)


def _drop_dead_weights(graph: onnx.GraphProto) -> None:
    needed = {name for node in graph.node for name in onnx_nodes.reads(node)}
    weights = [one for one in graph.initializer if one.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(weights)
    inputs = {one.name for one in weights}
    kept = [one for one in graph.input if one.name not in inputs]
    del graph.input[:]
    graph.input.extend(kept)


def _keep_used_opsets(model: onnx.ModelProto) -> None:
    """onnxruntime names every operator set it knows when it saves; an older one would choke on those it does not."""
    used = onnx_nodes.domains(model.graph)
    for function in model.functions:
        used |= {node.domain for node in function.node}
    kept = [one for one in model.opset_import if ("" if one.domain == "ai.onnx" else one.domain) in used]
    del model.opset_import[:]
    model.opset_import.extend(sorted(kept, key=lambda one: one.domain))
