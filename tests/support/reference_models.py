"""The trained reference models, which are not part of the project: their folder, and the skip where it is absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import REPOSITORY

FOLDER = Path(os.environ.get("EDGESPLIT_MODELS") or REPOSITORY.parent / "shared" / "models")


def reference_file(*parts: str) -> Path:
    """A file or folder below the models' folder. Every test that needs one is skipped here, so that a run without the
    models reports them in one line."""
    path = FOLDER.joinpath(*parts)
    if not path.exists():
        pytest.skip("no trained reference models: set EDGESPLIT_MODELS to their folder")
    return path
