"""Garbage collection: what stays, what goes, and what is being stored meanwhile."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from edgesplit.errors import Busy
from edgesplit.links import parse_link
from edgesplit.release_store import stored_releases
from edgesplit_controller.errors import Conflict
from edgesplit_controller.planning.planner_service import PlanOptions
from edgesplit_controller.retention.holds import Holds
from edgesplit_controller.rollout.states import NOTHING
from edgesplit_controller.storage.collection_lock import collection_lock
from edgesplit_controller.storage.leases import Lease
from edgesplit_controller.storage.tables.core import Deployment
from edgesplit_controller.storage.tables.retention import HoldRow
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow, RolloutRow, RolloutStageRow
from edgesplit_controller.tuf.repository import Repository
from support.postgres import Postgres
from support.registry_harness import RegistryHarness, a_model
from support.release_maker import CLASS
from support.retention_harness import RetentionHarness


@pytest.fixture
def world(tmp_path: Path) -> RetentionHarness:
    return RetentionHarness(tmp_path)


def test_a_release_that_a_device_runs_or_shall_run_is_never_collected(world: RetentionHarness) -> None:
    """It stays while it is desired, while the device has not reported its end, and goes with its files afterwards; the
    model's own files stay."""
    world.device("cam-1")
    release, manifest = world.release("conv")
    world.runs(release, "cam-1")
    model_files = {world.model.sha256, world.model.optimised_sha256}

    result = world.collector().collect()
    assert (result.releases, result.blobs) == ([], 0)
    assert [(fate.name, fate.reason) for fate in result.kept] == [(release, "small is deployed to cam-1")]

    number = world.roll_out(NOTHING, "cam-1")
    assert world.rollouts.view(number)["state"] == "running"
    (kept,) = world.collector().collect().kept
    assert "cam-1 still reports to run small" in kept.reason and "may roll devices back to it" in kept.reason

    world.report("cam-1")
    assert world.rollouts.view(number)["state"] == "finished"
    result = world.collector().collect()
    assert [fate.name for fate in result.releases] == [release] and result.exported == 1 and result.unlisted == 1
    assert world.releases() == [] and world.stored() == model_files
    assert stored_releases(world.folder / "offload") == [] and manifest.chunk_list()
    repository = Repository(world.folder / "tuf")
    assert repository.releases() == [] and not list((world.folder / "tuf" / "targets").glob("*/*.json"))


def test_an_offline_device_keeps_the_release_that_it_reported_last(world: RetentionHarness) -> None:
    """Its statement no longer names the model, and it has not heard that: it still asks the offload server."""
    world.device("cam-1")
    release, _ = world.release("conv")
    world.runs(release, "cam-1")
    number = world.roll_out(NOTHING, "cam-1", device_timeout="1s")
    for _ in range(3):
        world.rollouts.step_all()
    assert world.rollouts.view(number)["ended"] is not None

    (kept,) = world.collector().collect().kept
    assert kept.reason == "cam-1 still reports to run small"
    world.devices.revoke("cam-1")
    assert [fate.name for fate in world.collector().collect().releases] == [release]


def test_the_release_that_a_rollback_returns_to_stays(world: RetentionHarness) -> None:
    """Of a rollout in progress, and of the last one of each device after its end; the one before goes."""
    world.device("cam-1")
    first, second, third = (world.release(cut)[0] for cut in ("conv", "pool", "flatten"))
    world.runs(first, "cam-1")
    number = world.roll_out(second, "cam-1")
    reasons = {fate.name: fate.reason for fate in world.collector().preview().kept}
    assert f"rollout {number} may roll devices back to it" in reasons[first] and third not in reasons
    world.report("cam-1", second, second)

    assert [fate.name for fate in world.collector().collect().releases] == [third]
    reasons = {fate.name: fate.reason for fate in world.collector().preview().kept}
    assert reasons[first] == f"a rollback of rollout {number} returns devices to it"
    world.rollouts.command(number, "rollback")
    world.report("cam-1", first, first)
    assert world.rollouts.view(number)["state"] == "rolled back"
    world.check_whole()


def test_the_release_that_another_cut_is_made_of_stays(world: RetentionHarness) -> None:
    """Devices check a recut against its base."""
    world.device("cam-1")
    base, _ = world.release("conv")
    recut, manifest = world.release("pool", recut=True)
    assert manifest.recut_of == base
    world.runs(recut, "cam-1")
    result = world.collector().collect()
    assert {fate.name for fate in result.kept} == {base, recut} and not result.releases
    world.undeploy("cam-1")
    assert {fate.name for fate in world.collector().collect().releases} == {base, recut}
    assert Repository(world.folder / "tuf").recuts() == []


def test_the_newest_releases_of_a_model_stay_unused(world: RetentionHarness) -> None:
    """As many as the rule says, and what they share with older ones."""
    old, *newer = [world.release(cut)[0] for cut in ("conv", "pool", "flatten")]
    result = world.collector(releases=2).collect()
    assert [fate.name for fate in result.releases] == [old]
    assert {fate.reason for fate in result.kept} == {"one of the 2 newest releases of small"}
    assert world.releases() == newer
    world.check_whole()


def test_a_new_release_stays_for_the_time_that_unused_files_do(world: RetentionHarness) -> None:
    """It may wait for a signature on another machine, or for its rollout to begin."""
    release, _ = world.release("conv")
    result = world.collector(unused_s=1e6).collect()
    assert [(fate.name, fate.reason) for fate in result.kept] == [(release, "made less than 11d13h46m40s ago")]
    assert result.blobs == 0 and not result.releases


def test_old_versions_go_only_where_the_rule_says_so(world: RetentionHarness) -> None:
    """Without a rule every version stays; with one those that a device runs, and the newest."""
    refs = [world.model.ref, *(world.push(seed) for seed in (1, 2))]
    world.device("cam-1")
    world.runs(world.release("conv")[0], "cam-1")
    assert not world.collector().collect().models
    assert [fate.name for fate in world.collector(versions=1).collect().models] == [refs[1]]
    assert [model.ref for model in world.registry.all()] == [refs[0], refs[2]]
    world.check_whole()


def test_a_dry_run_tells_what_a_collection_does_and_changes_nothing(world: RetentionHarness) -> None:
    """Releases with their reasons, blobs and copies with their bytes: as deleted afterwards."""
    world.device("cam-1")
    world.release("conv")
    world.runs(world.release("pool")[0], "cam-1")
    before = world.stored(), world.releases(), stored_releases(world.folder / "offload")
    told = world.collector().preview()
    assert (world.stored(), world.releases(), stored_releases(world.folder / "offload")) == before

    done = world.collector().collect()
    assert told == done and done.blobs and done.blob_bytes and done.exported_bytes
    assert world.collector().preview().blobs == 0


def test_rollouts_go_after_their_time_but_not_those_that_govern_a_device(world: RetentionHarness) -> None:
    """The newest one stays too, because no number is used twice."""
    world.device("cam-1")
    world.device("cam-2")
    release, _ = world.release("conv")
    old, governs = world.runs(release, "cam-1"), world.runs(release, "cam-1")
    gone, newest = world.runs(release, "cam-2"), world.undeploy("cam-2")
    assert world.collector(history_s=1e9).collect().rollouts == 0
    assert world.collector().collect().rollouts == 2
    with world.database.read() as session:
        for table, column in (
            (Deployment, Deployment.id), (RolloutRow, RolloutRow.id), (RolloutDeviceRow, RolloutDeviceRow.rollout),
            (RolloutStageRow, RolloutStageRow.rollout),
        ):  # fmt: skip
            assert {getattr(row, column.key) for row in session.query(table)} == {governs, newest}
    assert {old, gone}.isdisjoint({governs, newest})
    assert world.runs(release, "cam-2") == newest + 1


def test_a_blob_that_a_push_in_progress_refers_to_is_not_deleted(world: RetentionHarness) -> None:
    """It was there already, old and unused; the job has stored it again, and its row is not written yet. A job that was
    killed protects nothing."""
    process = Lease(world.database, "process 1")
    assert process.held()
    digest = world.blobs.put(b"weights")
    os.utime(world.blobs.path(digest), (1.0, 1.0))
    holds = Holds(world.database, process, now=time.time)
    with holds.hold():
        assert world.blobs.put(b"weights") == digest
        result = world.collector().collect()
        assert digest in world.stored() and (result.waiting, result.waiting_bytes) == (1, 7)
    with world.database.write() as session:
        session.add(HoldRow(id="killed", holder="a process that is gone", since=1.0))
    assert world.collector().collect().waiting == 0 and digest not in world.stored()
    with world.database.read() as session:
        assert session.query(HoldRow).count() == 0


@pytest.mark.parametrize("is_held", [True, False], ids=["with a hold", "control without a hold"])
@pytest.mark.parametrize("existed", [False, True], ids=["new", "existing"])
def test_a_push_in_one_process_survives_a_collection_in_another_one(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch, existed: bool, is_held: bool
) -> None:
    """Two processes on PostgreSQL, with leases of their own: the model's file is stored, also where it was there, old
    and unused; a collection of the other process runs; then the row is written, and its file is there. The control
    shows that the hold does it: without one the row refers to a blob that is gone."""
    url, raw = postgres.database(), a_model(7)
    collecting, pushing = RetentionHarness(tmp_path, url), RegistryHarness(tmp_path, url)
    lease = Lease(pushing.database, "process 2")
    assert Lease(collecting.database, "process 1").held() and lease.held()
    if existed:
        os.utime(pushing.blobs.path(pushing.blobs.put(raw)), (1.0, 1.0))
    put_file = pushing.blobs.put_file

    def put_and_collect(part: Path) -> str:
        digest = put_file(part)
        assert bool(collecting.collector().collect().waiting) is is_held
        return digest

    monkeypatch.setattr(pushing.blobs, "put_file", put_and_collect)
    with Holds(pushing.database, lease, now=time.time).hold() if is_held else nullcontext():
        model = pushing.push(raw)
    assert model.ref == "small@2"
    collecting.collector().collect()
    files = {model.sha256, model.optimised_sha256}
    assert files & collecting.stored() == (files if is_held else set())
    for database in (collecting.database, pushing.database):
        database.close()


@pytest.mark.parametrize("existed", [False, True], ids=["new", "existing"])
def test_a_release_that_is_published_while_garbage_is_collected_is_whole(
    world: RetentionHarness, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    """Collections run after it is prepared and after it is signed, when no row counts yet; an unused release of the
    same content goes in one of them. What is published has all its files."""
    process = Lease(world.database, "process 1")
    assert process.held()
    if existed:
        world.release("conv")
        for blob in world.blobs.list_blobs():
            os.utime(world.blobs.path(blob.sha256), (1.0, 1.0))
    asked, links = PlanOptions(partition="conv"), {CLASS: parse_link("wifi")}
    sign = world.repository.add_release

    def sign_and_collect(raw: bytes) -> str:
        digest = sign(raw)
        world.collector().collect()
        return digest

    monkeypatch.setattr(world.repository, "add_release", sign_and_collect)
    with Holds(world.database, process, now=time.time).hold():
        digest, _ = world.releasing.prepare(world.model, links, asked)
        world.collector().collect()
        world.releasing.publish(world.model, digest, asked)
        assert world.releases() == [digest]
        world.check_whole()


def test_a_rollout_of_a_removed_release_is_refused(world: RetentionHarness) -> None:
    """The release went between its publication and its rollout."""
    world.device("cam-1")
    release, _ = world.release("conv")
    world.collector().collect()
    with pytest.raises(Conflict, match="was removed meanwhile: deploy again"):
        world.roll_out(release, "cam-1")


def test_a_lost_manifest_deletes_nothing(world: RetentionHarness) -> None:
    """What it refers to is not known, so no blob is unused."""
    release, _ = world.release("conv")
    world.blobs.path(release).unlink()
    unused = world.blobs.put(b"unused")
    with pytest.raises(Conflict, match=r"no blob was deleted.*edgectl release remove"):
        world.collector(releases=1).collect()
    assert unused in world.stored()


def test_one_collection_or_backup_runs_at_a_time(world: RetentionHarness) -> None:
    """A backup reads files by rows that it has read before."""
    with collection_lock(world.database), pytest.raises(Busy, match="try again"):
        world.collector().collect()
    assert world.collector().collect().blobs == 0
