"""A TFLite model's main graph, looked up by name: who writes a tensor, who reads it, what is constant.

Tensors have indices in the file, and names that may be missing or repeat; here each has one name of its own, inputs and
outputs keeping theirs. A variable (a tensor that the interpreter keeps between runs) joins the operators that use it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgesplit_partitioner.tflite_format.flatbuffer import (
    Model,
    buffer_bytes,
    ints,
    operator_name,
    renumber_subgraphs,
    scales_of,
    schema,
    subgraphs_of,
    tensor_name,
    tensors_of,
)

RANDOM = frozenset({"RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL", "MULTINOMIAL", "STABLEHLO_RNG_BIT_GENERATOR"})


@dataclass(slots=True)
class TfliteGraph:
    """The main graph. Places are positions in its list of operators."""

    model: Model
    names: list[str] = field(init=False)
    """By tensor index."""
    index: dict[str, int] = field(init=False)
    constants: set[str] = field(init=False)
    """Weights and everything computed from weights alone."""
    variables: set[str] = field(init=False)
    fixed: set[int] = field(default_factory=set)
    """Operators that compute constants."""
    reads: list[list[str]] = field(default_factory=list)
    """Per operator, constants and variables left out."""
    readers: dict[str, list[int]] = field(default_factory=dict)
    writer: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = unique_names(self.main)
        self.index = {name: index for index, name in enumerate(self.names)}
        written = {index for operator in self.main.operators for index in ints(operator.outputs)}
        given = {*ints(self.main.inputs), *written}
        self.variables = {
            self.names[index] for index, one in enumerate(self.main.tensors) if one.isVariable and index not in given
        }
        self.constants = {name for index, name in enumerate(self.names) if index not in given} - self.variables
        outputs = set(self.outputs)
        for place, operator in enumerate(self.main.operators):
            makes = self.writes(place)
            used = [name for name in self.inputs_of(place) if name not in self.constants]
            own = [name for name in used if name not in self.variables]
            self.reads.append(own)
            self.writer.update(dict.fromkeys(makes, place))
            if not used and not draws(self.model, operator) and not outputs & set(makes):
                self.fixed.add(place)
                self.constants.update(makes)
            for name in own:
                self.readers.setdefault(name, []).append(place)

    @property
    def main(self) -> Model:
        """The graph that applications call."""
        return self.model.subgraphs[0]

    @property
    def inputs(self) -> list[str]:
        """Names, each once, in order."""
        return list(dict.fromkeys(self.names[index] for index in ints(self.main.inputs)))

    @property
    def outputs(self) -> list[str]:
        """Names, each once, in order."""
        return list(dict.fromkeys(self.names[index] for index in ints(self.main.outputs)))

    def op(self, place: int) -> str:
        """Type of the operator at a place."""
        return operator_name(self.model, self.main.operators[place])

    def inputs_of(self, place: int) -> list[str]:
        """Everything that the operator is given, constants too, each once."""
        given = (index for index in ints(self.main.operators[place].inputs) if index >= 0)
        return list(dict.fromkeys(self.names[index] for index in given))

    def writes(self, place: int) -> list[str]:
        """Names the operator gives."""
        return [self.names[index] for index in ints(self.main.operators[place].outputs) if index >= 0]

    def only_reader(self, tensor: str) -> int | None:
        """The one operator that sees `tensor`, or None if several do, or the model's caller does."""
        readers = self.readers.get(tensor, [])
        return readers[0] if len(readers) == 1 and tensor not in self.outputs else None

    def buffers(self, places: Iterable[int]) -> list[int]:
        """The buffers with weights that these operators use, subgraphs included, in the order of their first use."""
        found: dict[int, None] = {}
        for place in places:
            operator = self.main.operators[place]
            used = [self.main.tensors[index] for index in tensors_of(self.main, operator)]
            for number in reached(self.model, [operator]):
                used += self.model.subgraphs[number].tensors or ()
            found.update(dict.fromkeys(one.buffer for one in used if buffer_bytes(self.model, one.buffer)))
        return list(found)


def unique_names(graph: Model) -> list[str]:
    """A name for each tensor: its own where nobody before it has that; inputs and outputs choose first."""
    order = dict.fromkeys((*ints(graph.inputs), *ints(graph.outputs), *range(len(graph.tensors))))
    taken: dict[str, int] = {}
    for index in order:
        base = tensor_name(graph.tensors[index]) or f"tensor{index}"
        name = base if base not in taken else f"{base}:{index}"
        while name in taken:
            name += "'"
        taken[name] = index
    return sorted(taken, key=lambda name: taken[name])


def reached(model: Model, operators: Iterable[Model]) -> list[int]:
    """The subgraphs that these operators run, and those that the operators in them run."""
    found: list[int] = []
    pending = list(operators)
    while pending:
        for number in subgraphs_of(pending.pop()):
            if number not in found:
                found.append(number)
                pending.extend(model.subgraphs[number].operators or ())
    return sorted(found)


def draws(model: Model, operator: Model) -> bool:
    """Whether the operator, or one in its subgraphs, draws random numbers: run twice, it answers twice."""
    inside = (one for number in reached(model, [operator]) for one in model.subgraphs[number].operators or ())
    return any(operator_name(model, one) in RANDOM for one in (operator, *inside))


def part(graph: TfliteGraph, places: Sequence[int], inputs: Sequence[str], outputs: Sequence[str]) -> Model:
    """A model of its own with the operators at these places, from the tensors `inputs` to the tensors `outputs`.

    Scales and zero points stay with their tensors: what crosses a cut is what was between the operators, bit for bit.
    """
    main = graph.main
    operators = [main.operators[place] for place in places]
    used = {index for operator in operators for index in tensors_of(main, operator)}
    used.update(graph.index[name] for name in (*inputs, *outputs))
    used.update(scale for index in tuple(used) for scale in scales_of(main.tensors[index]))
    numbers = {number: position for position, number in enumerate(reached(graph.model, operators), 1)}
    cut = schema.ModelT()
    cut.operatorCodes, cut.buffers, cut.subgraphs = [], [schema.BufferT()], []
    packing = _Packing(graph.model, cut, numbers)
    packing.add_graph(main, places, used, graph.names, inputs, outputs)
    for number in numbers:
        inner = graph.model.subgraphs[number]
        names = unique_names(inner)
        ends = ([names[index] for index in ints(ends)] for ends in (inner.inputs, inner.outputs))
        packing.add_graph(inner, range(len(inner.operators or ())), range(len(inner.tensors)), names, *ends)
    return cut


@dataclass(slots=True)
class _Packing:
    """Parts of one model on their way into another, under new numbers."""

    source: Model
    target: Model
    subgraph_numbers: dict[int, int]
    codes: dict[int, int] = field(default_factory=dict)
    buffers: dict[int, int] = field(default_factory=dict)

    def add_graph(
        self,
        graph: Model,
        places: Iterable[int],
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
        added.operators = [self._operator(graph.operators[place], numbers) for place in places]
        added.inputs = np.array([of_name[name] for name in inputs], np.int32)
        added.outputs = np.array([of_name[name] for name in outputs], np.int32)
        self.target.subgraphs.append(added)

    def _tensor(self, tensor: Model, name: str, numbers: dict[int, int]) -> Model:
        added = copy.copy(tensor)
        added.name = name.encode()
        added.buffer = self._buffer(tensor.buffer)
        if scales_of(tensor):
            added.quantization = copy.deepcopy(tensor.quantization)
            details = added.quantization.details
            details.scales, details.zeroPoints = (numbers.get(one, 0) for one in (details.scales, details.zeroPoints))
        return added

    def _operator(self, operator: Model, numbers: dict[int, int]) -> Model:
        added = copy.copy(operator)
        added.opcodeIndex = self._code(operator.opcodeIndex)
        added.debugMetadataIndex = -1
        for end in ("inputs", "outputs", "intermediates"):
            given = getattr(operator, end)
            if given is not None:
                setattr(added, end, np.array([numbers.get(one, -1) for one in ints(given)], np.int32))
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
        """Its new number; whatever holds nothing shares the first one, which is empty by convention."""
        if not buffer_bytes(self.source, index):
            return 0
        if index not in self.buffers:
            self.buffers[index] = len(self.target.buffers)
            self.target.buffers.append(self.source.buffers[index])
        return self.buffers[index]
