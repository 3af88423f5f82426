"""Operators that cost nothing of their own where an engine fuses a graph (`EngineOptions.optimise == "fast"`): the
activation, or the addition and its activation, that a convolution or matrix product applies while it writes.

Which operators onnxruntime fuses on the CPU is in its `conv_activation_fusion`, `conv_add_act_fusion`,
`gemm_activation_fusion` and `nchwc_transformer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from edgesplit_partitioner.ir.graph import Layer, OperatorClass, OperatorWork

FUSING: Final[frozenset[OperatorClass]] = frozenset({"conv", "depthwise", "gemm"})
"""Classes of operators into which others are fused."""
ACTIVATIONS: Final = frozenset({"Relu", "LeakyRelu", "Clip", "Sigmoid", "Tanh"})
"""Families of activations that are applied by the operator that writes their input."""


def separate_operators(works: Sequence[OperatorWork]) -> Iterator[OperatorWork]:
    """The operators that still run by themselves in a fused graph, of operators in the order in which they run."""
    position = 0
    while position < len(works):
        work = works[position]
        yield work
        position += 1
        if work.family == "Sigmoid" and _family(works, position) == "Mul":
            position += 1  # x * sigmoid(x) is one operator, which takes as long as the sigmoid
        if work.operator not in FUSING:
            continue
        if _family(works, position) == "Add":
            position += 1
        # There the product reads what the activation reads, so that the activation stays.
        if _family(works, position) in ACTIVATIONS and _family(works, position + 1) != "Mul":
            position += 1


def separate_by_layer(layers: Sequence[Layer]) -> Mapping[str, list[OperatorWork]]:
    """The operators that still run by themselves where these layers are fused together, by layer.

    A sum is a layer of its own, because it reads two branches; it is fused into the convolution that writes one of
    them, if that runs here.
    """
    separate: dict[str, list[OperatorWork]] = {}
    writers: dict[str, str] = {}
    for layer in layers:
        works = list(layer.work)
        sources = (separate[writers[tensor]] for tensor in layer.reads if tensor in writers)
        if _family(works, 0) == "Add" and any(source and source[-1].operator in FUSING for source in sources):
            works = works[2 if _family(works, 1) in ACTIVATIONS else 1 :]
        separate[layer.name] = list(separate_operators(works))
        writers |= dict.fromkeys(layer.writes, layer.name)
    return separate


def _family(works: Sequence[OperatorWork], position: int) -> str:
    return works[position].family if position < len(works) else ""
