"""`PreparedModel`: the interface through which profiling, planning and slicing use a model, whatever its file format.

`model_loader.prepare_model` makes one from a file, by its content; `onnx_format.model` and `tflite_format.model` are
the implementations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgesplit.errors import ModelRefused
from edgesplit.limits import LIMITS
from edgesplit.release.fingerprint import Fingerprint
from edgesplit.release.manifest import FileName, Kernels, Slice, SliceFormat, TensorSpec
from edgesplit_partitioner.ir.chunking import Bytes, Data
from edgesplit_partitioner.ir.graph import Layer, LayerGraph
from edgesplit_partitioner.ir.hints import Hints
from edgesplit_partitioner.ir.tensor_types import TensorType


@dataclass(frozen=True, slots=True)
class Boundary:
    """Input and output tensors of a slice."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class PreparedModel(Protocol):
    """A model file that was checked and optimised, with its layers known."""

    @property
    def format(self) -> SliceFormat:
        """File format of the model's slices."""
        ...

    @property
    def kernels(self) -> Kernels:
        """Kernel settings with which slices compute the same values as the whole model."""
        ...

    @property
    def raw(self) -> bytes:
        """The whole model as it is profiled and sliced; preparing one file twice gives the same bytes."""
        ...

    @property
    def message_and_data(self) -> tuple[bytes, Mapping[str, Data]]:
        """The whole model in parts: its message, and its external data files by name, which may be memory-mapped."""
        ...

    @property
    def types(self) -> Mapping[str, TensorType]:
        """Type of every tensor by name, tensors inside layers included."""
        ...

    @property
    def graph(self) -> LayerGraph:
        """The layer graph, without an input layer."""
        ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors that applications send."""
        ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The tensors that applications receive."""
        ...

    @property
    def hints(self) -> Hints:
        """What the file says beside shapes and names."""
        ...

    def slice_files(
        self, members: Sequence[Layer], boundary: Boundary, shared: Collection[str]
    ) -> dict[FileName, list[Bytes]]:
        """The files of a slice with these layers, each as the list of its chunks.

        `shared` names the weights that layers of several slices may use: each gets chunks of its own.
        """
        ...

    def fingerprint(self, graph: LayerGraph) -> Fingerprint | None:
        """The model's fingerprint with the layers of `graph` (the model's own, or with an input layer), which the
        release key signs; None for formats whose slice files cannot be compared with it."""
        ...


def check_tensor_sizes(tensors: Iterable[TensorSpec], types: Mapping[str, TensorType]) -> None:
    """ModelRefused where an input or output of the model is larger than a request may be (`LIMITS.http_body_bytes`)."""
    for tensor in tensors:
        if types[tensor.name].bytes > LIMITS.http_body_bytes:
            raise ModelRefused(
                f"the tensor {tensor.name[:80]!r} has {types[tensor.name].bytes} bytes, and a request carries at most"
                f" {LIMITS.http_body_bytes}"
            )


WHOLE = "whole"
"""Name of the whole model as one slice."""


def whole_model_chunks(model: PreparedModel) -> dict[FileName, list[Bytes]]:
    """The files of the whole model as one slice, each as the list of its chunks, so that a large model is not joined in
    memory."""
    return model.slice_files(model.graph.layers, Boundary(model.inputs, model.outputs), frozenset())


def whole_model_slice(model: PreparedModel) -> Slice:
    """The manifest's entry for the whole model as one slice, which any slice engine can run; its files are those of
    `whole_model_chunks`."""
    return Slice(WHOLE, model.format, (), model.inputs, model.outputs, kernels=model.kernels)
