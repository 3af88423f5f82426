"""Makes compressed variants of a model, each as a file, in a confined child process (`maker_child`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import msgspec
import onnx

from edgesplit.errors import ModelRefused
from edgesplit_partitioner.compression.maker_job import GIVEN_FILE, START_FILE, MakeJob, MakeResult, MakerStart
from edgesplit_partitioner.ir.chunking import Data
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.onnx_format import archive
from edgesplit_partitioner.onnx_format.model import settled_model
from edgesplit_partitioner.sandbox.child_process import ChildProcess
from edgesplit_partitioner.sandbox.limits import measurement_limits

CHILD: Final = "edgesplit_partitioner.compression.maker_child"
LIMIT_S: Final = 1800.0
"""Time limit of one variant, and of the processor seconds of all together on each core."""
LARGEST_MESSAGE_BYTES: Final = 2**31 - 2**20
"""Bytes of an ONNX message with all of its weights that quantisers can take."""


class Maker:
    """Makes variants of one model; its child process is killed on exit."""

    def __init__(
        self,
        folder: Path,
        raw: Data,
        prepared: PreparedModel,
        bindings: Mapping[str, int],
        samples: Sequence[dict[str, str]],
    ) -> None:
        self._folder = folder
        format_: Literal["onnx", "tflite"] = "onnx" if prepared.format == "onnx" else "tflite"
        given = _before_optimisation(raw, bindings) if format_ == "onnx" else prepared.raw
        (folder / GIVEN_FILE).write_bytes(given)
        (folder / START_FILE).write_bytes(msgspec.json.encode(MakerStart(format_, tuple(samples))))
        limits = measurement_limits(len(given), folder, LIMIT_S)
        self._child = ChildProcess(CHILD, folder, limits=limits, runtime="the quantiser")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._child.stop()

    def make(self, job: MakeJob) -> tuple[Path, MakeResult]:
        """The variant's file, and what it is; ModelRefused where the method does not apply to the model."""
        result = msgspec.json.decode(self._child.ask(msgspec.json.encode(job), LIMIT_S), type=MakeResult)
        if result.refused:
            raise ModelRefused(result.refused)
        return self._folder / job.file, result


def _before_optimisation(raw: Data, bindings: Mapping[str, int]) -> bytes:
    """The ONNX model with all lengths settled and nothing optimised, as one message."""
    model, data, _ = settled_model(raw, bindings)
    for tensor in model.graph.initializer:
        if archive.is_external(tensor):
            location, offset, length = archive.external_location(tensor)
            content = data[location][offset : None if length < 0 else offset + length]
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT
            tensor.raw_data = bytes(content)
    if model.ByteSize() > LARGEST_MESSAGE_BYTES:
        raise ModelRefused("the model is larger than 2 GB, which is more than onnxruntime's quantiser takes")
    message: bytes = model.SerializeToString()
    return message
