"""Dispatch by format: each slice runs on the engine of its format. An engine is imported when the first slice needs it,
because each takes 35 MB."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from edgesplit.crypto.slice_encryption import SliceSource
from edgesplit.errors import EdgeError, ModelRefused
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Program, Runtime
from edgesplit.runtime.options import EngineOptions

log = logging.getLogger(__name__)


def _onnx(setup: EngineOptions) -> Runtime:
    from edgesplit.runtime.onnx import OnnxRuntime

    return OnnxRuntime(setup.threads, setup.optimise, spinning=setup.spinning, providers=setup.providers)


def _tflite(setup: EngineOptions) -> Runtime:
    from edgesplit.runtime.tflite import LiteRtRuntime

    return LiteRtRuntime(threads=setup.threads)


ENGINES: Mapping[str, Callable[[EngineOptions], Runtime]] = {"onnx": _onnx, "tflite": _tflite}
"""Factories of the engines by slice format."""


class DispatchingRuntime:
    """Runtime for slices of every format; all engines share the same options."""

    name = "by-format"

    def __init__(self, threads: int = 1, setup: EngineOptions | None = None) -> None:
        self.setup = setup or EngineOptions(threads=threads)
        self._engines: dict[str, Runtime] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for operators about how slices run here: accelerators that are not used, and why."""
        return tuple(note for engine in self._engines.values() for note in getattr(engine, "notes", ()))

    def load(self, slice_: Slice, folder: SliceSource) -> Program:
        """Load the slice on its engine; ModelRefused where that is not installed or does not support the slice."""
        if slice_.format not in ENGINES:
            raise ModelRefused(f"slice {slice_.name} has format {slice_.format!r}, which no engine here runs")
        if slice_.format not in self._engines:
            try:
                self._engines[slice_.format] = ENGINES[slice_.format](self.setup)
            except ImportError as error:
                raise ModelRefused(
                    f"slice {slice_.name}: the engine for {slice_.format} is missing: {error}"
                ) from error
        return self._engines[slice_.format].load(slice_, folder)

    def load_merged(self, parts: Sequence[tuple[Slice, SliceSource]], outputs: Collection[str]) -> Program | None:
        """Load neighbouring slices as one program with these outputs; None where their engine cannot merge them."""
        engine = self._engines.get(parts[0][0].format)
        load: Callable[..., Program] | None = getattr(engine, "load_merged", None)
        if load is None:
            return None
        try:
            return load(parts, outputs)
        except EdgeError as error:
            log.info("%s run one by one: %s", ", ".join(slice_.name for slice_, _ in parts), error)
            return None
