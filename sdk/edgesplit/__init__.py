"""edgesplit puts a neural network where it runs best: some layers on the device, the rest beyond the link.

Users import `Client`, `AsyncClient` and the errors from here; everything else is imported from its module. Importing
this package loads neither numpy nor a runtime: the clients are fetched on first use.
"""

from __future__ import annotations

import os
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
    UsageError,
)

if TYPE_CHECKING:
    from edgesplit.client.async_client import AsyncClient
    from edgesplit.client.client import Answer, Client
    from edgesplit.oip.options import Wishes

__version__ = "0.1.0"

# onnxruntime's official builds report to their maker unless this is set before they are loaded. Nothing leaves a device
# that its plan does not name; who wants those reports says ORT_DISABLE_TELEMETRY=0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = [
    "Answer",
    "AsyncClient",
    "Busy",
    "Client",
    "DeadlineExceeded",
    "Dropped",
    "EdgeError",
    "InfeasibleLimits",
    "InferenceFailed",
    "LinkError",
    "MalformedMessage",
    "ModelRefused",
    "NotFound",
    "TrustError",
    "UsageError",
    "Wishes",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in ("Answer", "Client"):
        from edgesplit.client import client

        return getattr(client, name)
    if name == "AsyncClient":
        from edgesplit.client import async_client

        return async_client.AsyncClient
    if name == "Wishes":
        from edgesplit.oip import options

        return options.Wishes
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
