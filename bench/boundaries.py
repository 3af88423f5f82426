"""Where a model is divided by one tensor, for the other benchmarks."""

from __future__ import annotations

from edgesplit_partitioner.ir.graph import LayerGraph


def boundaries(graph: LayerGraph) -> tuple[str, ...]:
    """The tensors that cross a cut alone, in the order of the layers: where layers are run in their order."""
    made = dict.fromkeys(graph.inputs, -1) | {
        name: number for number, layer in enumerate(graph.layers) for name in layer.writes
    }
    last_read: dict[str, int] = {}
    for number, layer in enumerate(graph.layers):
        last_read.update(dict.fromkeys(layer.reads, number))
    alone = []
    for cut in range(len(graph.layers) - 1):
        crossing = [name for name, maker in made.items() if maker <= cut < last_read.get(name, -1)]
        alone += crossing if len(crossing) == 1 else []
    return tuple(dict.fromkeys(name for name in alone if made[name] >= 0))
