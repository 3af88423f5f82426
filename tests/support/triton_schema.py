"""Triton's schema of model configurations."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def triton_schema() -> Any:
    """Triton's own, as its client carries it; the rest of the client's gRPC half needs packages that are not here."""
    found = importlib.util.find_spec("tritonclient")
    assert found is not None and found.submodule_search_locations
    file = Path(found.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("triton_model_config_pb2", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCHEMA = triton_schema()
