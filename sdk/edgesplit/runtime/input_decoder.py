"""The input slice: decodes camera or microphone bytes into the model's first tensor. It has no files; the input spec
defines it."""

from __future__ import annotations

from edgesplit.errors import UsageError
from edgesplit.input_spec import FRAME, InputSpec, prepare
from edgesplit.lazy_import import np
from edgesplit.runtime import Tensor, Tensors


class InputProgram:
    """Runs an input spec. All tiers use this code, so that they compute the same tensor."""

    def __init__(self, spec: InputSpec) -> None:
        self.spec = spec

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        """Decode `frame` into the model's first tensor; UsageError where it is not a valid frame."""
        frame = tensors.get(FRAME)
        if frame is None or frame.dtype != np.uint8 or frame.ndim != 1:
            raise UsageError(f"the input {FRAME!r} must be the frame's bytes: UINT8, one dimension")
        return {self.spec.tensor: prepare(self.spec, np.ascontiguousarray(frame).data)}
