"""A disk that is full, read-only or broken at any operation of an update, and files that it spoilt (A5 to A9, A13).

What runs goes on, what is wrong is told, nothing that was not signed is loaded, and once the disk is well the update
ends as it would have.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.device_storage import Machine, Source, Tiny, imaginary_disks
from support.power_cut import Created, Fault, Operation, Recorder, Resized, Tree, Wrote, read_tree, write_tree

SEED = int(os.environ.get("EDGESPLIT_SEED", "1"))
EVERY = int(os.environ.get("EDGESPLIT_DISK_FAULTS", "3"))
"""What is like another fault fails one operation in so many, from a seeded one on; `make soak` asks for every one."""
V1, V2 = Tiny(1), Tiny(2, factor=3.0)
MINUTES = 0.05
"""Hours that a disk stays ill: some tries long."""


class Shelf:
    """Devices' disks in three states."""

    def __init__(self, folder: Path) -> None:
        self.source = Source(folder / "repository")
        self.source.add(V1, V2)
        self.folder = folder
        self.count = 0
        self.trees: dict[str, Tree] = {"new": {}}
        self.said = {"new": None, "one": self.source.say(V1)}
        with self.device("new") as machine:
            machine.boot().settle()
            self.trees["one"] = read_tree(machine.folder.path)
            self.said["trial"] = machine.source.say(V2)
            machine.offer(self.said["trial"]).settle(lambda now: now.running == V2.digest)
            self.trees["trial"] = read_tree(machine.folder.path)

    def place(self, tree: Tree) -> Path:
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        write_tree(tree, folder)
        return folder

    def device(self, state: str, change: Callable[[Path], None] = lambda folder: None) -> _Device:
        return _Device(self, state, change)


class _Device:
    """A device with a disk in that state, for the length of a `with`."""

    def __init__(self, shelf: Shelf, state: str, change: Callable[[Path], None]) -> None:
        self.folder = shelf.place(shelf.trees[state])
        change(self.folder)
        self.machine = Machine(self.folder, shelf.source)

    def __enter__(self) -> Machine:
        return self.machine

    def __exit__(self, *_: object) -> None:
        self.machine.off()
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def shelf() -> Iterator[Shelf]:
    with imaginary_disks() as folder:
        yield Shelf(folder)


def full(number: int, op: Operation) -> OSError | None:
    """No byte and no name more; what is there can be renamed and removed."""
    grows = isinstance(op, Created | Wrote) or (isinstance(op, Resized) and op.size > 0)
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if grows else None


def without_inodes(number: int, op: Operation) -> OSError | None:
    """Bytes, but no more names."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if isinstance(op, Created) else None


def read_only(number: int, op: Operation) -> OSError | None:
    """As the kernel remounts a card that fails."""
    return OSError(errno.EROFS, os.strerror(errno.EROFS))


def from_then_on(first: int, fault: Fault) -> Fault:
    return lambda number, op: fault(number, op) if number >= first else None


@pytest.mark.parametrize("state", ["new", "one"])
@pytest.mark.parametrize(
    ("fault", "says"),
    [(full, "No space left"), (without_inodes, "No space left"), (read_only, "Read-only")],
    ids=["full", "without inodes", "read-only"],
)
def test_a_disk_that_is_full_from_any_operation_on_keeps_the_running_release(
    shelf: Shelf, state: str, fault: Fault, says: str
) -> None:
    """A8, A13: what ran runs, the operator is told why the update does not come, and it comes when there is room."""
    target = V1 if state == "new" else V2
    before = "" if state == "new" else V1.digest
    step = 1 if fault is full else EVERY
    done, first = False, SEED % step
    while not done:
        shelf.source.retained = shelf.said[state]
        with shelf.device(state) as machine:
            recorder = Recorder(machine.folder.path, from_then_on(first, fault))
            with recorder.watching():
                machine.boot()
                assert machine.running == before, f"with {says} from operation {first} on, what ran did not start"
                machine.offer(shelf.source.say(target)).settle(hours=MINUTES)
                done = recorder.count <= first
                assert machine.running in (before, target.digest), f"from operation {first} on: nothing runs"
                if machine.running != target.digest:
                    _, models, _, trouble = machine.reports[-1]
                    told = trouble + "".join(one.detail for one in models)
                    assert says in told, f"from operation {first} on: told {told!r}"
                recorder.fault = None
                machine.settle()
            assert machine.running == target.digest, f"from operation {first} on: {machine.state}"
            assert machine.standing.committed == {"tiny": target.digest} and not machine.strangers()
            machine.off()  # what could not even be unlinked goes at the next start
            Machine(machine.folder.path, shelf.source).boot().settle().off()
            assert not litter(machine.folder.path), f"from operation {first} on"
        first += step
    assert first > 100
    print(f"{first} operations")


@pytest.mark.parametrize("state", ["new", "one"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_one_operation_that_fails_costs_a_retry(shelf: Shelf, state: str, code: int) -> None:
    """Each operation in turn fails once: the update comes all the same, by itself."""
    target = V1 if state == "new" else V2
    step = 1 if code == errno.EIO else EVERY
    failed, first = True, SEED % step
    while failed:
        shelf.source.retained = shelf.said[state]
        with shelf.device(state) as machine:
            hit: list[int] = []

            def fault(number: int, op: Operation, at: int = first, hit: list[int] = hit) -> OSError | None:
                if number != at:
                    return None
                hit.append(number)
                return OSError(code, os.strerror(code))

            with Recorder(machine.folder.path, fault).watching():
                machine.boot()
                machine.offer(shelf.source.say(target)).settle()
            failed = bool(hit)
            assert machine.running == target.digest, f"operation {first} failed: {machine.state}"
            assert not machine.strangers() and not litter(machine.folder.path), f"operation {first} failed"
        first += step
    assert first > 100


def litter(folder: Path) -> list[str]:
    """What is half written."""
    return [name for name in read_tree(folder) if Path(name).name.startswith((".", "tmp"))]


def flipped(raw: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]


SPOILINGS: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "missing": lambda raw, rng: None,
    "empty": lambda raw, rng: b"",
    "cut": lambda raw, rng: raw[: len(raw) // 2],
    "random": lambda raw, rng: rng.randbytes(len(raw)),
    "zeroed": lambda raw, rng: bytes(len(raw)),
    "one bit": flipped,
}


@pytest.mark.parametrize("how", SPOILINGS)
@pytest.mark.parametrize("state", ["one", "trial"])
def test_a_device_recovers_from_any_spoilt_file(shelf: Shelf, state: str, how: str) -> None:
    """A5 to A7, A9: each file of the folder in turn, in the slices that run, in those beside them and in what is
    remembered: the agent starts, loads no byte that was not signed, and ends with what is wanted, repaired."""
    target = V1 if state == "one" else V2
    names = sorted(name for name, what in shelf.trees[state].items() if isinstance(what, bytes) and name != "lock")
    for name in names:
        rng = random.Random(f"{SEED}/{state}/{how}/{name}")

        def spoil(folder: Path, name: str = name, rng: random.Random = rng) -> None:
            path = folder / name
            left = SPOILINGS[how](path.read_bytes(), rng)
            path.unlink()
            if left is not None:
                path.write_bytes(left)

        shelf.source.retained = shelf.said["trial" if state == "trial" else "one"]
        with shelf.device(state, spoil) as machine:
            machine.boot(online=False)
            assert not machine.strangers(), f"{name} {how}, seed {SEED}: a byte that nobody signed was loaded"
            if not name.startswith("releases/"):
                assert machine.running, f"{name} {how}, seed {SEED}: what is whole does not run"
            elif state == "trial":
                assert machine.running in (V1.digest, V2.digest), f"{name} {how}, seed {SEED}: neither slot runs"
            machine.settle().connect_broker()
            machine.settle()
            assert machine.running == target.digest, f"{name} {how}, seed {SEED}: {machine.state}"
            assert machine.standing.committed == {"tiny": target.digest} and not machine.strangers()
            slices = machine.folder.releases / target.digest / "slices"
            files = [path.read_bytes() for path in slices.rglob("*") if path.is_file()]
            assert len(files) == 3 and not set(machine.loaded) - shelf.source.files
    assert len(names) > 12


def test_a_lost_current_json_is_rebuilt_from_the_stored_releases(shelf: Shelf) -> None:
    """A7: nothing says what ran: the whole release that has been here longest runs, on trial, without a network."""

    def lose(folder: Path) -> None:
        (folder / "current.json").unlink()
        os.utime(folder / "releases" / V1.digest, (1e9, 1e9))

    with shelf.device("trial", lose) as machine:
        machine.boot(online=False)
        assert machine.running == V1.digest and machine.standing.trials == {"tiny": V1.digest}
        machine.settle()
        assert machine.standing.committed == {"tiny": V1.digest}


def test_a_spoilt_trial_falls_back_to_the_previous_release_and_is_repaired(shelf: Shelf) -> None:
    """A9: one bit of the slice on trial: the old slot serves at once, the new one is put together again and tried
    again; it is not a bad release, only a bad card."""
    name = f"releases/{V2.digest}/slices/b/graph.onnx"

    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(flipped((folder / name).read_bytes(), random.Random(1)))

    shelf.source.retained = shelf.said["trial"]
    with shelf.device("trial", spoil) as machine:
        machine.boot(online=False)
        assert machine.running == V1.digest and machine.failed_requests() == []
        machine.connect_broker()
        machine.settle()
        assert machine.running == V2.digest and machine.state.state == "running"
        spoilt = next(file for one in V2.slices if one.name == "b" for file in one.files)
        assert machine.sent == [chunk.sha256 for chunk in spoilt.chunks], "only what is spoilt is asked for again"


def test_a_previous_release_spoilt_on_disk_is_fetched_again_for_a_rollback(shelf: Shelf) -> None:
    """F7: the release on trial is thrown back while the one before it is spoilt on disk: it is repaired, not missed."""
    name = f"releases/{V1.digest}/slices/b/graph.onnx"

    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(b"rotten")

    shelf.source.retained = shelf.said["trial"]
    with shelf.device("trial", spoil) as machine:
        machine.boot()
        machine.updater.on_device_run(V2.digest, RuntimeError("the kernel failed"))
        for _ in range(4):
            machine.updater.on_device_run(V2.digest, RuntimeError("the kernel failed"))
        machine.settle()
        assert machine.running == V1.digest and machine.failed_requests() == []
        assert machine.state.state == "rolled back" and "5 times in a row" in machine.state.detail
        assert not machine.strangers()
