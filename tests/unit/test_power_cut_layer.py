"""The file layer of the power-cut tests: it records every operation, and loses what a disk may lose."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest

from edgesplit.atomic_files import make_folders, remove_partial_files, write_durably
from support.power_cut import Disk, How, Promised, Recorder, after_cut, read_tree


def lost(recorder: Recorder, cut: int | None = None, how: How = "lost") -> dict[str, object]:
    """The disk after a cut there (at the end)."""
    at = len(recorder.log) if cut is None else cut
    return dict(after_cut(recorder.start, recorder.log, at, how, random.Random(1)).tree())


def everything(folder: Path) -> None:
    """Each way in which the agent and its libraries touch files."""
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "text.txt").write_text("text")
    with open(folder / "a" / "text.txt", "a") as more:
        more.write(" and more")
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as temporary:
        temporary.write(b"t" * 100_000)
    os.replace(temporary.name, folder / "a" / "b" / "moved")
    descriptor = os.open(folder / "low", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, b"0123456789")
    os.ftruncate(descriptor, 4)
    with os.fdopen(descriptor, "r+b") as high:
        high.seek(2)
        high.write(b"xyz")
    os.symlink("a", folder / "link")
    (folder / "link" / "through").write_bytes(b"a link")
    os.link(folder / "low", folder / "second name")
    os.remove(folder / "low")
    shutil.copytree(folder / "a", folder / "gone", copy_function=_copied)
    shutil.rmtree(folder / "gone")


def _copied(source: str, target: str) -> None:
    Path(target).write_bytes(Path(source).read_bytes())


def test_the_recorder_logs_every_file_operation(tmp_path: Path) -> None:
    """Its log, played back, is the folder: byte for byte, name for name, links too."""
    (tmp_path / "before").write_bytes(b"was here")
    recorder = Recorder(tmp_path)
    with recorder.watching():
        everything(tmp_path)
    disk = recorder.start.copy()
    for op in recorder.log:
        disk.apply(op)
    assert disk.tree() == read_tree(tmp_path)
    assert recorder.changes > 20


def test_unknown_file_operations_are_refused(tmp_path: Path) -> None:
    """A call that is not recorded must not pass unnoticed."""
    with (
        Recorder(tmp_path).watching(),
        open(tmp_path / "f", "wb") as file,
        pytest.raises(AssertionError, match="teach"),
    ):
        os.pwrite(file.fileno(), b"unseen", 0)


def test_only_synced_data_survives_a_power_cut(tmp_path: Path) -> None:
    """Bytes by the file's fsync, names by the folder's; one without the other is an empty file, or none."""
    recorder = Recorder(tmp_path)
    with recorder.watching():
        (tmp_path / "f").write_bytes(b"bytes")
        folder = os.open(tmp_path, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    assert lost(recorder) == {"f": b""}
    assert lost(recorder, how="kept") == {"f": b"bytes"}
    assert lost(recorder, len(recorder.log) - 1) == {}


def test_a_file_operation_can_be_made_to_fail(tmp_path: Path) -> None:
    """It is not carried out, and not in the log."""
    recorder = Recorder(tmp_path, lambda number, op: OSError(errno.ENOSPC, "full") if number == 1 else None)
    with recorder.watching(), pytest.raises(OSError, match="full"):
        write_durably(tmp_path / "f", b"x")
    assert recorder.count > 1 and read_tree(tmp_path) == {}


def test_a_new_folder_survives_with_what_was_written_into_it(tmp_path: Path) -> None:
    """A file in a folder whose own name was never synced was lost with it: chunks, counters, the device's key."""
    recorder = Recorder(tmp_path)
    with recorder.watching():
        write_durably(tmp_path / "chunks" / "aa" / "aabb", b"chunk")
        recorder.tell("kept")
        make_folders(tmp_path / "trust" / "cache")
    assert lost(recorder, recorder.log.index(Promised("kept"))) == {
        "chunks": "folder", "chunks/aa": "folder", "chunks/aa/aabb": b"chunk",
    }  # fmt: skip
    assert lost(recorder)["trust/cache"] == "folder"


def test_a_replaced_file_is_old_or_new_after_any_power_cut(tmp_path: Path) -> None:
    """`write_durably`, with whatever was not synced lost, kept or spoilt."""
    (tmp_path / "f").write_bytes(b"old")
    recorder = Recorder(tmp_path)
    with recorder.watching():
        write_durably(tmp_path / "f", b"new" * 1000)
    for cut in range(len(recorder.log) + 1):
        for seed in range(20):
            disk = after_cut(recorder.start, recorder.log, cut, "any", random.Random(seed))
            assert disk.tree()["f"] in (b"old", b"new" * 1000)
    assert isinstance(recorder.start, Disk) and lost(recorder)["f"] == b"new" * 1000


def test_temporary_files_of_power_cuts_are_removed(tmp_path: Path) -> None:
    """Each power cut left one under another process's number; they are swept when the folder is ours."""
    for number in range(3):
        (tmp_path / f".current.json.{number}.part").write_bytes(b"half")
    (tmp_path / "current.json").write_bytes(b"whole")
    remove_partial_files(tmp_path)
    assert read_tree(tmp_path) == {"current.json": b"whole"}
