"""The whole model in one session: the reference for every split answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class WholeModel:
    """The registry's optimised model, without further optimisation, on one thread, as slices run it in exact mode."""

    def __init__(self, raw: bytes) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session: Any = onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name

    def run(self, tensor: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """The first output."""
        output: npt.NDArray[np.float32] = self._session.run(None, {self._input: tensor})[0]
        return output
