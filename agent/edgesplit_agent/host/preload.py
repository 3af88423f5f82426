"""`edgesplit-agent warm`: imports every module and library that an agent may load.

It is the last step of an installation: it proves that the wheels fit this machine before anything is switched to them,
and has Python cache the compiled modules. Modules that are never imported are never compiled, which saves space on a
card, and half a minute on a slow processor.
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
"""Libraries that must load."""
ENGINES = ("onnxruntime", "ai_edge_litert.interpreter", "tflite_runtime.interpreter")
"""Inference engines, of which those that are installed must load."""
EXCLUDED = ("edgesplit.testing",)
"""Prefixes of modules that no device loads."""
OPTIONAL = (
    "edgesplit.runtime.onnx", "edgesplit.runtime.onnx_external_data", "edgesplit.runtime.onnx_merge",
    "edgesplit.runtime.tflite", "edgesplit.observability.metrics_reference",
)  # fmt: skip
"""Modules that import an engine or generate documentation: not every device can load them."""


def preload() -> list[str]:
    """Import everything and return the engines that are installed. UsageError names what cannot be imported."""
    for name in (*LIBRARIES, *_own_modules()):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UsageError(f"{name} does not load on this machine: {error}; build the kit again") from error
    return [engine for engine in ENGINES if _import_engine(engine)]


def _own_modules() -> Iterator[str]:
    """Names of the modules of agent and SDK that a device may load."""
    paths = [edgesplit.__path__, importlib.import_module("edgesplit_agent").__path__]
    for path, package in zip(paths, ("edgesplit", "edgesplit_agent"), strict=True):
        for module in pkgutil.walk_packages(path, f"{package}.", onerror=lambda name: None):
            if not module.name.startswith(EXCLUDED) and module.name not in OPTIONAL:
                yield module.name


def _import_engine(engine: str) -> bool:
    """Whether the engine is installed; UsageError if it is and cannot be imported."""
    top = engine.split(".")[0]
    if importlib.util.find_spec(top) is None:
        return False
    try:
        importlib.import_module(engine)
    except ImportError as error:
        raise UsageError(f"{engine} does not load on this machine: {error}") from error
    return True
