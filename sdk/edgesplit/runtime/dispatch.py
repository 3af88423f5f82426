"""Each slice on the engine of its format. An engine is imported when the first slice needs it: 35 MB each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from edgesplit.crypto.slice_encryption import SliceSource
from edgesplit.errors import EdgeError, ModelRefused
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Program, Runtime
from edgesplit.runtime.options import Setup

log = logging.getLogger(__name__)


def _onnx(setup: Setup) -> Runtime:
    from edgesplit.runtime.onnx import OnnxRuntime

    return OnnxRuntime(setup.threads, setup.optimise, spinning=setup.spinning, providers=setup.providers)


def _tflite(setup: Setup) -> Runtime:
    from edgesplit.runtime.tflite import LiteRtRuntime

    return LiteRtRuntime(threads=setup.threads)


ENGINES: Mapping[str, Callable[[Setup], Runtime]] = {"onnx": _onnx, "tflite": _tflite}
"""By slice format."""


class EngineByFormat:
    """A runtime for slices of every format; all engines share one setup."""

    name = "by-format"

    def __init__(self, threads: int = 1, setup: Setup | None = None) -> None:
        self.setup = setup or Setup(threads=threads)
        self._engines: dict[str, Runtime] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know of how slices run here: an accelerator that is not used, and why."""
        return tuple(note for engine in self._engines.values() for note in getattr(engine, "notes", ()))

    def load(self, slice_: Slice, folder: SliceSource) -> Program:
        """The slice on its engine; ModelRefused if that is not installed or cannot take it."""
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
        """Neighbouring slices as one program that gives `outputs`, where their engine can do that for these."""
        engine = self._engines.get(parts[0][0].format)
        load: Callable[..., Program] | None = getattr(engine, "load_merged", None)
        if load is None:
            return None
        try:
            return load(parts, outputs)
        except EdgeError as error:
            log.info("%s run one by one: %s", ", ".join(one.name for one, _ in parts), error)
            return None
