"""New releases are ready before anybody asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgesplit.errors import InferenceFailed, TrustError
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Tensor, Tensors
from edgesplit_offload.models.repository import ModelRepository
from edgesplit_offload.models.slice_cache import SliceCache
from edgesplit_offload.models.warm_up import TRIES, WarmUp
from support.handmade_release import CUT, DIGEST, HandmadeRelease

OLD = "a" * 64


class Engine:
    """Counts what it loads and runs; breaks where it is told to."""

    name = "counted"

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.runs = 0
        self.breaks = False

    def load(self, slice_: Slice, folder: object) -> Engine:
        self.loaded.append(slice_.name)
        return self

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        self.runs += 1
        if self.breaks:
            raise InferenceFailed("no noise, please")
        value = next(iter(tensors.values()))
        return {"mid": value, "out": value, "same": value}


class WarmUpHarness:
    """A folder of releases, and a repository that opens the handmade one."""

    def __init__(self, folder: Path, memory: SliceCache | None = None) -> None:
        self.folder = folder / "releases"
        self.folder.mkdir()
        (self.folder / OLD).mkdir()
        self.engine = Engine()
        self.release = HandmadeRelease(folder)
        self.refusals = 0
        self.repository = ModelRepository(self.open, self.engine, memory)
        self.warm_up = WarmUp(self.folder, self.repository)

    def open(self, digest: str) -> HandmadeRelease:
        if self.refusals:
            self.refusals -= 1
            raise TrustError("half of it is here")
        return self.release.open(digest)

    def publish(self) -> None:
        (self.folder / DIGEST).mkdir()


def test_a_new_release_is_loaded_and_run_once(tmp_path: Path) -> None:
    """Each slice once, however many rows share it; releases that were there before are loaded on demand."""
    harness = WarmUpHarness(tmp_path)
    harness.warm_up.check()
    assert harness.engine.loaded == []
    harness.publish()
    harness.warm_up.check()
    assert sorted(harness.engine.loaded) == ["s01-head", "s02-tail"]
    assert harness.repository.model(CUT).half.is_loaded
    runs = harness.engine.runs
    assert runs
    harness.warm_up.check()
    assert harness.engine.runs == runs


def test_a_release_that_is_still_being_written_is_tried_again(tmp_path: Path) -> None:
    """A few times; afterwards it is loaded on demand."""
    harness = WarmUpHarness(tmp_path)
    harness.publish()
    harness.refusals = 2
    for _ in range(3):
        assert harness.engine.loaded == []
        harness.warm_up.check()
    assert harness.engine.loaded
    other = WarmUpHarness(tmp_path / "other") if (tmp_path / "other").mkdir() is None else harness
    other.publish()
    other.refusals = TRIES
    for _ in range(TRIES + 3):
        other.warm_up.check()
    assert other.engine.loaded == []


def test_warming_up_evicts_nothing(tmp_path: Path) -> None:
    """Where the memory for models is too small, it stays for those that are requested."""
    harness = WarmUpHarness(tmp_path, SliceCache(1))
    harness.publish()
    harness.warm_up.check()
    assert harness.engine.loaded == []


def test_a_model_that_fails_on_noise_stays_loaded(tmp_path: Path) -> None:
    """Its error is reported to the first request."""
    harness = WarmUpHarness(tmp_path)
    harness.engine.breaks = True
    harness.publish()
    harness.warm_up.check()
    assert sorted(harness.engine.loaded) == ["s01-head", "s02-tail"]


def test_a_removed_release_is_closed_and_its_memory_freed(tmp_path: Path) -> None:
    """No model of it is listed any more; if the release comes back, it is warmed up again."""
    memory = SliceCache()
    harness = WarmUpHarness(tmp_path, memory)
    harness.publish()
    harness.warm_up.check()
    assert memory.bytes and harness.repository.models()
    (harness.folder / DIGEST).rmdir()
    harness.warm_up.check()
    assert memory.bytes == 0 and harness.repository.models() == {}
    harness.publish()
    harness.warm_up.check()
    assert memory.bytes and harness.repository.model(CUT).half.is_loaded


@pytest.mark.parametrize("there", [True, False])
def test_a_server_without_a_folder_warms_nothing(tmp_path: Path, there: bool) -> None:
    """And ends at once."""
    folder = tmp_path if there else tmp_path / "nowhere"
    warming = WarmUp(folder, WarmUpHarness(tmp_path).repository, interval_s=60.0)
    warming.start()
    warming.stop()
