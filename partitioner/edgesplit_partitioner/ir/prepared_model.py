"""What a model must offer to be measured, planned and cut: the one thing that planning knows of a model's format.

`model_file.prepare_model` makes one of a file, by its content; `onnx_model` and `tflite_model` are the two kinds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgesplit.errors import ModelRefused
from edgesplit.limits import LIMITS
from edgesplit.release.fingerprint import Anatomy
from edgesplit.release.manifest import FileName, Kernels, Slice, SliceFormat, TensorSpec
from edgesplit_partitioner.ir.chunking import Bytes
from edgesplit_partitioner.ir.graph import Layer, LayerGraph
from edgesplit_partitioner.ir.tensor_types import TensorType
from edgesplit_partitioner.onnx_format.archive import Data


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a slice takes and gives."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class PreparedModel(Protocol):
    """A model file, checked and made plain, with its layers known."""

    @property
    def format(self) -> SliceFormat:
        """Of its slices."""
        ...

    @property
    def kernels(self) -> Kernels:
        """How its slices have to run to compute what the whole does."""
        ...

    @property
    def raw(self) -> bytes:
        """The whole model as it is measured and cut; two runs over one file give the same bytes."""
        ...

    @property
    def parts_of_file(self) -> tuple[bytes, Mapping[str, Data]]:
        """The same not joined: the model's message, and its data files, which may be mapped, by name."""
        ...

    @property
    def types(self) -> Mapping[str, TensorType]:
        """Of every tensor, those inside layers too."""
        ...

    @property
    def graph(self) -> LayerGraph:
        """Without an input layer."""
        ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What applications give."""
        ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What they get."""
        ...

    def slice_files(
        self, members: Sequence[Layer], boundary: Boundary, shared: Collection[str]
    ) -> dict[FileName, list[Bytes]]:
        """The files of a slice with these layers, each as the chunks that it consists of.

        `shared` names the weights that layers of several slices may use: they get chunks of their own.
        """
        ...

    def anatomy(self, graph: LayerGraph) -> Anatomy | None:
        """What the model consists of with the layers of `graph` (its own, or with an input layer), for the release key
        to sign; None where a slice's file cannot be compared with it."""
        ...


def refuse_what_cannot_travel(ends: Iterable[TensorSpec], types: Mapping[str, TensorType]) -> None:
    """ModelRefused where an input or output of the model is larger than any request may be."""
    for one in ends:
        if types[one.name].bytes > LIMITS.http_body_bytes:
            raise ModelRefused(
                f"the tensor {one.name[:80]!r} has {types[one.name].bytes} bytes, and a request carries at most"
                f" {LIMITS.http_body_bytes}"
            )


def whole_runs(model: PreparedModel) -> dict[FileName, list[Bytes]]:
    """The files of the whole model as one slice, each as the chunks that it consists of: a large model is not joined in
    memory."""
    return model.slice_files(model.graph.layers, Boundary(model.inputs, model.outputs), frozenset())


def whole_slice(model: PreparedModel, name: str = "whole") -> Slice:
    """The whole model as one slice, whose files are `whole_runs`: what runs slices runs it."""
    return Slice(name, model.format, (), model.inputs, model.outputs, kernels=model.kernels)
