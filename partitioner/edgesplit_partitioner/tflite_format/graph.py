"""Indexes a TFLite model's main graph by tensor name: writers, readers, constants, variables; and cuts parts out of it.

In the file tensors have indices, and names that may be missing or repeated; here each tensor has a unique name, and
inputs and outputs keep theirs. Operators that use the same variable (a tensor that the interpreter keeps between runs)
belong together.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgesplit_partitioner.tflite_format.flatbuffer import (
    Model,
    buffer_bytes,
    ints,
    operator_name,
    renumber_subgraphs,
    scale_tensors_of,
    schema,
    subgraphs_of,
    tensor_name,
    tensors_of,
)

RANDOM_OPERATORS = frozenset({"RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL", "MULTINOMIAL", "STABLEHLO_RNG_BIT_GENERATOR"})
"""Operators that draw random numbers: they are not constants even where they read constants alone."""


@dataclass(slots=True)
class TfliteGraph:
    """A model's main graph, indexed. An operator is identified by its position in the graph's list of operators."""

    model: Model
    names: list[str] = field(init=False)
    """Unique names of the tensors, by tensor index."""
    index: dict[str, int] = field(init=False)
    """Tensor indices by name."""
    constants: set[str] = field(init=False)
    """Names of the weights and of everything computed from weights alone."""
    variables: set[str] = field(init=False)
    """Names of the tensors that the interpreter keeps between runs."""
    constant_positions: set[int] = field(default_factory=set)
    """Positions of the operators that compute constants."""
    reads: list[list[str]] = field(default_factory=list)
    """Per operator, the tensors that it reads, without constants and variables."""
    readers: dict[str, list[int]] = field(default_factory=dict)
    """Per tensor, the positions of the operators that read it."""
    writer: dict[str, int] = field(default_factory=dict)
    """Per tensor, the position of the operator that writes it."""

    def __post_init__(self) -> None:
        self.names = tensor_names(self.main)
        self.index = {name: index for index, name in enumerate(self.names)}
        written = {index for operator in self.main.operators for index in ints(operator.outputs)}
        assigned = {*ints(self.main.inputs), *written}
        self.variables = {
            self.names[index]
            for index, tensor in enumerate(self.main.tensors)
            if tensor.isVariable and index not in assigned
        }
        self.constants = {name for index, name in enumerate(self.names) if index not in assigned} - self.variables
        outputs = set(self.outputs)
        for place, operator in enumerate(self.main.operators):
            outputs_written = self.outputs_of(place)
            used = [name for name in self.inputs_of(place) if name not in self.constants]
            own = [name for name in used if name not in self.variables]
            self.reads.append(own)
            self.writer.update(dict.fromkeys(outputs_written, place))
            if not used and not is_random(self.model, operator) and not outputs & set(outputs_written):
                self.constant_positions.add(place)
                self.constants.update(outputs_written)
            for name in own:
                self.readers.setdefault(name, []).append(place)

    @property
    def main(self) -> Model:
        """The main graph, which applications run; the other subgraphs are run by control-flow operators."""
        return self.model.subgraphs[0]

    @property
    def inputs(self) -> list[str]:
        """Names of the main graph's inputs, each once, in order."""
        return list(dict.fromkeys(self.names[index] for index in ints(self.main.inputs)))

    @property
    def outputs(self) -> list[str]:
        """Names of the main graph's outputs, each once, in order."""
        return list(dict.fromkeys(self.names[index] for index in ints(self.main.outputs)))

    def op_type(self, position: int) -> str:
        """Operator type at a position."""
        return operator_name(self.model, self.main.operators[position])

    def inputs_of(self, position: int) -> list[str]:
        """Names of all the operator's inputs, constants too, each once."""
        indices = (index for index in ints(self.main.operators[position].inputs) if index >= 0)
        return list(dict.fromkeys(self.names[index] for index in indices))

    def outputs_of(self, position: int) -> list[str]:
        """Names of the operator's outputs."""
        return [self.names[index] for index in ints(self.main.operators[position].outputs) if index >= 0]

    def weights_of(self, positions: Sequence[int]) -> tuple[tuple[str, ...], int]:
        """Names and bytes of the weights that these operators use."""
        buffers = self.buffers_of(positions)
        return tuple(map(weight_name, buffers)), sum(buffer_bytes(self.model, buffer) for buffer in buffers)

    def layer_name(self, positions: Sequence[int]) -> str:
        """The name of the tensor that the layer writes last, restricted to plain characters and its last 80: operators
        have no names in TFLite, tensors do."""
        written = next((name for place in reversed(positions) for name in self.outputs_of(place)), "")
        plain = re.sub(r"[^\w./:+-]+", "_", written.split(";")[0]).strip("/_")[-80:].strip("/_")
        return plain or self.op_type(positions[0]).lower()

    def only_reader(self, tensor: str) -> int | None:
        """Position of the only operator that reads `tensor`; None where several do, or where it is an output of the
        graph."""
        readers = self.readers.get(tensor, [])
        return readers[0] if len(readers) == 1 and tensor not in self.outputs else None

    def buffers_of(self, positions: Iterable[int]) -> list[int]:
        """Indices of the buffers with weights that these operators use, subgraphs included, in the order of their first
        use."""
        numbers: dict[int, None] = {}
        for place in positions:
            operator = self.main.operators[place]
            used = [self.main.tensors[index] for index in tensors_of(self.main, operator)]
            for number in reachable_subgraphs(self.model, [operator]):
                used += self.model.subgraphs[number].tensors or ()
            numbers.update(dict.fromkeys(tensor.buffer for tensor in used if buffer_bytes(self.model, tensor.buffer)))
        return list(numbers)


def weight_name(buffer: int) -> str:
    """Name of a layer's weight: the index of its buffer in the file."""
    return f"buffer {buffer}"


def tensor_names(graph: Model) -> list[str]:
    """A unique name for each tensor, by index: its own unless an earlier tensor has that; inputs and outputs choose
    first."""
    order = dict.fromkeys((*ints(graph.inputs), *ints(graph.outputs), *range(len(graph.tensors))))
    taken: dict[str, int] = {}
    for index in order:
        base = tensor_name(graph.tensors[index]) or f"tensor{index}"
        name = base if base not in taken else f"{base}:{index}"
        while name in taken:
            name += "'"
        taken[name] = index
    return sorted(taken, key=lambda name: taken[name])


def reachable_subgraphs(model: Model, operators: Iterable[Model]) -> list[int]:
    """Indices of the subgraphs that these operators run, directly or through operators in other subgraphs, in order."""
    numbers: list[int] = []
    pending = list(operators)
    while pending:
        for number in subgraphs_of(pending.pop()):
            if number not in numbers:
                numbers.append(number)
                pending.extend(model.subgraphs[number].operators or ())
    return sorted(numbers)


def is_random(model: Model, operator: Model) -> bool:
    """Whether the operator, or an operator in its subgraphs, draws random numbers, so that two runs give different
    results."""
    inside = (
        member
        for number in reachable_subgraphs(model, [operator])
        for member in model.subgraphs[number].operators or ()
    )
    return any(operator_name(model, member) in RANDOM_OPERATORS for member in (operator, *inside))


def extract(graph: TfliteGraph, positions: Sequence[int], inputs: Sequence[str], outputs: Sequence[str]) -> Model:
    """A model of its own with the operators at these positions, from the tensors `inputs` to the tensors `outputs`.

    Scales and zero points stay with their tensors: what crosses a cut is what was between the operators, bit for bit.
    """
    main = graph.main
    operators = [main.operators[place] for place in positions]
    tensor_indices = {index for operator in operators for index in tensors_of(main, operator)}
    tensor_indices.update(graph.index[name] for name in (*inputs, *outputs))
    tensor_indices.update(scale for index in tuple(tensor_indices) for scale in scale_tensors_of(main.tensors[index]))
    numbers = {number: position for position, number in enumerate(reachable_subgraphs(graph.model, operators), 1)}
    cut = schema.ModelT()
    cut.operatorCodes, cut.buffers, cut.subgraphs = [], [schema.BufferT()], []
    packing = _Extraction(graph.model, cut, numbers)
    packing.add_graph(main, positions, tensor_indices, graph.names, inputs, outputs)
    for number in numbers:
        inner = graph.model.subgraphs[number]
        names = tensor_names(inner)
        ends = ([names[index] for index in ints(ends)] for ends in (inner.inputs, inner.outputs))
        packing.add_graph(inner, range(len(inner.operators or ())), range(len(inner.tensors)), names, *ends)
    return cut


@dataclass(slots=True)
class _Extraction:
    """Copies parts of one model into another, under new indices."""

    source: Model
    target: Model
    subgraph_numbers: dict[int, int]
    codes: dict[int, int] = field(default_factory=dict)
    buffers: dict[int, int] = field(default_factory=dict)

    def add_graph(
        self,
        graph: Model,
        positions: Iterable[int],
        used: Collection[int],
        names: Sequence[str],
        inputs: Sequence[str],
        outputs: Sequence[str],
    ) -> None:
        """Append a subgraph with these operators and tensors of `graph`."""
        numbers = {index: number for number, index in enumerate(sorted(used))}
        of_name = {names[index]: number for index, number in numbers.items()}
        added = schema.SubGraphT()
        added.name = b"main" if not self.target.subgraphs else b"inner"
        added.tensors = [self._tensor(graph.tensors[index], names[index], numbers) for index in numbers]
        added.operators = [self._operator(graph.operators[place], numbers) for place in positions]
        added.inputs = np.array([of_name[name] for name in inputs], np.int32)
        added.outputs = np.array([of_name[name] for name in outputs], np.int32)
        self.target.subgraphs.append(added)

    def _tensor(self, tensor: Model, name: str, numbers: dict[int, int]) -> Model:
        added = copy.copy(tensor)
        added.name = name.encode()
        added.buffer = self._buffer(tensor.buffer)
        if scale_tensors_of(tensor):
            added.quantization = copy.deepcopy(tensor.quantization)
            details = added.quantization.details
            details.scales, details.zeroPoints = (
                numbers.get(index, 0) for index in (details.scales, details.zeroPoints)
            )
        return added

    def _operator(self, operator: Model, numbers: dict[int, int]) -> Model:
        added = copy.copy(operator)
        added.opcodeIndex = self._code(operator.opcodeIndex)
        added.debugMetadataIndex = -1
        for end in ("inputs", "outputs", "intermediates"):
            indices = getattr(operator, end)
            if indices is not None:
                setattr(added, end, np.array([numbers.get(index, -1) for index in ints(indices)], np.int32))
        if self.subgraph_numbers and subgraphs_of(operator):
            added.builtinOptions = copy.copy(operator.builtinOptions)
            added.builtinOptions2 = copy.copy(operator.builtinOptions2)
            renumber_subgraphs(added, self.subgraph_numbers)
        return added

    def _code(self, index: int) -> int:
        if index not in self.codes:
            self.codes[index] = len(self.target.operatorCodes)
            self.target.operatorCodes.append(self.source.operatorCodes[index])
        return self.codes[index]

    def _buffer(self, index: int) -> int:
        """The buffer's index in the target; every empty buffer becomes the first one, which is empty by convention."""
        if not buffer_bytes(self.source, index):
            return 0
        if index not in self.buffers:
            self.buffers[index] = len(self.target.buffers)
            self.target.buffers.append(self.source.buffers[index])
        return self.buffers[index]
