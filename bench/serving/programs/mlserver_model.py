"""The suffix behind MLServer, in as many worker processes as its settings say."""

from __future__ import annotations

import numpy as np
import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Suffix(MLModel):
    """The interface that MLServer requires."""

    async def load(self) -> bool:
        """Open a session with one thread."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = self.settings.parameters.uri
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Run one inference."""
        tensor = NumpyCodec.decode_input(payload.inputs[0]).astype(np.float32, copy=False)
        (out,) = self._session.run(None, {"x": tensor})
        return InferenceResponse(id=payload.id, model_name=self.name, outputs=[NumpyCodec.encode_output("y", out)])
