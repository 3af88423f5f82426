"""The suffix behind LitServe: `litserve_server.py MODEL PORT WORKERS SHAPE`. Its bodies are JSON: base64 inside."""

from __future__ import annotations

import base64
import json
import sys

import litserve
import numpy as np
import onnxruntime


class Suffix(litserve.LitAPI):
    """The interface that LitServe requires."""

    def setup(self, device: str) -> None:
        """Open a session with one thread."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
        self._shape = json.loads(sys.argv[4])

    def decode_request(self, request: dict) -> np.ndarray:
        """Decode the tensor of a request."""
        return np.frombuffer(base64.b64decode(request["x"]), np.float32).reshape(self._shape)

    def predict(self, tensor: np.ndarray) -> np.ndarray:
        """Run one inference."""
        return self._session.run(None, {"x": tensor})[0]

    def encode_response(self, output: np.ndarray) -> dict:
        """Encode the response."""
        return {"y": base64.b64encode(output.tobytes()).decode()}


if __name__ == "__main__":
    server = litserve.LitServer(Suffix(), accelerator="cpu", workers_per_device=int(sys.argv[3]), timeout=60)
    server.run(port=int(sys.argv[2]), host="127.0.0.1", generate_client_file=False, log_level="warning")
