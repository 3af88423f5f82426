"""The input slice: camera or microphone bytes become the model's first tensor. No files; the spec is the program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgesplit.errors import UsageError
from edgesplit.input_spec import FRAME, InputSpec, prepare
from edgesplit.lazy_import import later
from edgesplit.runtime import Tensor, Tensors

if TYPE_CHECKING:
    import numpy as np
else:
    np = later("numpy")


class InputProgram:
    """Runs an input spec; the same code on both tiers, so that both see the same tensor."""

    def __init__(self, spec: InputSpec) -> None:
        self.spec = spec

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        """The model's first tensor from `frame`; UsageError if that is no such frame."""
        frame = tensors.get(FRAME)
        if frame is None or frame.dtype != np.uint8 or frame.ndim != 1:
            raise UsageError(f"the input {FRAME!r} must be the frame's bytes: UINT8, one dimension")
        return {self.spec.tensor: prepare(self.spec, np.ascontiguousarray(frame).data)}
