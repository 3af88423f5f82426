"""Normalises a model that onnxruntime saved, so that the same model always gives the same bytes.

The result is in topological order, has no dead nodes or weights, names every node, imports only the operator sets in
use, has no free text, and every output is computed by a node or is an input.
"""

from __future__ import annotations

import onnx

from edgesplit_partitioner.ir.fusion import topological_order
from edgesplit_partitioner.onnx_format import nodes as onnx_nodes


def normalise_model(model: onnx.ModelProto, outputs: list[str]) -> None:
    """Normalise the saved model in place, with the outputs of these names in this order."""
    graph = model.graph
    _restore_outputs(graph, outputs)
    nodes = _live_nodes(graph)
    _name_nodes(nodes)
    del graph.node[:]
    graph.node.extend(nodes)
    _drop_dead_weights(graph)
    for subgraph in onnx_nodes.all_graphs(graph):
        del subgraph.value_info[:]
        subgraph.doc_string = ""
        del subgraph.metadata_props[:]
        for node in subgraph.node:
            node.doc_string = ""
            del node.metadata_props[:]
    _keep_used_opsets(model)
    graph.name = "edgesplit"
    model.ir_version = max(model.ir_version, 4)  # below 4, initializers must be inputs too
    model.doc_string = ""
    del model.metadata_props[:]


def _restore_outputs(graph: onnx.GraphProto, outputs: list[str]) -> None:
    """Put the outputs in the given order, and compute an output that was folded into a weight by an Identity node
    again."""
    by_name = {value.name: value for value in graph.output}
    del graph.output[:]
    graph.output.extend(by_name[name] for name in outputs)
    for tensor in graph.initializer:
        if tensor.name in by_name:
            output, tensor.name = tensor.name, f"{tensor.name}/constant"
            onnx_nodes.rename_reads(graph, output, tensor.name)
            graph.node.append(onnx.helper.make_node("Identity", [tensor.name], [output]))


def _live_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Copies of the nodes that an output depends on, in topological order, ties in the order of the file."""
    writer = {name: position for position, node in enumerate(graph.node) for name in onnx_nodes.outputs_of(node)}
    needs = {
        position: {writer[name] for name in onnx_nodes.inputs_of(node) if name in writer}
        for position, node in enumerate(graph.node)
    }
    live: set[int] = set()
    pending = [writer[output.name] for output in graph.output if output.name in writer]
    while pending:
        position = pending.pop()
        if position not in live:
            live.add(position)
            pending.extend(needs[position])
    order = topological_order({position: needs[position] for position in sorted(live)})
    copies = []
    for position in order:
        copy = onnx.NodeProto()
        copy.CopyFrom(graph.node[position])
        copies.append(copy)
    return copies


def _name_nodes(nodes: list[onnx.NodeProto]) -> None:
    """Give every node a unique name: `conv1`, `conv2` where the file has none."""
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
    needed = {name for node in graph.node for name in onnx_nodes.inputs_of(node)}
    weights = [value for value in graph.initializer if value.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(weights)
    inputs = {value.name for value in weights}
    inputs_left = [value for value in graph.input if value.name not in inputs]
    del graph.input[:]
    graph.input.extend(inputs_left)


def _keep_used_opsets(model: onnx.ModelProto) -> None:
    """Drop unused operator-set imports: onnxruntime imports every set that it has when it saves, and an older
    onnxruntime rejects those that it does not have."""
    used = onnx_nodes.domains(model.graph)
    for function in model.functions:
        used |= {node.domain for node in function.node}
    kept = [opset for opset in model.opset_import if onnx_nodes.plain_domain(opset.domain) in used]
    del model.opset_import[:]
    model.opset_import.extend(sorted(kept, key=lambda opset: opset.domain))
