"""Power fails at every write, rename, unlink, mkdir and fsync of an update (reference faults A1 to A3, A5 to A9, A13).

Each story is played once while `power_cut.Recorder` writes down what happens on disk; then a device is started on what
a disk may hold after a cut at each point. It must run the old release or the new one, load no byte that was not signed,
ask for no chunk that it had, end where the story ends, and leave no litter.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path

import pytest

from support.device_storage import Machine, Source, Tiny, imaginary_disks
from support.power_cut import (
    Disk,
    How,
    Operation,
    Promised,
    Recorder,
    Tree,
    after_cut,
    read_tree,
    write_tree,
)

SEED = int(os.environ.get("EDGESPLIT_SEED", "1"))
CUTS = int(os.environ.get("EDGESPLIT_POWER_CUTS", "150"))
"""Seeded random cuts, each after some others: `make soak` asks for 20,000."""
V1, V2, V3, V4 = Tiny(1), Tiny(2, factor=3.0), Tiny(3, factor=4.0), Tiny(4, factor=5.0)


@dataclass
class Story:
    """Something that happened on a device, and what the disk saw of it."""

    name: str
    end: str
    """The release that runs when it is over."""
    start: Disk = field(default_factory=Disk)
    log: Sequence[Operation] = ()
    retained: bytes | None = None
    """The statement that the broker repeats."""
    sick: frozenset[int] = frozenset()
    """Versions whose own part fails from their activation on."""

    def runs(self, cut: int) -> set[str]:
        """What may run after a cut there: what did, and what the step that was cut was to make run."""
        before = [release for at, release in self._told if at < cut]
        return {*before[-1:], *[release for at, release in self._told if at >= cut][:1]}

    @cached_property
    def _told(self) -> list[tuple[int, str]]:
        return [(at, op.what[1]) for at, op in enumerate(self.log) if isinstance(op, Promised) and op.what[0] == "runs"]

    @cached_property
    def every(self) -> set[str]:
        """All that ran at some time."""
        return {release for cut in range(len(self.log) + 1) for release in self.runs(cut)}

    def kept(self, cut: int) -> set[str]:
        """Chunks that were promised to be on disk by then."""
        return {op.what[1] for op in self.log[:cut] if isinstance(op, Promised) and op.what[0] == "chunk"}


class Stage:
    """A signed world, and the stories that are played in it."""

    def __init__(self, folder: Path) -> None:
        self.source = Source(folder / "repository")
        self.source.add(V1, V2, V3, V4)
        self.folder = folder
        self.names = count()

    def place(self, tree: Tree) -> Path:
        """A device's folder with these files in it."""
        folder = self.folder / f"device-{next(self.names)}"
        folder.mkdir()
        write_tree(tree, folder)
        return folder

    def play(self, name: str, before: Tree, end: str, *wanted: Tiny, sick: frozenset[int] = frozenset(),
             first: Callable[[Machine], object] = lambda machine: None) -> tuple[Story, Tree]:  # fmt: skip
        """Play a story from these files on; what it left."""
        folder = self.place(before)
        self.source.retained = None  # of the story before
        first_machine = Machine(folder, self.source).boot().settle()
        first(first_machine)
        first_machine.off()
        recorder = Recorder(folder)
        with recorder.watching():
            moods: dict[int, str] = {}
            machine = Machine(folder, self.source, moods)
            machine.on_promise = recorder.tell
            machine.boot()
            recorder.tell(("runs", machine.running))
            machine.offer(self.source.say(*wanted))
            finish(machine, moods, sick)
            machine.off()
        assert machine.running == end and not machine.strangers()
        replayed = recorder.start.copy()
        for op in recorder.log:
            replayed.apply(op)
        assert replayed.tree() == read_tree(folder), "the recorder has missed something"
        story = Story(name, end, recorder.start, recorder.log, self.source.retained, sick)
        left = read_tree(folder)
        shutil.rmtree(folder)
        return story, left


def finish(machine: Machine, moods: dict[int, str], sick: frozenset[int]) -> None:
    """Until nothing is left to do; a sick version fails what applications ask as soon as it serves."""

    def ailing(now: Machine) -> bool:
        return any(version in sick and now.running == one.digest for version, one in VERSIONS.items())

    machine.settle(ailing)
    if ailing(machine):
        moods.update(dict.fromkeys(sick, "fails"))
        assert len(machine.failed_requests(1)) == 1
        machine.settle()


VERSIONS = {1: V1, 2: V2, 3: V3, 4: V4}
NAMES = ("install", "update", "roll back", "supersede a trial", "retire")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with imaginary_disks() as folder:
        yield Stage(folder)


@pytest.fixture(scope="module")
def stories(stage: Stage) -> dict[str, Story]:
    """Each story begins where a device was left in peace."""

    def on_trial(machine: Machine) -> None:
        machine.offer(stage.source.say(V2)).settle(lambda now: now.running == V2.digest)

    install, with_1 = stage.play("install", {}, V1.digest, V1)
    update, _ = stage.play("update", with_1, V2.digest, V2)
    back, _ = stage.play("roll back", with_1, V1.digest, V3, sick=frozenset({3}))
    supersede, _ = stage.play("supersede a trial", with_1, V3.digest, V3, first=on_trial)
    retire, _ = stage.play("retire", with_1, "")
    return {story.name: story for story in (install, update, back, supersede, retire)}


def check(stage: Stage, story: Story, tree: Tree, cut: int) -> None:
    """Start on these files without a network, then with one: all that this file promises."""
    folder = stage.place(tree)
    stage.source.retained = story.retained
    moods: dict[int, str] = {}
    machine = Machine(folder, stage.source, moods).boot(online=False)
    try:
        assert machine.running in story.runs(cut), "neither old nor new runs"
        finish(machine, moods, story.sick)
        assert machine.running in story.runs(cut) | (story.every - {"" if story.end else None}), "what ran is gone"
        machine.connect_broker()
        finish(machine, moods, story.sick)
        assert machine.running == story.end, f"it ends with {machine.state}"
        assert not machine.strangers(), "bytes were loaded that nobody signed"
        assert not story.kept(cut) & set(machine.sent), "a chunk that was here was asked for again"
        assert machine.standing.committed.get("tiny", "") == story.end and not machine.standing.starts
        litter = [name for name in read_tree(folder) if Path(name).name.startswith((".", "tmp"))]
        assert not litter, "something half written was left behind"
    finally:
        machine.off()
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", NAMES)
def test_power_fails_at_every_operation(stage: Stage, stories: dict[str, Story], name: str) -> None:
    """A1, A2: at each point of the story, with everything that was not fsynced lost, kept, and mixed by a seed."""
    story, seen, tried = stories[name], set(), 0
    for cut in range(len(story.log) + 1):
        for how in ("lost", "kept", "any"):
            seed = f"{SEED}/{name}/{cut}/{how}"
            tree = cut_tree(story, cut, how, seed)
            if (known := (frozenset(tree.items()), frozenset(story.runs(cut)), len(story.kept(cut)))) in seen:
                continue
            seen.add(known)
            tried += 1
            try:
                check(stage, story, tree, cut)
            except Exception as error:
                raise AssertionError(f"seed {seed}, after {story.log[max(0, cut - 3) : cut]}: {error!r}") from error
    assert tried > 10
    print(f"{name}: {len(story.log)} operations, {tried} disks, seed {SEED}")


def cut_tree(story: Story, cut: int, how: How, seed: str) -> Tree:
    return after_cut(story.start, story.log, cut, how, random.Random(seed)).tree()


def test_power_fails_again_and_again(stage: Stage, stories: dict[str, Story]) -> None:
    """Up to three cuts, each in the repair of the one before: old or new runs, never a byte that nobody signed, and a
    newer deployment brings the device back whatever the cuts made of it."""
    for number in range(CUTS):
        seed = f"{SEED}/{number}"
        try:
            _again_and_again(stage, stories, random.Random(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def _again_and_again(stage: Stage, stories: dict[str, Story], rng: random.Random) -> None:
    story = stories[rng.choice(NAMES)]
    cut = rng.randrange(len(story.log) + 1)
    tree = cut_tree(story, cut, "any", f"{rng.random()}")
    there = story.every | {V1.digest}  # which lay committed beside each trial
    for _ in range(rng.randrange(3)):
        folder = stage.place(tree)
        stage.source.retained = story.retained
        recorder = Recorder(folder)
        with recorder.watching():
            machine = Machine(folder, stage.source).boot(online=rng.random() < 0.8)
            machine.settle()
            machine.off()
        assert (machine.running in there or machine.standing.safe_mode) and not machine.strangers()
        cut = rng.randrange(len(recorder.log) + 1)
        tree = after_cut(recorder.start, recorder.log, cut, "any", rng).tree()
        shutil.rmtree(folder)
    folder = stage.place(tree)
    machine = Machine(folder, stage.source).boot(online=False)
    assert machine.running in there or machine.standing.safe_mode  # three cuts are three starts that did not live
    machine.updater.on_connection(True)
    machine.offer(stage.source.say(V4)).settle()
    assert machine.running == V4.digest and not machine.strangers()
    machine.off()
    shutil.rmtree(folder)
