"""Each slice on the engine of its format. An engine is imported when the first slice needs it: 35 MB each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgesplit.errors import ModelRefused
from edgesplit.release import Slice
from edgesplit.runtime import Program, Runtime
from edgesplit.sealed import SliceSource


def _onnx(threads: int) -> Runtime:
    from edgesplit.runtime.onnx import OnnxRuntime

    return OnnxRuntime(threads=threads)


def _tflite(threads: int) -> Runtime:
    from edgesplit.runtime.tflite import LiteRtRuntime

    return LiteRtRuntime(threads=threads)


ENGINES: Mapping[str, Callable[[int], Runtime]] = {"onnx": _onnx, "tflite": _tflite}
"""By slice format; each is made with a number of threads."""


class EngineByFormat:
    """A runtime for slices of every format; all engines use the same number of threads."""

    name = "by-format"

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._engines: dict[str, Runtime] = {}

    def load(self, slice_: Slice, folder: SliceSource) -> Program:
        """The slice on its engine; ModelRefused if that is not installed or cannot take it."""
        if slice_.format not in ENGINES:
            raise ModelRefused(f"slice {slice_.name} has format {slice_.format!r}, which no engine here runs")
        if slice_.format not in self._engines:
            try:
                self._engines[slice_.format] = ENGINES[slice_.format](self.threads)
            except ImportError as error:
                raise ModelRefused(
                    f"slice {slice_.name}: the engine for {slice_.format} is missing: {error}"
                ) from error
        return self._engines[slice_.format].load(slice_, folder)
