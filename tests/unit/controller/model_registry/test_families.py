"""Families: accuracies on labelled samples, what is refused, and the release in which every variant is whole."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.score import score
from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.links import parse_link
from edgesplit.release.manifest import Manifest, decode_manifest, encode_manifest
from edgesplit.runtime import run_slices
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.loader import load_slices
from edgesplit_controller.errors import Conflict
from edgesplit_controller.model_registry.families import VariantRequest, family_of
from edgesplit_controller.model_registry.golden import run_whole
from edgesplit_controller.planning.planner_service import PlanOptions
from edgesplit_controller.releases.family_build import BuiltFamily
from edgesplit_controller.retention.removal import Removal
from edgesplit_controller.storage.tables.core import Model
from edgesplit_partitioner.planner.cascade import PlannedCascade
from edgesplit_partitioner.planner.cascade_calibration import CascadeRequest
from edgesplit_partitioner.planner.early_exit import PlannedExit
from support.family_maker import COUNT, FamilyMaker
from support.release_maker import CLASS


@pytest.fixture
def maker(tmp_path: Path) -> FamilyMaker:
    return FamilyMaker(tmp_path)


def test_accuracies_are_measured_with_their_bounds(maker: FamilyMaker) -> None:
    """The samples are labelled by what the large one answers, so that it is always right; the bound says how sure."""
    family = family_of(maker.create("small", "large"))
    assert family is not None and family.samples == COUNT
    by_name = {variant.name: variant for variant in family.variants}
    assert family.accuracy(by_name["large"]) == 1.0 and by_name["large"].least_accuracy == pytest.approx(
        0.1 ** (1 / 30)
    )
    assert family.accuracy(by_name["small"]) < 1.0


def test_the_answers_to_the_samples_are_kept(maker: FamilyMaker) -> None:
    """Labels and scores of each variant, as its whole model gives them, in the family's file and not in its row."""
    family = maker.create("small", "large")
    answers = maker.families.answers(family)
    assert answers.samples == COUNT and answers.answer == "class:scores"
    large = answers.variants["large"]
    assert large.labels == answers.truth and set(large.scores) == {"margin", "probability", "entropy"}
    outputs = run_whole(maker.registry.load(maker.large).prepared, [maker.samples[1][0]])[0]  # type: ignore[list-item]
    assert large.scores["margin"][1] == pytest.approx(score("margin", AnswerRule("class", ("scores",)), outputs))
    document = family_of(family)
    assert document is not None and document.answers is None


def test_a_family_of_an_earlier_version_says_to_create_it_again(maker: FamilyMaker) -> None:
    """Its file has no answers; a model has none either."""
    family = maker.create("small", "large")
    document = family_of(family)
    old = Model(
        shown=family.shown, sha256=maker.registry._blobs.put(msgspec.json.encode(document)), name="b", version=1
    )
    with pytest.raises(UsageError, match=r"create it again .*family create"):
        maker.families.answers(old)
    with pytest.raises(UsageError, match="is no family"):
        maker.families.answers(maker.model)


def test_a_cascade_is_signed_with_the_release(maker: FamilyMaker) -> None:
    """30 samples are three pictures ten times: at 50 % ten may differ, so that one of them stays at least; at 2 % there
    are too few samples."""
    family = maker.create("small", "large")
    asked = CascadeRequest(changed=0.5, variants=("small", "large"))
    links = {CLASS: parse_link("wifi")}
    prices: dict[str, PlannedCascade | PlannedExit] = {}
    digest, manifest = maker.releasing.prepare(family, links, PlanOptions(cascade=asked), on_priced=prices.__setitem__)
    cascade = manifest.plans[CLASS].cascade
    assert cascade is not None and (cascade.first, cascade.second) == ("small", "large")
    assert list(prices) == [CLASS] and prices[CLASS].cascade.threshold == cascade.threshold
    assert cascade.changed.samples == COUNT and cascade.answer == "class:scores" and 0 < cascade.accuracy <= 1
    assert decode_manifest(encode_manifest(manifest)).plans[CLASS].cascade == cascade
    maker.releasing.publish(family, digest, PlanOptions(cascade=asked))
    with pytest.raises(InfeasibleLimits, match=r"30 samples are too few.*at least 114"):
        maker.releasing.prepare(family, links, PlanOptions(cascade=CascadeRequest(changed=0.02)))
    with pytest.raises(UsageError, match="is no family"):
        maker.releasing.prepare(maker.model, links, PlanOptions(cascade=asked))


def test_options_of_a_cascade_survive_the_database() -> None:
    """Stored with the release as JSON, and read again."""
    asked = PlanOptions(cascade=CascadeRequest(changed=0.02, variants=("a", "b"), scores=("margin", "entropy")))
    assert msgspec.convert(asked.as_options(), PlanOptions).cascade == asked.cascade
    assert "cascade" not in PlanOptions().as_options()


def test_the_same_family_is_stored_once(maker: FamilyMaker) -> None:
    """Another one of the name is the next version; a model's name is refused."""
    first = maker.create("small", "large")
    assert maker.create("small", "large").ref == first.ref == "birds@1"
    maker.samples = maker.samples[:-1]
    assert maker.create("small", "large").ref == "birds@2"
    with pytest.raises(Conflict, match="is a model"):
        maker.families.create("small", [VariantRequest(model="small"), VariantRequest(model="large")], maker.samples)


def test_what_is_no_family_is_refused(maker: FamilyMaker) -> None:
    """Each with what to do: both variants are named where their outputs or inputs differ."""
    with pytest.raises(UsageError, match="named twice"):
        maker.create("small", "small@1")
    with pytest.raises(UsageError, match="2 labels were given, each to be one of the 5 of small"):
        maker.create("small", "large", labels=(0, 1))
    with pytest.raises(UsageError, match="at least 20"):
        maker.samples = maker.samples[:5]
        maker.create("small", "large")


def test_a_family_has_no_layers_of_its_own(maker: FamilyMaker) -> None:
    """What needs one model's file says to name a variant."""
    family = maker.create("small", "large")
    with pytest.raises(UsageError, match="name one of its variants"):
        maker.registry.load(family)


def test_a_variant_is_not_removed_before_its_family(maker: FamilyMaker) -> None:
    """The error names the family; afterwards both can go."""
    maker.create("small", "large")
    removal = Removal(maker.database, maker.releasing, now=maker.clock)
    with pytest.raises(Conflict, match="a variant of birds@1"):
        removal.remove_model("large")
    removal.remove_model("birds")
    removal.remove_model("large")


def run_variant(manifest: Manifest, built: BuiltFamily, folder: Path, variant: str, image: np.ndarray) -> np.ndarray:
    """A variant's answer by its slices of the release, one after the other."""
    for one in built.contents:
        (folder / one.slice.name).mkdir(exist_ok=True)
        one.write(folder / one.slice.name)
    programs = load_slices(manifest, lambda name: folder / name, DispatchingRuntime(threads=1))
    order = [slice_.name for slice_ in manifest.slices_of(variant)]
    live = run_slices(programs, order, {"image": image})
    return live[manifest.outputs_of(variant)[0]]


def test_every_variant_is_whole_in_the_release(maker: FamilyMaker, tmp_path: Path) -> None:
    """Cut into slices, each answers as its model does; every row places the slices of its variant only."""
    built = maker.build(maker.create("small", "large"))
    manifest = decode_manifest(encode_manifest(built.manifest))
    assert {variant.name for variant in manifest.family} == {"small", "large"}
    rows = manifest.plans[CLASS].rows
    assert {row.variant for row in rows} == {"small", "large"} and manifest.plans[CLASS].objective == "accuracy"
    folder = tmp_path / "slices"
    folder.mkdir()
    for variant, model in (("small", maker.model), ("large", maker.large)):
        image = maker.samples[0][0]["image"]  # type: ignore[index]
        expected = run_whole(maker.registry.load(model).prepared, [{"image": image}])[0]["scores"]
        assert np.array_equal(run_variant(manifest, built, folder, variant, image), expected)
        for row in (row for row in rows if row.variant == variant):
            assert {*row.device, *row.remote} == {slice_.name for slice_ in manifest.slices_of(variant)}


def test_a_release_above_the_floor_holds_no_other_variant(maker: FamilyMaker) -> None:
    """Its slices are not sent; above the best the floor is refused."""
    family = maker.create("small", "large")
    manifest = maker.build(family, least_accuracy=0.99).manifest
    assert [variant.name for variant in manifest.family] == ["large"]
    assert manifest.plans[CLASS].least_accuracy == 0.99
    document = family_of(family)
    assert document is not None
    with pytest.raises(UsageError, match="not forced"):
        maker.build(family, partition="cloud")


def test_a_floor_that_no_variant_reaches_names_the_best(maker: FamilyMaker) -> None:
    """The samples are mislabelled here, so that no variant is always right."""
    maker.samples = [(sample, (label + 1) % 5) for sample, label in maker.samples]
    with pytest.raises(InfeasibleLimits, match="the best"):
        maker.build(maker.create("small", "large"), least_accuracy=0.99)


def test_a_family_is_released_and_published_like_a_model(maker: FamilyMaker) -> None:
    """The same plans give the same release; weights that it shares with a variant's own release are stored once."""
    family = maker.create("small", "large")
    links = {CLASS: parse_link("wifi")}
    digest, manifest = maker.releasing.prepare(family, links, PlanOptions())
    maker.releasing.publish(family, digest, PlanOptions())
    assert maker.releasing.prepare(family, links, PlanOptions())[0] == digest
    assert maker.releasing.manifest(digest).family == manifest.family
    with pytest.raises(UsageError, match="not recut"):
        maker.releasing.prepare(family, links, PlanOptions(), recut=True)
