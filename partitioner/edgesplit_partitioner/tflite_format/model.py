"""Turns a TFLite file into a prepared model: run once in a child process, normalised, with its layers and tensors
known.

Nothing is optimised, because the converter did that. The prepared model has every shape settled, a unique name for each
tensor, no signatures and no metadata. Its slices give the whole model's results bit for bit on one machine.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgesplit.errors import ModelRefused
from edgesplit.release.fingerprint import Fingerprint
from edgesplit.release.manifest import FileName, Kernels, SliceFormat, TensorSpec
from edgesplit_partitioner.ir.chunking import Bytes
from edgesplit_partitioner.ir.graph import Layer, LayerGraph
from edgesplit_partitioner.ir.hints import NO_HINTS, Hints
from edgesplit_partitioner.ir.prepared_model import Boundary, check_tensor_sizes
from edgesplit_partitioner.ir.tensor_types import NUMBER_DTYPES, TensorType
from edgesplit_partitioner.tflite_format.flatbuffer import ints, pack, read_model, schema
from edgesplit_partitioner.tflite_format.graph import TfliteGraph, extract, weight_name
from edgesplit_partitioner.tflite_format.hints import hints_of
from edgesplit_partitioner.tflite_format.layers import layer_graph
from edgesplit_partitioner.tflite_format.trial_run import TrialResult, try_model

DATATYPES: Mapping[int, str] = {
    getattr(schema.TensorType, dtype.name.upper()): name for name, dtype in NUMBER_DTYPES.items()
}
"""Open Inference Protocol names of the types that may exist between layers, by the schema's number."""

DATA_DEPENDENT = frozenset(
    {"WHERE", "UNIQUE", "NON_MAX_SUPPRESSION_V4", "NON_MAX_SUPPRESSION_V5", "RANGE", "IF", "WHILE", "CUSTOM"}
)
"""Operators after which a length that is not known beforehand may change from input to input."""
SIZED_BY: Mapping[str, int] = {
    **dict.fromkeys(("FILL", "RANGE", "TRANSPOSE_CONV", "RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL"), 0),
    **dict.fromkeys(("RESHAPE", "SLICE", "STRIDED_SLICE", "TILE", "PAD", "PADV2", "MIRROR_PAD", "TOPK_V2"), 1),
    **dict.fromkeys(("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "BROADCAST_TO", "ONE_HOT", "SPLIT_V"), 1),
    **dict.fromkeys(("SPACE_TO_BATCH_ND", "BATCH_TO_SPACE_ND", "SEGMENT_SUM", "SPARSE_TO_DENSE"), 1),
    **dict.fromkeys(("SUM", "MEAN", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD", "REDUCE_ANY", "REDUCE_ALL"), 1),
    **dict.fromkeys(("EXPAND_DIMS", "TRANSPOSE"), 1),
}
"""Operators whose output lengths are values that they read, with the position of the first input that may hold such
values."""


@dataclass(frozen=True, slots=True)
class TfliteModel:
    """A TFLite model that can be measured, planned and cut: a `PreparedModel`."""

    tflite_graph: TfliteGraph
    """The model's operators and tensors. Read-only."""
    raw: bytes
    """The model as a file's bytes; preparing the same file twice gives the same bytes."""
    types: Mapping[str, TensorType]
    """Type of every tensor by name, weights included."""
    graph: LayerGraph
    """The layer graph, without an input layer."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    kernels: Kernels
    """`plain` where LiteRT's default delegate refuses the whole model; `edgetpu` where it was compiled for an Edge TPU,
    and is then one layer, which runs nowhere else."""
    hints: Hints = NO_HINTS

    @property
    def message_and_data(self) -> tuple[bytes, dict[str, bytes]]:
        """The model's bytes and no data files: a TFLite model is one file."""
        return self.raw, {}

    @property
    def format(self) -> SliceFormat:
        """Format of the model's slices."""
        return "tflite"

    def slice_files(
        self, members: Sequence[Layer], boundary: Boundary, shared: Collection[str]
    ) -> dict[FileName, list[Bytes]]:
        """`model.tflite` in chunks that end where weights do."""
        inputs, outputs = ([spec.name for spec in specs] for specs in (boundary.inputs, boundary.outputs))
        positions = sorted({position for layer in members for position in layer.nodes})
        cut = extract(self.tflite_graph, positions, inputs, outputs)
        return {"model.tflite": pack(cut, _buffer_owners(self.tflite_graph, cut, members, shared))}

    def fingerprint(self, graph: LayerGraph) -> Fingerprint | None:
        """None: devices have no reader of this format apart from the runtime, and operators refer to tensors by index,
        so that their bytes differ from slice to slice."""
        return None


def prepare_model(raw: bytes, bindings: Mapping[str, int] | None = None) -> TfliteModel:
    """The model in `raw`, ready to be cut; ModelRefused says what is wrong with it and what to do instead.

    `bindings` gives free dimensions their lengths, by input and axis (`images:0`); the others keep the length that the
    file declares.
    """
    trial = try_model(raw, bindings or {})
    graph = TfliteGraph(read_model(raw))
    types = _resolve_types(graph, trial)
    for name in graph.outputs:
        if not types[name].datatype:
            raise ModelRefused(f"the output {name[:80]!r} is not a tensor of numbers; only those can be sent back")
        if name in graph.constants:
            raise ModelRefused(f"the output {name[:80]!r} is a constant; export the model without it")
        if name in graph.variables:
            raise ModelRefused(f"the output {name[:80]!r} is state that LiteRT keeps; export the model without it")
    for name in graph.inputs:
        if not types[name].datatype:
            raise ModelRefused(f"the input {name[:80]!r} is not a tensor of numbers; only those can be fed")
    check_tensor_sizes((_spec(name, types) for name in (*graph.inputs, *graph.outputs)), types)
    settled = TfliteGraph(_with_settled_shapes(graph, types))
    layers = layer_graph(settled, types)
    return TfliteModel(
        tflite_graph=settled,
        raw=b"".join(pack(settled.model)),
        types=types,
        graph=layers,
        inputs=tuple(_spec(name, types) for name in settled.inputs),
        outputs=tuple(_spec(name, types) for name in settled.outputs),
        kernels="edgetpu" if trial.compiled else trial.kernels,
        hints=hints_of(raw),
    )


def _with_settled_shapes(graph: TfliteGraph, types: Mapping[str, TensorType]) -> Any:
    """A normalised copy of the model with the shapes of the trial run. Open lengths are marked in the shape signature:
    some kernels rely on the shape where they are not."""
    model = extract(graph, range(len(graph.main.operators)), graph.inputs, graph.outputs)
    main = model.subgraphs[0]
    for position, tensor in enumerate(main.tensors):
        name = tensor.name.decode()
        if name not in graph.constants and name not in graph.variables:
            main.tensors[position] = copy.copy(tensor)
            main.tensors[position].shape = np.array(types[name].concrete_shape, np.int32)
            open_ = -1 in types[name].shape
            main.tensors[position].shapeSignature = np.array(types[name].shape, np.int32) if open_ else None
    return model


def _resolve_types(graph: TfliteGraph, trial: TrialResult) -> dict[str, TensorType]:
    """The type of each tensor: declared shapes, completed from trial runs. A length is -1 where the data may change
    it."""
    data_dependent, sized_by_values = _depends_on_data(graph), _sized_by_values(graph)
    types = {
        name: _resolve_type(DATATYPES.get(graph.main.tensors[index].type, ""), name, trial, name in data_dependent)
        for name, index in graph.index.items()
    }
    return {
        name: replace(tensor_type, shape=(-1,) * len(tensor_type.shape))
        if name in sized_by_values and tensor_type.datatype
        else tensor_type
        for name, tensor_type in types.items()
    }


def _resolve_type(datatype: str, name: str, trial: TrialResult, depends_on_data: bool) -> TensorType:
    """The type of one tensor. `depends_on_data` is true where its lengths may depend on the data; ModelRefused where
    even the number of dimensions changes between runs."""
    declared = trial.declared.get(name, ())
    trial_shapes = [trial_shape.get(name, declared) for trial_shape in trial.runs] or [declared]
    # Every trial run kept the allocated shape.
    if all(trial_shape == declared for trial_shape in trial_shapes) or not datatype:
        return TensorType(datatype, declared, declared)
    if len({len(trial_shape) for trial_shape in trial_shapes}) > 1:
        raise ModelRefused(f"the tensor {name[:80]!r} changes its number of dimensions from run to run")
    largest = tuple(max(lengths) for lengths in zip(*trial_shapes, strict=True))
    is_constant = [len(set(lengths)) == 1 and not depends_on_data for lengths in zip(*trial_shapes, strict=True)]
    shape = tuple(length if constant else -1 for length, constant in zip(largest, is_constant, strict=True))
    return TensorType(datatype, shape, largest)


def _depends_on_data(graph: TfliteGraph) -> set[str]:
    """Tensors that depend on the result of an operator of `DATA_DEPENDENT`."""
    dynamic: set[str] = set()
    for position in range(len(graph.main.operators)):
        if graph.op_type(position) in DATA_DEPENDENT or any(name in dynamic for name in graph.inputs_of(position)):
            dynamic.update(graph.outputs_of(position))
    return dynamic


def _sized_by_values(graph: TfliteGraph) -> set[str]:
    """Tensors whose lengths are computed from input values, or that are computed from such tensors; a trial run need
    not show this."""
    values = set(graph.inputs)  # tensors whose values depend on the input data; a SHAPE of them may not
    sized: set[str] = set()
    for position in range(len(graph.main.operators)):
        reads = graph.inputs_of(position)
        input_names = [graph.names[index] for index in ints(graph.main.operators[position].inputs) if index >= 0]
        size_inputs = input_names[SIZED_BY[graph.op_type(position)] :] if graph.op_type(position) in SIZED_BY else ()
        if not values.isdisjoint(size_inputs) or not sized.isdisjoint(reads):
            sized.update(graph.outputs_of(position))
        if not values.isdisjoint(reads) and (
            graph.op_type(position) not in ("SHAPE", "RANK") or not sized.isdisjoint(reads)
        ):
            values.update(graph.outputs_of(position))
    return sized


def _spec(name: str, types: Mapping[str, TensorType]) -> TensorSpec:
    return TensorSpec(name, types[name].datatype, types[name].shape)


def _buffer_owners(graph: TfliteGraph, cut: Any, members: Sequence[Layer], shared: Collection[str]) -> dict[int, str]:
    """The layer that owns each of the slice's buffers, layer by layer. Buffers that layers of other slices may use come
    last and have no owner, so that what a layer owns is contiguous whichever slice it is in."""
    number = {id(buffer): position for position, buffer in enumerate(cut.buffers)}
    owned: dict[int, str] = {}
    unowned: dict[int, str] = {}
    for layer in members:
        for index in graph.buffers_of(layer.nodes):
            position = number[id(graph.model.buffers[index])]
            if weight_name(index) in shared:
                unowned[position] = ""
            else:
                owned[position] = layer.name
    return {**owned, **unowned}
