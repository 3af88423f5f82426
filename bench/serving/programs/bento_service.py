"""The suffix behind BentoML: a raw body in and out, on an application mounted in its service, in worker processes."""

from __future__ import annotations

import json
import os

import bentoml
import numpy as np
import onnxruntime
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

SHAPE = json.loads(os.environ["SUFFIX_SHAPE"])
_options = onnxruntime.SessionOptions()
_options.intra_op_num_threads = _options.inter_op_num_threads = 1
_session = onnxruntime.InferenceSession(os.environ["SUFFIX"], _options, providers=["CPUExecutionProvider"])


async def infer(request: Request) -> Response:
    """One inference."""
    tensor = np.frombuffer(await request.body(), np.float32).reshape(SHAPE)
    (out,) = _session.run(None, {"x": tensor})
    return Response(out.tobytes(), media_type="application/octet-stream")


app = Starlette(routes=[Route("/infer", infer, methods=["POST"])])


@bentoml.asgi_app(app, path="/raw")
@bentoml.service(workers=int(os.environ["SUFFIX_WORKERS"]), traffic={"timeout": 60})
class Suffix:
    """The service class that BentoML requires."""
