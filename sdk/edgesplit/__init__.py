"""edgesplit splits a neural network between tiers: some layers run on the device, the others on an offload target.

The public API is `Client`, `AsyncClient`, `InferOptions` and the errors; everything else is imported from its module.
Importing this package loads neither numpy nor a runtime: the clients are imported on first use. This package (the SDK)
is the base of all others and imports none of them: not the partitioner, agent, offload server, controller or CLI.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from edgesplit.errors import (
    Busy,
    DeadlineExceeded,
    Dropped,
    EdgeError,
    InfeasibleLimits,
    InferenceFailed,
    LinkError,
    MalformedMessage,
    ModelRefused,
    NotFound,
    TrustError,
    Unreachable,
    UsageError,
)

if TYPE_CHECKING:
    from edgesplit.client.async_client import AsyncClient
    from edgesplit.client.client import Answer, Client
    from edgesplit.oip.options import InferOptions

__version__ = "0.3.0"

# onnxruntime's official builds send telemetry to their vendor unless this is set before they are loaded. Only data that
# the plan names may leave a device; set ORT_DISABLE_TELEMETRY=0 to opt in.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = [
    "Answer", "AsyncClient", "Busy", "Client", "DeadlineExceeded", "Dropped", "EdgeError", "InfeasibleLimits",
    "InferOptions", "InferenceFailed", "LinkError", "MalformedMessage", "ModelRefused", "NotFound", "TrustError",
    "Unreachable", "UsageError", "__version__",
]  # fmt: skip
_LAZY = {
    "Answer": "edgesplit.client.client", "Client": "edgesplit.client.client",
    "AsyncClient": "edgesplit.client.async_client", "InferOptions": "edgesplit.oip.options",
}  # fmt: skip
"""The module of each name that is imported on first use."""


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
