"""A TFLite file becomes a prepared model: tried out in a child process, made plain, with its layers and tensors known.

Nothing is optimised: the converter did that. What is prepared has every shape settled, a name of its own for each
tensor, no signatures and no metadata. Its slices give the whole's answers bit for bit on one machine.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgesplit.errors import ModelRefused
from edgesplit.release.fingerprint import Anatomy
from edgesplit.release.manifest import FileName, Kernels, SliceFormat, TensorSpec
from edgesplit_partitioner.ir.chunking import Bytes
from edgesplit_partitioner.ir.graph import Layer, LayerGraph
from edgesplit_partitioner.ir.prepared_model import Boundary, refuse_what_cannot_travel
from edgesplit_partitioner.ir.tensor_types import TensorType
from edgesplit_partitioner.tflite_format.flatbuffer import ints, pack, read_model, schema
from edgesplit_partitioner.tflite_format.graph import TfliteGraph, part
from edgesplit_partitioner.tflite_format.layers import layer_graph, weight_name
from edgesplit_partitioner.tflite_format.trial_run import Trial, try_model

DATATYPES: Mapping[int, str] = {
    schema.TensorType.BOOL: "BOOL",
    schema.TensorType.UINT8: "UINT8",
    schema.TensorType.UINT16: "UINT16",
    schema.TensorType.UINT32: "UINT32",
    schema.TensorType.UINT64: "UINT64",
    schema.TensorType.INT8: "INT8",
    schema.TensorType.INT16: "INT16",
    schema.TensorType.INT32: "INT32",
    schema.TensorType.INT64: "INT64",
    schema.TensorType.FLOAT16: "FP16",
    schema.TensorType.FLOAT32: "FP32",
    schema.TensorType.FLOAT64: "FP64",
}
"""Open Inference Protocol names of the types that may live between layers."""

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
"""Operators whose lengths are values that they read, and the first input that may hold such values."""


@dataclass(frozen=True, slots=True)
class TfliteModel:
    """A TFLite model that can be measured, planned and cut: a `PreparedModel`."""

    parts: TfliteGraph
    """The model's operators and tensors. Not to be changed."""
    raw: bytes
    """The same as bytes; two runs over one file give the same."""
    types: Mapping[str, TensorType]
    """Of every tensor, weights too."""
    graph: LayerGraph
    """Without an input layer."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    kernels: Kernels
    """`plain` where LiteRT's default delegate refuses the whole; `edgetpu` where it was compiled for one: it is one
    layer then, which runs nowhere else."""

    @property
    def parts_of_file(self) -> tuple[bytes, dict[str, bytes]]:
        """A TFLite model is one file."""
        return self.raw, {}

    @property
    def format(self) -> SliceFormat:
        """Of its slices."""
        return "tflite"

    def slice_files(
        self, members: Sequence[Layer], boundary: Boundary, shared: Collection[str]
    ) -> dict[FileName, list[Bytes]]:
        """`model.tflite`, in chunks that end where weights do."""
        inputs, outputs = ([one.name for one in ends] for ends in (boundary.inputs, boundary.outputs))
        cut = part(self.parts, _places(members), inputs, outputs)
        return {"model.tflite": pack(cut, _owners(self.parts, cut, members, shared))}

    def anatomy(self, graph: LayerGraph) -> Anatomy | None:
        """None: devices have no reader of this format beside the runtime, and operators refer to tensors by number, so
        that their bytes are others in every slice."""
        return None


def prepare_model(raw: bytes, bindings: Mapping[str, int] | None = None) -> TfliteModel:
    """The model in `raw`, ready to be cut; ModelRefused says what is wrong with it and what would do.

    `bindings` gives free dimensions their lengths, by place (`images:0`); others are what the file runs with.
    """
    trial = try_model(raw, bindings or {})
    graph = TfliteGraph(read_model(raw))
    types = _types(graph, trial)
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
    refuse_what_cannot_travel((_spec(name, types) for name in (*graph.inputs, *graph.outputs)), types)
    settled = TfliteGraph(_settled(graph, types))
    owned = layer_graph(settled, types)
    return TfliteModel(
        parts=settled,
        raw=b"".join(pack(settled.model)),
        types=types,
        graph=owned,
        inputs=tuple(_spec(name, types) for name in settled.inputs),
        outputs=tuple(_spec(name, types) for name in settled.outputs),
        kernels="edgetpu" if trial.compiled else trial.kernels,
    )


def exposed(model: TfliteModel) -> bytes:
    """The whole model with every tensor that a layer writes among its outputs."""
    written = [name for layer in model.graph.layers for name in layer.writes]
    every = range(len(model.parts.main.operators))
    outputs = list(dict.fromkeys((*model.parts.outputs, *written)))
    return b"".join(pack(part(model.parts, every, model.parts.inputs, outputs)))


def _settled(graph: TfliteGraph, types: Mapping[str, TensorType]) -> Any:
    """A plain copy of the model with the shapes that were seen. Open lengths are signed as such: some kernels take the
    shape for a promise where they are not."""
    model = part(graph, range(len(graph.main.operators)), graph.inputs, graph.outputs)
    main = model.subgraphs[0]
    for position, tensor in enumerate(main.tensors):
        name = tensor.name.decode()
        if name not in graph.constants and name not in graph.variables:
            main.tensors[position] = copy.copy(tensor)
            main.tensors[position].shape = np.array(types[name].seen, np.int32)
            open_ = -1 in types[name].shape
            main.tensors[position].shapeSignature = np.array(types[name].shape, np.int32) if open_ else None
    return model


def _types(graph: TfliteGraph, trial: Trial) -> dict[str, TensorType]:
    """Declared shapes, completed from trial runs; a length is -1 where the data may change it."""
    moving, sized = _depends_on_data(graph), _sized_by_values(graph)
    found = {
        name: _type(DATATYPES.get(graph.main.tensors[index].type, ""), name, trial, name in moving)
        for name, index in graph.index.items()
    }
    return {
        name: replace(one, shape=(-1,) * len(one.shape)) if name in sized and one.datatype else one
        for name, one in found.items()
    }


def _type(datatype: str, name: str, trial: Trial, moving: bool) -> TensorType:
    declared = trial.declared.get(name, ())
    runs = [run.get(name, declared) for run in trial.runs] or [declared]
    if all(run == declared for run in runs) or not datatype:
        return TensorType(datatype, declared, declared)
    if len({len(run) for run in runs}) > 1:
        raise ModelRefused(f"the tensor {name[:80]!r} changes its number of dimensions from run to run")
    largest = tuple(max(lengths) for lengths in zip(*runs, strict=True))
    same = [len(set(lengths)) == 1 and not moving for lengths in zip(*runs, strict=True)]
    shape = tuple(length if stays else -1 for length, stays in zip(largest, same, strict=True))
    return TensorType(datatype, shape, largest)


def _depends_on_data(graph: TfliteGraph) -> set[str]:
    """Tensors that have an operator of `DATA_DEPENDENT` somewhere before them."""
    moving: set[str] = set()
    for place in range(len(graph.main.operators)):
        if graph.op(place) in DATA_DEPENDENT or any(name in moving for name in graph.inputs_of(place)):
            moving.update(graph.writes(place))
    return moving


def _sized_by_values(graph: TfliteGraph) -> set[str]:
    """Tensors whose lengths are computed from what is fed, which no trial run need show, or that are made of such."""
    values = set(graph.inputs)  # that change with what is fed; a SHAPE of them need not
    sized: set[str] = set()
    for place in range(len(graph.main.operators)):
        reads = graph.inputs_of(place)
        given = [graph.names[index] for index in ints(graph.main.operators[place].inputs) if index >= 0]
        deciding = given[SIZED_BY[graph.op(place)] :] if graph.op(place) in SIZED_BY else ()
        if not values.isdisjoint(deciding) or not sized.isdisjoint(reads):
            sized.update(graph.writes(place))
        if not values.isdisjoint(reads) and (graph.op(place) not in ("SHAPE", "RANK") or not sized.isdisjoint(reads)):
            values.update(graph.writes(place))
    return sized


def _spec(name: str, types: Mapping[str, TensorType]) -> TensorSpec:
    return TensorSpec(name, types[name].datatype, types[name].shape)


def _places(members: Sequence[Layer]) -> list[int]:
    """Positions of the layers' operators, each once, in the model's order."""
    return sorted({place for layer in members for place in layer.nodes})


def _owners(graph: TfliteGraph, cut: Any, members: Sequence[Layer], shared: Collection[str]) -> dict[int, str]:
    """The layer of each of the slice's buffers, layer by layer; those that other slices' layers may use come last and
    have none, so that what a layer owns lies together in whatever slice it is."""
    number = {id(buffer): position for position, buffer in enumerate(cut.buffers)}
    owned: dict[int, str] = {}
    free: dict[int, str] = {}
    for layer in members:
        for index in graph.buffers(layer.nodes):
            position = number[id(graph.model.buffers[index])]
            if weight_name(index) in shared:
                free[position] = ""
            else:
                owned[position] = layer.name
    return {**owned, **free}
