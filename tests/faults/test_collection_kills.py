"""A controller is killed while it collects garbage: at each change of a file and each commit, by SIGKILL."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sqlalchemy import event

from edgesplit.release_store import remove_leftovers
from edgesplit_controller.storage.leases import free_all_leases
from support.retention_harness import RetentionHarness, check_whole, database_in

KILLS = int(os.environ.get("EDGESPLIT_COLLECTION_KILLS", "8"))
"""At so many of the operations, spread over all of them; `make soak` kills at each."""
CHANGES = ("unlink", "rename", "replace", "rmdir")


def test_a_collection_that_is_killed_at_any_operation_breaks_nothing_and_is_completed(tmp_path: Path) -> None:
    """One release runs, one is what a rollback returns to, the others are unused, one of them another cut; a model was
    removed. After each kill, what rows refer to is whole: blobs, signed lists, the offload server's copies. The next
    collection deletes what is left, and what stays is what stays without a kill."""
    made = RetentionHarness(tmp_path / "made")
    made.device("cam-1")
    made.runs(made.release("conv")[0], "cam-1")
    made.release("flatten")
    made.release("pool", recut=True)
    made.runs(made.release("cloud")[0], "cam-1")
    made.push(3, "other")
    made.removal.remove_model("other")
    made.database.close()

    undisturbed = _copy(made.folder, tmp_path / "undisturbed")
    total = _collect(undisturbed, kill_at=None)
    left = _left(undisturbed)
    assert total > KILLS and len(left["releases"]) == 2
    for number in range(0, total, max(1, total // KILLS)):
        folder = _copy(made.folder, tmp_path / str(number))
        _collect(folder, kill_at=number)
        check_whole(folder)
        _restart(folder)
        check_whole(folder)
        _collect(folder, kill_at=None)
        assert _left(folder) == left, f"killed at operation {number} of {total}"
        shutil.rmtree(folder)


def _copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def _collect(folder: Path, *, kill_at: int | None) -> int:
    """Collect in a process of its own, which is killed before the operation of that number; how many there were."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_child, args=(folder, kill_at, sender))
    child.start()
    child.join(120)
    assert child.exitcode == (0 if kill_at is None else -signal.SIGKILL)
    return int(receiver.recv()) if kill_at is None else 0


def _child(folder: Path, kill_at: int | None, sender: Connection) -> None:
    world, count = RetentionHarness(folder), 0
    world.ticks = 100_000  # later than everything that was made

    def tick(*_: object) -> None:
        nonlocal count
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tick()
            return real(*arguments, **options)

        return call

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    event.listen(world.database.engine, "commit", tick)
    world.collector().collect()
    sender.send(count)


def _restart(folder: Path) -> None:
    """What the next start of a controller does first."""
    database = database_in(folder)
    free_all_leases(database)
    database.close()
    remove_leftovers(folder / "offload")


def _left(folder: Path) -> dict[str, list[str]]:
    """Every release, and every file that a collection may delete."""
    world = RetentionHarness(folder)
    files = [*(folder / "offload").rglob("*"), *(folder / "tuf" / "targets").rglob("*.json")]
    left = {
        "releases": world.releases(), "blobs": sorted(world.stored()),
        "files": sorted(file.relative_to(folder).as_posix() for file in files),
    }  # fmt: skip
    world.database.close()
    return left
