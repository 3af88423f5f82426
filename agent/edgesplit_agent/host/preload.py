"""`edgesplit-agent warm`: everything that an agent may load is loaded once.

The last step of an installation: it proves that the wheels fit this machine before anything is switched to them, and
has Python keep what it compiles. What is never loaded is never compiled: that saves room on a card, and a slow
processor half a minute.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator

import edgesplit
from edgesplit.errors import UsageError

LIBRARIES = (
    "numpy", "numpy.random", "numpy.linalg", "PIL.JpegImagePlugin", "PIL.PngImagePlugin", "zstandard",
    "paho.mqtt.client", "cryptography.x509", "tuf.ngclient", "securesystemslib.signer", "prometheus_client",
    "prometheus_client.openmetrics.exposition",
)  # fmt: skip
ENGINES = ("onnxruntime", "ai_edge_litert.interpreter", "tflite_runtime.interpreter")
"""Those that are there."""
NOT_HERE = ("edgesplit.testing",)
OPTIONAL = (
    "edgesplit.runtime.onnx", "edgesplit.runtime.onnx_external_data", "edgesplit.runtime.onnx_merge",
    "edgesplit.runtime.tflite", "edgesplit.observability.metrics_reference",
)  # fmt: skip
"""Our modules that import an engine, or write the documentation: not every device can load them."""


def warm() -> list[str]:
    """Load it all; the engines that are there. UsageError names what does not load."""
    for name in (*LIBRARIES, *_own()):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UsageError(f"{name} does not load on this machine: {error}; make the kit anew") from error
    return [engine for engine in ENGINES if _loads(engine)]


def _own() -> Iterator[str]:
    """Our modules, as far as a device needs them."""
    rooms = [edgesplit.__path__, importlib.import_module("edgesplit_agent").__path__]
    for path, room in zip(rooms, ("edgesplit", "edgesplit_agent"), strict=True):
        for found in pkgutil.walk_packages(path, f"{room}.", onerror=lambda name: None):
            if not found.name.startswith(NOT_HERE) and found.name not in OPTIONAL:
                yield found.name


def _loads(engine: str) -> bool:
    top = engine.split(".")[0]
    if importlib.util.find_spec(top) is None:
        return False
    try:
        importlib.import_module(engine)
    except ImportError as error:
        raise UsageError(f"{engine} does not load on this machine: {error}") from error
    return True
