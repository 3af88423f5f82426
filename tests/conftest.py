"""Fixtures that several kinds of tests share: the reference models' folder, and a running cloud."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import Cloud

REPOSITORY = Path(__file__).parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """One fresh seed for all workers of a run, unless one was given."""
    os.environ.setdefault("EDGESPLIT_SEED", str(random.SystemRandom().randrange(10**9)))


def pytest_report_header(config: pytest.Config) -> str:
    """Seen in every run."""
    return f"plans are tried on random graphs from EDGESPLIT_SEED={os.environ['EDGESPLIT_SEED']}"


@pytest.fixture(scope="session")
def reference_models() -> Path:
    """The folder of trained reference models; skips with its reason where there is none."""
    folder = Path(os.environ.get("EDGESPLIT_MODELS") or REPOSITORY.parent / "shared" / "models")
    if not (folder / "models").is_dir():
        pytest.skip(f"no reference models in {folder}; set EDGESPLIT_MODELS to their folder")
    return folder


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """A controller with broker and offload server, as real processes, on ports of their own."""
    running = Cloud(tmp_path_factory.mktemp("cloud"))
    running.start()
    yield running
    running.stop()
