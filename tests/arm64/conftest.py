"""Tests on real arm64 programs run where they are asked for: they fetch a Debian and take minutes."""

from __future__ import annotations

import fcntl
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from arm64.debian import NotHere
from arm64.emulator import Emulator, find_emulator
from arm64.root import remove_root
from support import REPOSITORY

CACHE = Path(os.environ.get("EDGESPLIT_ARM64_CACHE") or REPOSITORY / "out" / "arm64")


@pytest.fixture(scope="session")
def arm64_cache() -> Iterator[Path]:
    """What is kept between runs: qemu, roots, images. One run at a time uses it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield CACHE.resolve()


@pytest.fixture(scope="session")
def arm64_requested() -> None:
    """Skips the test, with the reason, unless EDGESPLIT_ARM64=1."""
    if os.environ.get("EDGESPLIT_ARM64") != "1":
        pytest.skip("takes minutes and fetches Debian's arm64 programs: `make test-arm64` and `make test-boot` run it")


@pytest.fixture(scope="session")
def emulator(arm64_requested: None, arm64_cache: Path) -> Emulator:
    """qemu-user and the way into its namespace."""
    with taking("emulator"):
        try:
            found = find_emulator(arm64_cache)
            found.check()
        except NotHere as error:
            pytest.fail(str(error))
    return found


@pytest.fixture(scope="module")
def scratch(emulator: Emulator, arm64_cache: Path) -> Iterator[Path]:
    """A folder for what a run makes. Kept beside the cache, so that the next run clears what a killed one left."""
    folder = arm64_cache / "run"
    remove_root(folder, emulator)
    folder.mkdir()
    yield folder
    remove_root(folder, emulator)


@contextmanager
def taking(what: str) -> Iterator[None]:
    """Says how long something took, and how much of that was work of processes that have ended."""
    began, worked = time.monotonic(), _worked()
    yield
    print(f"  {what}: {time.monotonic() - began:.1f} s (processor {_worked() - worked:.1f} s)", flush=True)


def _worked() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime
