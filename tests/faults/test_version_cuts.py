"""Power fails at every write, rename, unlink, mkdir and fsync while the agent changes its own version.

Each story is played once, through all the processes that it takes, while `power_cut.Recorder` writes down what happens
on disk; then the launcher is started on what a disk may hold after a cut at each point. What starts must be, byte for
byte, a version that was installed; the model is served by it; the identity is untouched; and in the end the device runs
what the story ends with.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from edgesplit_agent.self_update.version_store import VersionStore
from support.agent_versions import AgentRelease, SelfUpdateHarness
from support.device_storage import Machine, imaginary_disks
from support.power_cut import Disk, Operation, Recorder, Tree, after_cut, read_tree, write_tree

SEED = int(os.environ.get("EDGESPLIT_SEED", "1"))
A, B = AgentRelease("0.3.0"), AgentRelease("0.4.0")
NAMES = ("install", "update", "silent", "deadly")


@dataclass
class Story:
    """An update, and what the disk saw of it."""

    start: Disk
    log: Sequence[Operation]
    end: str
    """The release that runs when it is over."""
    may_run: frozenset[str]
    retained: bytes | None
    mutes: frozenset[str]


class Stage:
    """A signed harness, and the stories that are played in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, count()
        self.first = SelfUpdateHarness(folder)
        self.first.add(A, B)

    def harness(self, tree: Tree, mutes: frozenset[str] = frozenset()) -> SelfUpdateHarness:
        data = self.folder / f"device-{next(self.names)}"
        data.mkdir()
        write_tree(tree, data)
        harness = SelfUpdateHarness(self.folder, data, self.first.source)
        harness.add_known(self.first)
        harness.mutes = set(mutes)
        return harness

    def play(self, before: Tree, wanted: AgentRelease, end: str, tell: Callable[[SelfUpdateHarness, Machine], Machine],
             *may_run: str, mutes: frozenset[str] = frozenset()) -> tuple[Story, Tree]:  # fmt: skip
        self.first.source.retained = None
        harness = self.harness(before, mutes)
        recorder = Recorder(harness.data)
        with recorder.watching():
            machine = harness.start()
            machine.offer(harness.say(wanted))
            machine = tell(harness, machine)
            machine.off()
        assert harness.runs(machine) == end and machine.running == harness.model.digest
        left = read_tree(harness.data)
        shutil.rmtree(harness.data)
        retained = self.first.source.retained
        return Story(recorder.start, recorder.log, end, frozenset((*may_run, end)), retained, mutes), left


def dying(harness: SelfUpdateHarness, machine: Machine) -> Machine:
    """B ends at each of its starts before it has done anything; the power fails, so to speak, three times."""
    harness.again = 0
    machine.settle(lambda now: harness.again > 0)
    machine.stop()
    for _ in range(3):
        harness.start(online=False).off()
    return harness.settle(harness.start())


@pytest.fixture(scope="module")
def stories() -> Iterator[tuple[Stage, dict[str, Story]]]:
    with imaginary_disks() as folder:
        stage = Stage(folder)
        install, with_a = stage.play({}, A, A.digest, SelfUpdateHarness.settle, "")
        update, _ = stage.play(with_a, B, B.digest, SelfUpdateHarness.settle, A.digest)
        mutes = frozenset({B.digest})
        silent, _ = stage.play(with_a, B, A.digest, SelfUpdateHarness.settle, B.digest, mutes=mutes)
        deadly, _ = stage.play(with_a, B, A.digest, dying, B.digest, mutes=mutes)
        yield stage, dict(zip(NAMES, (install, update, silent, deadly), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_power_fails_at_every_operation(stories: tuple[Stage, dict[str, Story]], name: str) -> None:
    """At each point of the story, with what was not fsynced lost, kept, and mixed by a seed: a whole version starts,
    the model is served as soon as it ever was, and the story ends as it would have."""
    stage, story = stories[0], stories[1][name]
    seen: set[frozenset[object]] = set()
    for cut in range(len(story.log) + 1):
        for how in ("lost", "kept", "any"):
            seed = f"{SEED}/{name}/{cut}/{how}"
            tree = after_cut(story.start, story.log, cut, how, random.Random(seed)).tree()  # type: ignore[arg-type]
            known = frozenset((path, what) for path, what in tree.items() if _matters(path))
            if known in seen:
                continue
            seen.add(known)
            try:
                check(stage, story, tree)
            except Exception as error:
                raise AssertionError(f"seed {seed}, after {story.log[max(0, cut - 3) : cut]}: {error!r}") from error
    assert len(seen) > 10
    print(f"{name}: {len(story.log)} operations, {len(seen)} disks, seed {SEED}")


def _matters(path: str) -> bool:
    """What models and metadata do to a disk is tests/faults/test_power_cuts.py's."""
    return path.startswith("versions") or path in ("current.json", "format.json")


def check(stage: Stage, story: Story, tree: Tree) -> None:
    stage.first.source.retained = story.retained
    harness = stage.harness(tree, story.mutes)
    try:
        had = read_tree(harness.data).get("releases/" + harness.model.digest)
        machine = harness.start(online=False)
        runs = harness.runs(machine)
        assert runs in story.may_run | {""} and (not runs or VersionStore(harness.data).damage(runs) == "")
        assert had is None or not story.start.tree().get("current.json") or machine.running == harness.model.digest
        if runs not in story.mutes:
            machine.connect_broker()
        machine = harness.settle(machine)
        assert harness.runs(machine) == story.end, f"it ends with {harness.runs(machine)[:12]!r}"
        assert machine.running == harness.model.digest and not machine.strangers()
        shelf = VersionStore(harness.data)
        assert shelf.damage(story.end) == "" and shelf.read().running == story.end and not shelf.read().unhealthy_starts
        litter = [one.name for one in shelf.folder.iterdir() if one.name.startswith(".")]
        assert not litter, f"left behind: {litter}"
        machine.off()
    finally:
        shutil.rmtree(harness.data)
