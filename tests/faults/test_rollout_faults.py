"""Rollouts to a fleet of 100 under faults: bad releases, silence, newer releases meanwhile, operators at once, kills at
every write of the database, and yesterday's backup (reference faults F1 to F7).

The devices are stand-ins at the level of messages (`support.rollout_harness`): they keep a counter of their own, as
agents do. `test_rollout_simulated` has 200 with the real agents' decisions.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import event

from edgesplit_controller.backup.rows import export_rows, import_rows
from edgesplit_controller.storage.tables.core import Desired, Device
from support.rollout_harness import BAD, NEW, NEWER, OLD, RolloutHarness, StandIn

SEED = int(os.environ.get("EDGESPLIT_SEED", "1"))
KILLS = int(os.environ.get("EDGESPLIT_ROLLOUT_KILLS", "6"))
"""At so many of the writes, spread over all of them; `make soak` kills at each."""
FLEET = [f"cam-{number:03d}" for number in range(100)]


@pytest.fixture
def world(tmp_path: Path) -> RolloutHarness:
    made = RolloutHarness(tmp_path)
    made.enrol(*FLEET, group="cams")
    return made


def test_a_rollout_stops_in_the_stage_in_which_devices_fail(world: RolloutHarness) -> None:
    """F1: every failing device is back by itself and by our word, those that run it well keep it, the last stage never
    begins."""
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    number = world.deploy(NEW, stages=("5%", "50%"), abort_when_failed="5%", rate="600/min")
    canaries = {name for name, one in world.members(number).items() if one["stage"] == 1}
    frail = set(rng.sample(sorted(set(FLEET) - canaries), 20))
    for name in frail:
        world.fleet[name].mood = "frail"
    world.settle(most=200)
    shown = world.shown(number)
    assert shown["state"] == "failed" and shown["stage"] == 2 and canaries <= _running(world, NEW)
    members = world.members(number)
    assert all(one["state"] == "skipped" for one in members.values() if one["stage"] == 3)
    failed = {name for name, one in members.items() if one["counts"]}
    assert failed and failed <= frail and not failed & _running(world, NEW)
    assert {world.fleet[name].wanted for name in failed} == {OLD} and not world.broken()


def _running(world: RolloutHarness, release: str) -> set[str]:
    return {name for name, runs in world.running().items() if runs == release}


def test_devices_that_are_off_do_not_delay_a_rollout(world: RolloutHarness) -> None:
    """F2: a fifth of the fleet is off. The rollout ends, the others run the release, and the next one goes the same
    way; who comes back runs the newest."""
    silent = random.Random(SEED).sample(FLEET, 20)
    print(f"seed {SEED}")
    for name in silent:
        world.fleet[name].mood = "silent"
    number = world.deploy(NEW, stages=("10%",), device_timeout="10m", abort_when_failed="5%")
    world.settle(seconds=60.0)
    assert world.state(number) == "finished" and world.shown(number)["states"]["timed out"] == 20
    assert len(_running(world, NEW)) == 80
    newer = world.deploy(NEWER, device_timeout="10m")
    for name in silent:
        world.fleet[name].mood = "good"
    world.state_all()
    world.settle(seconds=60.0)
    assert world.state(newer) == "finished" and _running(world, NEWER) == set(FLEET)
    assert not any(NEW in world.fleet[name].ran for name in silent) and not world.broken()


def test_a_newer_release_supersedes_a_rollout_in_progress(world: RolloutHarness) -> None:
    """F3: while N goes out in stages and at a rate, N+1 comes: every device runs N+1 in the end, from whatever it was
    doing, and none hears of N any more."""
    number = world.deploy(NEW, stages=("50%",), rate="600/min")
    for _ in range(4):
        world.work()
        world.step()
    heard_of_it = {name for name, one in world.fleet.items() if one.wanted == NEW}
    assert 0 < len(heard_of_it) < 100
    newer = world.deploy(NEWER, stages=("10%",), rate="6000/min")
    world.settle(most=200)
    assert world.state(newer) == "finished" and _running(world, NEWER) == set(FLEET)
    assert {name for name, one in world.fleet.items() if NEW in one.ran} <= heard_of_it
    assert world.shown(number)["superseded_by"] == newer and not world.broken()


def test_concurrent_deployments_leave_every_device_with_the_newest(database_url: str, tmp_path: Path) -> None:
    """F5: four threads deploy to overlapping halves of a fleet while two loops step. One wins by rule: what a device
    shall run in the end is of the newest rollout that names it."""
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    world, fleet = RolloutHarness(tmp_path, url=database_url), FLEET[:30]
    world.enrol(*fleet)
    named: dict[int, list[str]] = {}
    halves = [(rng.sample(fleet, 15), rng.choice([NEW, NEWER])) for _ in range(4)]
    ended = threading.Event()

    def operator(names: list[str], release: str) -> None:
        named[world.deploy(release, names)] = names

    def loop() -> None:
        while not ended.wait(0.01):
            world.rollouts.step_all()

    operators = [threading.Thread(target=operator, args=half) for half in halves]
    loops = [threading.Thread(target=loop) for _ in range(2)]
    for thread in (*operators, *loops):
        thread.start()
    for thread in operators:
        thread.join()
    ended.set()
    for thread in loops:
        thread.join()
    world.state_all()
    world.settle()
    concerned = set().union(*named.values())
    newest = {name: max(number for number, names in named.items() if name in names) for name in concerned}
    releases = {number: world.shown(number)["release"] for number in named}
    with world.database.read() as session:
        governs = {row.device: row.deployment for row in session.query(Desired) if row.device in newest}
    assert governs == newest
    assert all(world.running()[name] == releases[number] for name, number in newest.items())


# ---- kills at every write, and backups ------------------------------------------------------------------------------

SMALL = [f"cam-{number}" for number in range(4)]


class PersistentFleetHarness(RolloutHarness):
    """A small fleet whose devices keep their state when the controller's process ends."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "fleet.json"
        super().__init__(folder)
        if self._file.exists():
            self.fleet = msgspec.json.decode(self._file.read_bytes(), type=dict[str, StandIn])

    def keep(self) -> None:
        """Write the devices' state to a file, as their own disks do."""
        part = self._file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(self.fleet))
        part.replace(self._file)

    def announce(self, names: object) -> None:
        super().announce(names)  # type: ignore[arg-type]
        self.keep()

    def speak(self) -> None:
        self.keep()
        super().speak()


def go_on(world: RolloutHarness) -> None:
    """An operator's evening: a bad release in stages, a good one before that has ended, and a rollback. What was asked
    for already is not asked for again."""
    releases = [one["release"] for one in world.rollouts.list_views(10)]
    if not releases:
        world.deploy(BAD, stages=("50%",), abort_when_failed="1")
        world.settle(most=2)
    if NEW not in releases:
        world.deploy(NEW, stages=("1", "50%"), device_timeout="10m")
    world.settle()
    newest = world.rollouts.list_views(10)[-1]
    if newest["state"] == "finished":
        world.rollouts.command(newest["id"], "rollback")
    world.settle()


def die_at(folder: Path, write: int) -> None:
    """In a process of its own: SIGKILL just before the commit of that number, or (odd ones) just after it."""
    world = PersistentFleetHarness(folder)
    seen = [0]

    def passed(*_: object) -> None:
        seen[0] += 1
        if seen[0] == write:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(world.database._engine, "commit", passed)
    event.listen(world.database._writers, "after_commit", passed)
    go_on(world)
    (folder / "writes").write_text(str(seen[0]))


def _in_a_process(work: Callable[[Path, int], None], folder: Path, write: int) -> int:
    """Its exit code."""
    child = multiprocessing.get_context("fork").Process(target=work, args=(folder, write))
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """The folder of a controller before the evening begins, closed."""
    folder = tmp_path / "first"
    folder.mkdir()
    world = PersistentFleetHarness(folder)
    world.enrol(*SMALL)
    world.keep()
    world.database.close()
    return folder


def test_a_controller_killed_at_any_commit_continues_its_rollouts(shelf: Path, tmp_path: Path) -> None:
    """F4: SIGKILL before or after a commit, then another start: the rollouts end, every device runs well what it ran at
    first, and none was ever told to go below its counter."""
    whole = tmp_path / "whole"
    shutil.copytree(shelf, whole)
    assert _in_a_process(die_at, whole, 0) == 0
    writes = int((whole / "writes").read_text())
    assert writes > 30
    stride = max(1, writes // KILLS)
    for write in range(1 + SEED % stride, writes + 1, stride):
        folder = tmp_path / f"write-{write}"
        shutil.copytree(shelf, folder)
        assert _in_a_process(die_at, folder, write) == -signal.SIGKILL, f"write {write} of {writes}"
        world = PersistentFleetHarness(folder)
        world.now += 30.0
        world.state_all()
        world.speak()
        go_on(world)
        assert not world.broken() and not world.active, f"write {write} of {writes}"
        assert [one["state"] for one in world.rollouts.list_views(10)][-1] == "rolled back", (
            f"write {write} of {writes}"
        )
        assert set(world.running().values()) == {OLD}, f"write {write} of {writes}"
        assert all(one.wanted == one.runs for one in world.fleet.values()), f"write {write} of {writes}"
        world.database.close()


def test_a_restored_old_backup_rolls_no_device_back(tmp_path: Path) -> None:
    """F4: the database of a rollout's middle is restored a day later, after other releases went out. Devices that know
    more than it are left alone; the rollout waits for an operator, who lets it go on: the devices that it still has to
    tell follow, under higher counters than they knew."""
    fleet = FLEET[:12]
    world = RolloutHarness(tmp_path)
    world.enrol(*fleet)
    older = world.deploy(NEW, stages=("25%", "50%"), device_timeout="10m")
    world.settle(until=lambda: world.shown(older)["stage"] == 2)
    queued = {name for name, one in world.members(older).items() if one["state"] == "queued"}
    backup = list(export_rows(f"sqlite:///{tmp_path / 'controller.db'}"))
    world.settle()
    world.deploy(NEWER)
    world.settle()
    assert _running(world, NEWER) == set(fleet)
    restored = f"sqlite:///{tmp_path / 'restored.db'}"
    import_rows(restored, backup, world.now + 86_400.0, replace=False)

    again = RolloutHarness(tmp_path, url=restored)
    again.fleet, again.now = world.fleet, world.now + 86_400.0
    again.rollouts.extend_timeouts_after_outage()
    again.state_all()
    again.speak()
    again.step()
    assert again.state(older) == "paused" and _running(again, NEWER) == set(fleet)
    again.rollouts.command(older, "resume")
    again.settle(seconds=61.0)
    assert again.state(older) == "finished" and queued <= _running(again, NEW)
    assert not again.broken()


def test_a_database_copied_back_without_restore_is_detected(tmp_path: Path) -> None:
    """Nobody said that it was restored: devices obey nothing below their counter, say what they know, and are told
    anew; one that claims to know the far future is not believed."""
    world = RolloutHarness(tmp_path)
    world.enrol(*FLEET[:5])
    _copy(tmp_path / "controller.db", tmp_path / "yesterday.db")
    world.now += 86_400.0
    world.deploy(NEW)
    world.settle()
    world.database.close()
    _copy(tmp_path / "yesterday.db", tmp_path / "controller.db")

    again = RolloutHarness(tmp_path)
    again.fleet, again.now = world.fleet, world.now
    liar = again.fleet[FLEET[0]]
    liar.counter = 2**52
    again.speak()
    again.rollouts.overtake_reported_counters()
    again.work(times=4)
    assert {one.runs for one in again.fleet.values() if one is not liar} == {OLD} and liar.runs == NEW
    assert not [name for name, one in again.fleet.items() if one.below]
    with again.database.read() as session:
        assert all(row.counter < 2**40 for row in session.query(Device))
    assert again.director.overtake_reported_counters() == []


def _copy(source: Path, target: Path) -> None:
    """One SQLite database over another, as a backup is made and put back."""
    for suffix in ("-wal", "-shm"):
        target.with_name(target.name + suffix).unlink(missing_ok=True)
    with sqlite3.connect(source) as here, sqlite3.connect(target) as there:
        here.backup(there)
    here.close()
    there.close()
