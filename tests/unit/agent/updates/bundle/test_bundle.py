"""Offline bundles: what a device installs from a USB stick, and what no stick can make it do."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from edgesplit.errors import EdgeError, Expired, LinkError, MalformedMessage, TrustError, UsageError
from edgesplit.release.bundle_format import INDEX_FILE, decode_index, statement_path
from edgesplit.release_store import stored_releases
from edgesplit_agent.releases.disk_quota import NoRoom
from edgesplit_agent.updates.bundle import request
from edgesplit_agent.updates.bundle.command import lines, verify_for_device
from edgesplit_agent.updates.bundle.fetcher import BundleFetcher
from edgesplit_agent.updates.bundle.reader import FolderReader, open_bundle
from edgesplit_agent.updates.reconciler import BundleStatus
from edgesplit_provisioning.bundle.build import BundleRequest, check_target, make_bundle
from edgesplit_provisioning.bundle.writer import open_sink
from support.agent_versions import AgentRelease
from support.release_bundles import BundleHarness
from support.signed_repository import DAY


@pytest.fixture
def fleet(tmp_path: Path) -> BundleHarness:
    return BundleHarness(tmp_path)


@pytest.mark.parametrize("name", ["stick", "bundle.tar"])
def test_device_without_a_network_installs_from_a_bundle(fleet: BundleHarness, tmp_path: Path, name: str) -> None:
    """Verified against its own root, complete, staged for its next start; its statement is kept for then."""
    release = fleet.deploy(1)
    bundle = fleet.bundle(tmp_path / name)
    folder, _ = fleet.device_folder()

    assert fleet.apply(bundle) == ""

    current = folder.read_current()
    assert fleet.is_staged(release)
    assert current is not None and (current.counter, current.statement) == (101, fleet.statement)


def test_applying_a_bundle_again_copies_nothing(fleet: BundleHarness, tmp_path: Path) -> None:
    """Existing chunks are not copied; of a newer release only the difference is."""
    fleet.deploy(1)
    copied: list[int] = []

    def on_progress(done: int, total: int) -> None:
        copied.append(total)

    fleet.apply(fleet.bundle(tmp_path / "stick"), on_progress=on_progress)
    fleet.apply(tmp_path / "stick", on_progress=on_progress)
    assert max(copied) > 1_500

    fleet.world.now += 10
    fleet.deploy(2)
    copied.clear()
    fleet.apply(fleet.bundle(tmp_path / "stick"), on_progress=on_progress)
    assert max(copied) == len(b"tail graph 2")


def test_older_bundle_is_refused(fleet: BundleHarness, tmp_path: Path) -> None:
    """Neither its statement nor its metadata roll a device back, also after a restart."""
    fleet.deploy(1)
    old = fleet.bundle(tmp_path / "old")
    fleet.world.now += 10
    newer = fleet.deploy(2)
    fleet.apply(fleet.bundle(tmp_path / "new"))

    with pytest.raises(TrustError):
        fleet.apply(old)
    mixed = tmp_path / "mixed"
    shutil.copytree(tmp_path / "new", mixed)
    shutil.copy(old / statement_path("cam-1"), mixed / statement_path("cam-1"))
    with pytest.raises(TrustError, match="older than"):
        fleet.apply(mixed)
    assert fleet.is_staged(newer)


def test_expired_bundle_installs_nothing(fleet: BundleHarness, tmp_path: Path) -> None:
    """The error says until when it was valid."""
    fleet.deploy(1, lasts_s=30 * DAY)
    bundle = fleet.bundle(tmp_path / "stick")
    folder, _ = fleet.device_folder()
    fleet.world.now = decode_index((bundle / INDEX_FILE).read_bytes()).valid_until + 1
    with pytest.raises(Expired):
        fleet.apply(bundle)
    assert stored_releases(folder.releases) == []


def test_bundle_of_another_fleet_is_refused(fleet: BundleHarness, tmp_path: Path) -> None:
    """However well it is signed."""
    fleet.deploy(1)
    other = BundleHarness(tmp_path, "other")
    other.deploy(1)
    folder, _ = fleet.device_folder()
    with pytest.raises(TrustError):
        fleet.apply(other.bundle(tmp_path / "theirs"))
    assert stored_releases(folder.releases) == [] and not folder.chunks.exists()


def test_statement_of_another_device_is_refused(fleet: BundleHarness, tmp_path: Path) -> None:
    """Also if it lies under this device's name."""
    fleet.deploy(1, "cam-2")
    bundle = fleet.bundle(tmp_path / "stick")
    with pytest.raises(UsageError, match="nothing for cam-1"):
        fleet.apply(bundle)
    os.rename(bundle / statement_path("cam-2"), bundle / statement_path("cam-1"))
    with pytest.raises(TrustError, match="'cam-2'"):
        fleet.apply(bundle)


def _spoil_chunk(bundle: Path) -> None:
    path = next(path for path in (bundle / "chunks").rglob("*") if path.is_file() and path.stat().st_size == 1000)
    path.write_bytes(b"W" + path.read_bytes()[1:])


def _huge(bundle: Path) -> None:
    with (bundle / "metadata" / "timestamp.json").open("ab") as file:
        file.truncate(1 << 32)


def _linked(bundle: Path) -> None:
    (bundle / "metadata" / "timestamp.json").unlink()
    (bundle / "metadata" / "timestamp.json").symlink_to("/etc/hostname")


def _linked_folder(bundle: Path) -> None:
    os.rename(bundle / "chunks", bundle / "elsewhere")
    (bundle / "chunks").symlink_to("elsewhere")


def _pipe(bundle: Path) -> None:
    (bundle / "metadata" / "timestamp.json").unlink()
    os.mkfifo(bundle / "metadata" / "timestamp.json")


def _no_index(bundle: Path) -> None:
    (bundle / INDEX_FILE).unlink()


def _forged(bundle: Path) -> None:
    path = next((bundle / "targets" / "releases").iterdir())
    path.write_bytes(path.read_bytes().replace(b'"tiny@1"', b'"tony@1"'))


def _cut_short(bundle: Path) -> None:
    path = bundle / "metadata" / "timestamp.json"
    path.write_bytes(path.read_bytes()[:100])


def _no_metadata(bundle: Path) -> None:
    shutil.rmtree(bundle / "metadata")


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (_spoil_chunk, MalformedMessage), (_huge, TrustError), (_linked, TrustError), (_linked_folder, TrustError),
        (_pipe, TrustError), (_no_index, UsageError), (_forged, TrustError), (_cut_short, TrustError),
        (_no_metadata, LinkError),
    ],
)  # fmt: skip
def test_damaged_or_hostile_bundle_installs_nothing(
    fleet: BundleHarness, tmp_path: Path, spoil: Callable[[Path], None], kind: type[EdgeError]
) -> None:
    """And nothing outside of it is read."""
    fleet.deploy(1)
    bundle = fleet.bundle(tmp_path / "stick")
    spoil(bundle)
    folder, _ = fleet.device_folder()
    with pytest.raises(kind):
        fleet.apply(bundle)
    assert stored_releases(folder.releases) == []


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../b", "a//b", "", ".x", "a\0b", "a\nb", "x" * 999])
def test_names_cannot_leave_the_bundle(fleet: BundleHarness, tmp_path: Path, path: str) -> None:
    """For every reader of a bundle."""
    fleet.deploy(1)
    source = FolderReader(fleet.bundle(tmp_path / "stick"))
    with pytest.raises(TrustError):
        source.read(path, 100)
    source.close()


def test_irregular_tar_members_are_ignored(tmp_path: Path, fleet: BundleHarness) -> None:
    """Links, devices, paths that lead elsewhere; and of two with one name the first counts."""
    fleet.deploy(1)
    good = fleet.bundle(tmp_path / "good.tar")
    hostile = tmp_path / "hostile.tar"
    with tarfile.open(good) as source, tarfile.open(hostile, "w") as made:
        for name, kind in (("metadata/timestamp.json", tarfile.SYMTYPE), ("metadata/x", tarfile.CHRTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            made.addfile(entry)
        for name in ("../../etc/x", "/etc/x", "chunks/../../x"):
            entry = tarfile.TarInfo(name)
            entry.size = 1
            made.addfile(entry, io.BytesIO(b"x"))
        for member in source:
            made.addfile(member, source.extractfile(member))
        entry = tarfile.TarInfo("metadata/timestamp.json")
        entry.size = 1
        made.addfile(entry, io.BytesIO(b"x"))
    assert fleet.apply(hostile) == ""


@pytest.mark.parametrize("keep", [0, 300, 5_000, 0.5])
def test_truncated_tar_file_is_refused(fleet: BundleHarness, tmp_path: Path, keep: float) -> None:
    """At whatever byte."""
    fleet.deploy(1)
    raw = fleet.bundle(tmp_path / "whole.tar").read_bytes()
    cut = tmp_path / "cut.tar"
    cut.write_bytes(raw[: int(keep * len(raw)) if keep < 1 else int(keep)])
    with pytest.raises((MalformedMessage, UsageError)):
        fleet.apply(cut)


def test_removed_stick_is_resumed(fleet: BundleHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied chunks stay, and are not copied again."""
    release = fleet.deploy(1)
    bundle = fleet.bundle(tmp_path / "stick")
    read, chunks = FolderReader.read, [0]

    def pulled(source: FolderReader, path: str, most: int) -> bytes:
        if path.startswith("chunks/"):
            chunks[0] += 1
            if chunks[0] == 3:
                os.rename(bundle, tmp_path / "pulled")
                shutil.rmtree(tmp_path / "pulled")
        return read(source, path, most)

    monkeypatch.setattr(FolderReader, "read", pulled)
    with pytest.raises(LinkError, match="missing"):
        fleet.apply(bundle)
    monkeypatch.undo()
    with pytest.raises(LinkError, match="no bundle at"):
        fleet.apply(bundle)

    fleet.bundle(bundle)
    copied: list[int] = []
    assert fleet.apply(bundle, on_progress=lambda done, of: copied.append(of)) == "" and fleet.is_staged(release)
    assert max(copied) < sum(map(len, fleet.chunks.values()))


def test_without_room_no_byte_is_copied(fleet: BundleHarness, tmp_path: Path) -> None:
    """Quota and disk are checked for the whole bundle first."""
    fleet.deploy(1)
    bundle = fleet.bundle(tmp_path / "stick")
    folder, _ = fleet.device_folder()
    with pytest.raises(NoRoom):
        fleet.apply(bundle, quota_bytes=1_000)
    assert [path for path in folder.chunks.rglob("*") if path.is_file()] == []


def test_release_missing_from_the_bundle_is_left_to_the_network(fleet: BundleHarness, tmp_path: Path) -> None:
    """A bundle of one model does not fail for another."""
    release = fleet.deploy(1)
    bundle = fleet.bundle(tmp_path / "stick")
    shutil.rmtree(bundle / "targets")
    assert release[:12] in fleet.apply(bundle)


def test_bundle_index_is_written_last(fleet: BundleHarness, tmp_path: Path) -> None:
    """Making it again resumes, and removes what belongs to the older one."""
    fleet.deploy(1)
    stick = tmp_path / "stick"
    (stick / "photos").mkdir(parents=True)
    (stick / "photos" / "mine.jpg").write_bytes(b"x")
    fleet.bundle(stick)
    (stick / "chunks" / "ff").mkdir(exist_ok=True)
    (stick / "chunks" / "ff" / "old").write_bytes(b"of an older bundle")
    broken = BundleHarness.download

    def fails(*_: object, **__: object) -> bytes:
        raise LinkError("the network fails")

    fleet.deploy(2)
    fleet.download = fails  # type: ignore[method-assign]
    with pytest.raises(LinkError):
        fleet.bundle(stick)
    with pytest.raises(UsageError, match="no complete bundle"):
        open_bundle(stick)
    fleet.download = broken.__get__(fleet)  # type: ignore[method-assign]
    fleet.bundle(stick)
    assert not (stick / "chunks" / "ff" / "old").exists()
    assert (stick / "photos" / "mine.jpg").exists()
    assert len(list((stick / "targets" / "releases").iterdir())) == 1


def test_refused_bundle_keeps_the_existing_one(
    fleet: BundleHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unchanged and usable."""
    fleet.deploy(1)
    stick = fleet.bundle(tmp_path / "stick")

    def refuses(*_: object, **__: object) -> object:
        raise UsageError("nothing is deployed")

    monkeypatch.setattr(fleet, "post", refuses)
    for to in (stick, tmp_path / "new", tmp_path / "new.tar"):
        with pytest.raises(UsageError, match="deployed"):
            fleet.bundle(to)
    open_bundle(stick).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fleet", "stick"]


def test_agent_release_is_left_to_a_running_agent(fleet: BundleHarness, tmp_path: Path) -> None:
    """It does not keep a model's release from being installed."""
    model = fleet.deploy(1)
    fleet.deploy_agent(AgentRelease("0.3.0"), beside=model)
    lacking = fleet.apply(fleet.bundle(tmp_path / "stick"))
    assert fleet.agent[:12] in lacking and model[:12] not in lacking and fleet.is_staged(model)


@pytest.mark.parametrize("name", ["stick", "bundle.tar"])
def test_installer_kit_lies_beside_the_releases(fleet: BundleHarness, tmp_path: Path, name: str) -> None:
    """As the folder `edgesplit`, the same on a stick and a card; a bundle made without the kit removes it."""
    fleet.deploy(1)
    files = {file: tmp_path / file for file in ("install.sh", "kit.json")}
    for file, path in files.items():
        path.write_text(file)
    to = tmp_path / name
    asked = BundleRequest(devices=("cam-1",), kit=files, kit_for="Python 3.11 on aarch64")
    with open_sink(to) as opened:
        index = make_bundle(fleet, asked, opened, lambda done, of: None)
    source = open_bundle(to)
    assert source.read("edgesplit/install.sh", 99) == b"install.sh" and index.kit == "Python 3.11 on aarch64"
    source.close()
    fleet.bundle(to)
    source = open_bundle(to)
    with pytest.raises(FileNotFoundError):
        source.read("edgesplit/install.sh", 99)
    source.close()


def test_unfinished_tar_file_is_removed(fleet: BundleHarness, tmp_path: Path) -> None:
    """With its temporary files."""
    fleet.deploy(1)
    fleet.chunks = dict.fromkeys(fleet.chunks, b"wrong")
    with pytest.raises(LinkError, match="incomplete"):
        fleet.bundle(tmp_path / "new.tar")
    assert list(tmp_path.glob("*.tar*")) == []


def test_corrupt_chunks_are_not_written_to_a_bundle(fleet: BundleHarness, tmp_path: Path) -> None:
    """What a device would refuse is found where it can be repaired."""
    fleet.deploy(1)
    fleet.chunks = {sha256: b"?" * len(data) for sha256, data in fleet.chunks.items()}
    with pytest.raises(LinkError, match="does not match its signed digest"):
        fleet.bundle(tmp_path / "stick")
    assert not (tmp_path / "stick" / "chunks").exists()


def test_full_medium_is_reported_before_writing(
    fleet: BundleHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the missing amount."""
    fleet.deploy(1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 0))
    with pytest.raises(UsageError, match="no room"):
        fleet.bundle(tmp_path / "stick")
    assert list((tmp_path / "stick").iterdir()) == []


def test_controller_cannot_write_outside_the_bundle(fleet: BundleHarness, tmp_path: Path) -> None:
    """A lying controller writes no other file."""
    fleet.deploy(1)
    for path in ("../x", "metadata/../../x", "bundle.json", "chunks/aa/x", "/etc/x", "metadata/.x", "metadata//x"):
        honest = BundleHarness.post(fleet, "")
        fleet.post = lambda *_, honest=honest, path=path, **__: {**honest, "files": {path: ""}}  # type: ignore
        with open_sink(tmp_path / "stick") as opened, pytest.raises(LinkError):
            make_bundle(fleet, BundleRequest(devices=("cam-1",)), opened, lambda done, of: None)


def test_target_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    """A file where a folder is meant, and the other way round."""
    (tmp_path / "file").touch()
    (tmp_path / "folder.tar").mkdir()
    for name in ("file", "folder.tar"):
        with pytest.raises(UsageError):
            check_target(tmp_path / name)
    check_target(tmp_path / "new")


def test_inspecting_a_bundle_changes_nothing(fleet: BundleHarness, tmp_path: Path) -> None:
    """It reports whether the bundle would be accepted, by the device's trust store."""
    fleet.deploy(1)
    bundle = fleet.bundle(tmp_path / "stick")
    folder, _ = fleet.device_folder()
    before = sorted(str(path) for path in folder.path.rglob("*"))
    carrier = BundleFetcher(open_bundle(bundle))
    device, said = verify_for_device(carrier, folder, fleet.world.clock)
    assert (device, said) == ("cam-1", "valid; statement 101, 1 models")
    fleet.world.now += 30 * DAY
    assert verify_for_device(carrier, folder, fleet.world.clock)[1].startswith("not applicable: metadata has expired")
    assert sorted(str(path) for path in folder.path.rglob("*")) == before
    carrier.close()
    told = json.loads((bundle / INDEX_FILE).read_text())
    told["releases"][0]["model"] = "\x1b[2Jx"
    shown = lines({**told, "device": device, "verified": said})
    assert not any("\x1b" in line for line in shown) and any("?[2Jx" in line for line in shown)


def test_stopped_agents_state_is_unchanged_by_a_bundle(fleet: BundleHarness, tmp_path: Path) -> None:
    """No start is counted, and the active releases are not lost, also where current.json is."""
    first = fleet.deploy(1)
    folder, _ = fleet.device_folder()
    fleet.apply(fleet.bundle(tmp_path / "stick"))
    current = folder.read_current()
    assert current is not None and current.unhealthy_starts == 0
    (folder.path / "current.json").unlink()
    fleet.world.now += 10
    fleet.deploy(2)
    fleet.apply(fleet.bundle(tmp_path / "stick"))
    found = folder.read_current()
    assert found is not None and found.models["tiny"].trial == first


class FakeReconciler:
    """What the watch tells it."""

    def __init__(self) -> None:
        self.bundle_status = BundleStatus()
        self.asked: list[tuple[str, str]] = []

    def on_bundle(self, number: str, path: str) -> None:
        self.asked.append((number, path))
        self.bundle_status = BundleStatus(number, "taking")


def test_running_agent_is_asked_through_a_request_file(tmp_path: Path) -> None:
    """Once per request; the file stays until it succeeded or finally failed, so that a restart resumes it."""
    file, updater = tmp_path / "bundle.json", FakeReconciler()
    watch = request.BundleWatch(file, updater)
    watch.poll()
    asked = request.submit(file, tmp_path / "stick")
    watch.poll()
    watch.poll()
    assert updater.asked == [(asked.number, str(tmp_path / "stick"))] and file.exists()

    restarted = FakeReconciler()
    request.BundleWatch(file, restarted).poll()
    assert restarted.asked == updater.asked

    updater.bundle_status = BundleStatus(asked.number, "refused", "expired")
    newer = request.submit(file, tmp_path / "other")
    watch.poll()
    assert updater.asked[-1][0] == newer.number and file.exists()
    updater.bundle_status = BundleStatus(newer.number, "taken")
    watch.poll()
    assert not file.exists() and watch.status()["state"] == "taken"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"number": "1", "path": "relative"}', b"\xff" * 10_000])
def test_malformed_request_file_is_ignored(tmp_path: Path, raw: bytes) -> None:
    """Nothing is read by it."""
    (tmp_path / "bundle.json").write_bytes(raw)
    assert request.read(tmp_path / "bundle.json") is None
