"""The suffix behind KServe's model server: `kserve_server.py MODEL HTTP_PORT GRPC_PORT THREADS`."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import onnxruntime
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer


class Suffix(Model):
    """The model for KServe; it runs in a pool of threads, so that the event loop stays free."""

    def __init__(self, path: str, threads: int) -> None:
        super().__init__("suffix")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._pool = ThreadPoolExecutor(threads)
        self.ready = True

    async def predict(self, payload: InferRequest, headers: dict | None = None, **_: object) -> InferResponse:
        """Run one inference."""
        tensor = payload.inputs[0].as_numpy()
        loop = asyncio.get_running_loop()
        (out,) = await loop.run_in_executor(self._pool, lambda: self._session.run(None, {"x": tensor}))
        output = InferOutput("y", list(out.shape), "FP32")
        output.set_data_from_numpy(out, binary_data=True)
        wanted = {"use_binary_outputs": payload.use_binary_outputs, "requested_outputs": payload.request_outputs}
        return InferResponse(payload.id, "suffix", [output], **wanted)


if __name__ == "__main__":
    model, http_port, grpc_port, threads = sys.argv[1], *map(int, sys.argv[2:5])
    sys.argv[1:] = []
    ModelServer(http_port=http_port, grpc_port=grpc_port, enable_docs_url=False).start([Suffix(model, threads)])
