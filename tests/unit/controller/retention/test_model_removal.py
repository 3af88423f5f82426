"""Removal of models and releases: refused while they are in use, with where and what ends it; complete otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import select

from edgesplit.errors import NotFound, UsageError
from edgesplit.release.agent_release import AGENT_MODEL
from edgesplit.release.lineage import Lineage, VariantEvidence
from edgesplit_controller.errors import Conflict
from edgesplit_controller.model_registry.sample_sets import SampleSets
from edgesplit_controller.planning.planner_service import PlanOptions
from edgesplit_controller.rollout.states import NOTHING
from edgesplit_controller.storage.tables.core import Event, Measurement, Model, ReleaseRow, Sample, SampleSetRow
from edgesplit_controller.storage.tables.device_state import ModelBucketRow
from edgesplit_controller.storage.tables.replan import PolicyRow, ProposalRow
from support.registry_harness import a_model, npz
from support.retention_harness import RetentionHarness

IMAGE = np.zeros((1, 3, 16, 16), np.float32)


@pytest.fixture
def world(tmp_path: Path) -> RetentionHarness:
    return RetentionHarness(tmp_path)


def test_a_deployed_model_is_not_removed_and_the_refusal_says_what_ends_it(world: RetentionHarness) -> None:
    """Where it runs, and the command; nothing has changed."""
    for name in ("cam-1", "cam-2"):
        world.device(name)
    release, _ = world.release("conv")
    world.runs(release, "cam-1", "cam-2")
    ending = "`edgectl undeploy small --from cam-1 --from cam-2`"
    for remove, what in ((world.removal.remove_model, "small"), (world.removal.remove_release, release[:8])):
        with pytest.raises(Conflict, match="nothing was removed: small is deployed to cam-1, cam-2") as refused:
            remove(what)
        assert ending in str(refused.value)
    world.check_whole()


def test_a_model_that_an_offline_device_still_runs_is_not_removed(world: RetentionHarness) -> None:
    """Undeployed, and not heard by the device; revoking the device ends it."""
    world.device("cam-1")
    world.runs(world.release("conv")[0], "cam-1")
    number = world.roll_out(NOTHING, "cam-1")
    with pytest.raises(Conflict, match=rf"cam-1 still reports to run small; rollout {number} may roll devices back"):
        world.removal.remove_model("small")
    world.rollouts.command(number, "abort")
    with pytest.raises(Conflict, match="small is deployed to cam-1"):
        world.removal.remove_model("small")


def test_a_removed_model_leaves_its_audit_trail_and_its_version_number(world: RetentionHarness) -> None:
    """Samples, measurements, releases, proposals, policies and history are gone; the next push is a new version."""
    release, _ = world.release("conv")
    world.registry.add_samples(world.model, tensors=[npz(image=IMAGE)])
    with world.database.write() as session:
        session.add(ProposalRow(
            model=world.model.ref, release=release, device_class="raspberrypi4", group="", devices=[],
            state="dismissed", summary={}, measured={}, created=1.0, decided=2.0,
        ))  # fmt: skip
        session.add(PolicyRow(model="small", group="", mode="auto", doubt={}, changed=1.0))
        session.add(ModelBucketRow(model="small", group="", span_s=60, begins=0.0, content={}))

    assert world.removal.remove_model("small") == {"models": ["small@1"], "releases": [release], "variants": []}

    with world.database.read() as session:
        for table in (Model, Sample, Measurement, ReleaseRow, ProposalRow, PolicyRow, ModelBucketRow):
            assert session.scalars(select(table)).all() == [], table
        actions = set(session.scalars(select(Event.what)))
    assert {"model.pushed", "model.removed", "release.made", "release.removed"} <= actions
    assert world.push(0) == "small@2"
    world.collector().collect()
    world.check_whole()


def test_one_version_is_removed_and_the_others_stay(world: RetentionHarness) -> None:
    """With the model's history; the newest version's number is not used again either."""
    second = world.push(1)
    with world.database.write() as session:
        session.add(PolicyRow(model="small", group="", mode="auto", doubt={}, changed=1.0))
    assert world.removal.remove_model(second)["models"] == [second]
    assert [model.ref for model in world.registry.all()] == [world.model.ref]
    with world.database.read() as session:
        assert session.query(PolicyRow).count() == 1
    assert world.push(1) == "small@3"


def test_a_release_is_removed_by_the_begin_of_its_digest(world: RetentionHarness) -> None:
    """With the other cuts that are made of it; an unknown one and the agent are refused in clear words."""
    base, _ = world.release("conv")
    recut, _ = world.release("pool", recut=True)
    with pytest.raises(NotFound):
        world.removal.remove_release("nothing")
    with pytest.raises(UsageError, match="too short to remove a release by: write at least 8"):
        world.removal.remove_release(base[:7])
    assert set(world.removal.remove_release(base[:8])["releases"]) == {base, recut}
    assert world.releases() == []
    with pytest.raises(UsageError, match="the agent itself"):
        world.removal.remove_model(AGENT_MODEL)
    with pytest.raises(NotFound, match="small@1"):
        world.removal.remove_model("small@7")


def test_what_is_added_to_a_model_that_was_removed_meanwhile_is_refused(world: RetentionHarness) -> None:
    """A deployment had read the model and prepared a release; samples came. Neither leaves a row without its model."""
    release, _ = world.release("conv")
    world.removal.remove_model("small")
    with pytest.raises(Conflict, match="small@1 was removed meanwhile: push it again"):
        world.releasing.publish(world.model, release, PlanOptions(partition="conv"))
    with pytest.raises(Conflict, match="was removed meanwhile"):
        world.registry.add_samples(world.model, tensors=[npz(image=IMAGE)])
    assert world.releases() == []


def test_a_variant_outlives_its_base_and_still_names_it(world: RetentionHarness) -> None:
    """The set that judged it goes with the base, its own samples stay; the removal says which versions stay."""
    samples = [npz(image=IMAGE + number) for number in range(2)]
    world.registry.add_samples(world.model, tensors=samples, labels={samples[0]: 1, samples[1]: 2})
    sets = SampleSets(world.database, world.blobs, now=world.clock)
    chosen = sets.create(world.model, [world.blobs.put(sample) for sample in samples])
    lineage = Lineage(
        base=world.model.ref, base_sha256=world.model.sha256, answer="class:scores", samples_sha256=chosen.sha256,
        evidence=VariantEvidence(samples=1, changed=0, changed_at_most=0.9),
    )  # fmt: skip
    part = world.blobs.incoming_file()
    part.write_bytes(a_model(5))
    variant = world.registry.push(part, "small", lineage=lineage)
    sets.inherit(world.model, variant, chosen)

    assert world.removal.remove_model("small@1")["variants"] == ["small@2"]

    with world.database.read() as session:
        assert session.scalars(select(SampleSetRow)).all() == []
    stored = world.registry.get("small")
    assert stored.ref == "small@2" and stored.lineage is not None and stored.lineage["base"] == "small@1"
    assert len(world.registry.samples(stored)) == 2 and world.registry.labels(stored) == [1, 2]
    world.collector().collect()
    assert len(world.registry.samples(world.registry.get("small"))) == 2
