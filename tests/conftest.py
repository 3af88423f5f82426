"""Fixtures that several kinds of tests share: databases, short socket paths and a running cloud."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from support.edgesplit_processes import Cloud
from support.postgres import NoPostgres, Postgres

if TYPE_CHECKING:
    from support.s3_server import Bucket, S3Server

SEED = "20261121"

# Containers often set this, and then each of the thousand processes that the tests start compiles every module anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_configure(config: pytest.Config) -> None:
    """The same examples in every run, so that what a change is judged by is the change; `make soak` hunts by a fresh
    seed, and any seed can be given."""
    settings.register_profile("the same", derandomize=True, deadline=None)
    if "EDGESPLIT_SEED" not in os.environ:
        os.environ["EDGESPLIT_SEED"] = SEED
    if os.environ["EDGESPLIT_SEED"] == SEED:
        settings.load_profile("the same")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays to the end, so that no garbage collection needs to look at it."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    """Seen in every run."""
    return f"random graphs, faults and spoiled bytes are those of EDGESPLIT_SEED={os.environ['EDGESPLIT_SEED']}"


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder with a short path, wherever the other temporary folders are: a Unix socket's path has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="es-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A private PostgreSQL; skips with its reason where none is installed."""
    try:
        running = Postgres()
    except NoPostgres as error:
        pytest.skip(str(error))
    yield running
    running.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database: the test runs on SQLite and on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'controller.db'}"
    running: Postgres = request.getfixturevalue("postgres")
    return running.database()


@pytest.fixture(scope="session", name="s3_mock")
def s3_server() -> Iterator[S3Server]:
    """moto's mock of S3; no real store."""
    from support.s3_server import S3Server  # imports moto, which few tests need

    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3_mock_bucket(s3_mock: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket on the mock, which the environment's standard variables name."""
    from support.s3_server import Bucket

    return Bucket(s3_mock, monkeypatch)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """A controller with broker and offload server, as real processes, on ports of their own."""
    running = Cloud(tmp_path_factory.mktemp("cloud"))
    running.start()
    yield running
    running.stop()
