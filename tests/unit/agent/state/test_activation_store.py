"""The activation state follows what is on disk, unless a caller can go on without the write."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgesplit_agent.state import slots
from edgesplit_agent.state.activation_store import ActivationStore
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_agent.state.slots import Current, Slots


class FullFolder(DataFolder):
    """A data folder on a disk without room."""

    writes = 0

    def write_current(self, current: Current) -> None:
        self.writes += 1
        raise OSError(28, "No space left on device")


def test_change_that_the_disk_refuses_is_not_adopted(tmp_path: Path) -> None:
    """The state in memory is what the next start would find."""
    store = ActivationStore(FullFolder(tmp_path))
    with pytest.raises(OSError, match="No space"):
        store.update(slots.with_activated, "tiny", "a" * 64)
    assert store.current == Current()


def test_change_without_a_write_is_adopted_if_the_caller_allows_it(tmp_path: Path) -> None:
    """A start is counted in memory where the disk is full."""
    store = ActivationStore(FullFolder(tmp_path))
    store.update_best_effort(slots.with_start_counted(Current()), "this start is not counted")
    assert store.current.unhealthy_starts == 1


def test_unchanged_state_is_not_written(tmp_path: Path) -> None:
    """A step that changes nothing does not wear the card."""
    folder = FullFolder(tmp_path)
    ActivationStore(folder).update(slots.with_start_healthy)
    assert folder.writes == 0


def test_change_is_on_disk_when_it_is_adopted(tmp_path: Path) -> None:
    """Another process reads the same state."""
    store = ActivationStore(DataFolder(tmp_path))
    store.update(slots.with_activated, "tiny", "a" * 64)
    assert DataFolder(tmp_path).read_current() == store.current
    assert store.current.models == {"tiny": Slots(trial="a" * 64)}
