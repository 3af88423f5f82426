"""The TUF repository on disk: consistent after a crash at any write, and serving only its own files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from edgesplit.errors import TrustError
from edgesplit.release.manifest import release_digest
from edgesplit_controller.tuf import key_folder, metadata_store
from edgesplit_controller.tuf.key_change import KeyChange
from edgesplit_controller.tuf.repository_signer import KEPT_VERSIONS
from edgesplit_controller.tuf.rotation import Rotation
from support.signed_repository import DAY, TrustHarness, refreshed, sample_release

LATER = 1e11
"""A Unix time after that of every file here."""


@pytest.fixture()
def world(tmp_path: Path) -> TrustHarness:
    return TrustHarness(tmp_path)


def writes(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch, stop_at: int | None) -> int:
    """Run `call`, dying at the `stop_at`-th durable write; how many there were."""
    count = 0
    real = metadata_store.write_durably

    def counted(path: Path, data: bytes, mode: int = 0o644) -> None:
        nonlocal count
        if count == stop_at:
            raise KeyboardInterrupt
        count += 1
        real(path, data, mode)

    with monkeypatch.context() as patch:
        for module in (metadata_store, key_folder):
            patch.setattr(module, "write_durably", counted)
        patch.setattr("edgesplit.crypto.private_key.write_durably", counted)
        try:
            call()
        except KeyboardInterrupt:
            assert stop_at is not None
    return count


def test_a_crash_at_any_write_leaves_a_consistent_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die at each write of adding a release: a device sees the old state, and adding again succeeds."""
    total = writes(lambda: TrustHarness(tmp_path / "count").add(2), monkeypatch, None)
    first = writes(lambda: TrustHarness(tmp_path / "first"), monkeypatch, None)
    assert total - first == 4  # manifest, targets, snapshot, timestamp
    for stop_at in range(total - first):
        world = TrustHarness(tmp_path / str(stop_at))
        old = world.add(1)
        writes(lambda world=world: world.add(2), monkeypatch, stop_at)  # type: ignore[misc]

        world.repository = world.reopened()
        store = refreshed(world)
        assert store.manifest(old, world.fetch) == sample_release(1)[0]
        with pytest.raises(TrustError):
            store.manifest(release_digest(sample_release(2)[0]), world.fetch)
        again = world.add(2)
        store.refresh(world.fetch)
        assert store.manifest(again, world.fetch) == sample_release(2)[0]


def test_a_crash_at_any_write_of_the_first_start_is_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die at each write of creating a repository: the next start completes it, with matching keys."""
    total = writes(lambda: TrustHarness(tmp_path / "count"), monkeypatch, None)
    for stop_at in range(total):
        writes(lambda at=stop_at: TrustHarness(tmp_path / str(at)), monkeypatch, stop_at)  # type: ignore[misc]

        world = TrustHarness(tmp_path / str(stop_at))
        digest = world.add()
        assert refreshed(world).manifest(digest, world.fetch) == sample_release()[0]


def test_adding_a_release_again_changes_nothing(world: TrustHarness) -> None:
    """The same manifest is the same release: no new version, no new bytes."""
    digest = world.add()
    before = world.repository.read("metadata/timestamp.json")
    world.now += 60
    assert world.add() == digest
    assert world.repository.read("metadata/timestamp.json") == before
    assert world.repository.releases() == [digest]


def test_a_removed_release_is_no_longer_signed_and_the_others_are(world: TrustHarness) -> None:
    """A device that knew the list before accepts the shorter one, refuses the removed release, and installs the others;
    the manifest's file is gone."""
    gone, kept = world.add(1), world.add(2)
    store = refreshed(world)
    world.now += 1
    assert world.repository.unlist(lambda: [kept], LATER) == [gone]
    store.refresh(world.fetch)
    assert store.manifest(kept, world.fetch) == sample_release(2)[0]
    with pytest.raises(TrustError):
        store.manifest(gone, world.fetch)
    assert [path.stem for path in (world.folder / "repository" / "targets").glob("*/*.json")] == [kept]
    assert world.add(1) == gone and refreshed(world).manifest(gone, world.fetch)


def test_a_crash_at_any_write_of_a_removal_leaves_a_consistent_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays listed can be fetched after each of them, and the removal can be repeated."""
    for stop_at in range(3):  # targets, snapshot, timestamp
        world = TrustHarness(tmp_path / str(stop_at))
        gone, kept = world.add(1), world.add(2)
        remove = partial(world.repository.unlist, [kept].copy, LATER)
        writes(remove, monkeypatch, stop_at)
        world.repository = world.reopened()
        store = refreshed(world)
        assert store.manifest(gone, world.fetch) and store.manifest(kept, world.fetch)
        remove()
        assert world.repository.releases() == [kept]


def test_a_release_stays_listed_while_its_key_is_elsewhere_or_keys_change(world: TrustHarness) -> None:
    """The list cannot be signed without the key, and what is signed for a key change must still fit."""
    digest = world.add()
    (world.folder / "repository" / "pending.json").write_bytes(b"{}")
    assert world.repository.unlist(lambda: [], LATER) == [] and world.repository.releases() == [digest]
    (world.folder / "repository" / "pending.json").unlink()
    world.repository.keys.retire("targets", ())
    assert world.repository.unlist(lambda: [], LATER) == [] and world.repository.releases() == [digest]
    assert world.repository.manifest(digest) == sample_release()[0]


def test_a_target_that_was_written_lately_stays(world: TrustHarness) -> None:
    """It may be of a release that is being published."""
    path = "fingerprints/" + "0" * 64 + ".json"
    world.repository.store.write_target(path, b"{}")
    world.repository.unlist(lambda: [], 0.0)
    assert world.repository.store.target(path) == b"{}"
    world.repository.unlist(lambda: [], LATER)
    with pytest.raises(FileNotFoundError):
        world.repository.store.target(path)


def test_old_metadata_is_pruned_after_a_grace_period(world: TrustHarness) -> None:
    """A device in the middle of a refresh still finds the snapshot it was pointed to; the folder does not grow."""
    for version in range(1, 40):
        world.now += 1
        world.add(version)
    files = list((world.folder / "repository" / "metadata").glob("*.snapshot.json"))
    assert len(files) == KEPT_VERSIONS
    refreshed(world)


@pytest.mark.parametrize(
    "path",
    [
        "metadata/../keys/root.pem",
        "keys/root.pem",
        "/etc/passwd",
        "metadata/",
        "targets/releases/../../x",
        "metadata/timestamp.json\n",
        "metadata/" + "9" * 100 + ".root.json",
        "\0",
        "",
    ],
)
def test_the_repository_serves_metadata_files_only(world: TrustHarness, path: str) -> None:
    """C11: keys, other folders and odd names are not found."""
    with pytest.raises(FileNotFoundError):
        world.repository.read(path)


def test_private_keys_have_restrictive_file_modes(world: TrustHarness) -> None:
    """Every signing key is a file of mode 0600 in a folder of mode 0700."""
    folder = world.folder / "repository" / "keys"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.name for file in folder.glob("*.pem")} == {f"{role}.pem" for role in key_folder.ROLES}
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in folder.iterdir())


def test_a_role_can_be_signed_by_a_remote_signer(world: TrustHarness, tmp_path: Path) -> None:
    """A role's signer is a URI: moving the release key to another place changes a table and no code."""
    folder = world.folder / "repository" / "keys"
    (tmp_path / "vault").mkdir()
    (folder / "targets.pem").rename(tmp_path / "vault" / "release.pem")
    table = msgspec.json.decode((folder / "keys.json").read_bytes())
    table["targets"][0]["uri"] = f"file2:{tmp_path / 'vault' / 'release.pem'}"
    (folder / "keys.json").write_bytes(msgspec.json.encode(table))

    digest = world.add()

    assert refreshed(world).manifest(digest, world.fetch) == sample_release()[0]


@pytest.mark.parametrize("role", ["targets", "planner"])
def test_pruning_keeps_new_metadata_below_higher_old_versions(world: TrustHarness, role: str) -> None:
    """A clock that was years ahead left more versions than are retained; under new keys the count starts below them,
    and pruning never removes what was just published."""
    digest = world.add()
    world.now += 9 * 365 * DAY
    for _ in range(KEPT_VERSIONS + 1):
        world.repository.renew()
    world.now -= 9 * 365 * DAY

    assert Rotation(world.repository).change(KeyChange(anew=(role, "snapshot", "timestamp")))

    assert world.repository.store.published().expiries()[role][0] < world.now + DAY
    world.now += 60
    world.repository.renew()
    assert world.repository.store.published().expiries()[role][0] < world.now + DAY
    assert refreshed(world).manifest(digest, world.fetch) == sample_release()[0]
