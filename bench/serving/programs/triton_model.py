"""The suffix behind Triton's Python backend: requests that its batcher put together are run as one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as backend


class TritonPythonModel:
    """The interface that Triton's Python backend requires."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open a session with one thread; the server creates as many instances as its configuration says."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._batches = json.loads(args["model_config"])["max_batch_size"] > 1

    def execute(self, requests: list) -> list:
        """The responses to a batch of requests, in order."""
        tensors = [backend.get_input_tensor_by_name(one, "x").as_numpy() for one in requests]
        if not self._batches or len(tensors) == 1:
            outputs = [self._session.run(None, {"x": one})[0] for one in tensors]
        else:
            (whole,) = self._session.run(None, {"x": np.concatenate(tensors)})
            outputs = np.split(whole, np.cumsum([len(one) for one in tensors])[:-1])
        return [backend.InferenceResponse([backend.Tensor("y", one)]) for one in outputs]
