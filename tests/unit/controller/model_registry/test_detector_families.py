"""Families of detectors, and of other models: accuracy by boxes or agreement with a reference, what is refused, and the
release."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.detections import RULE, SPEC, to_detections
from edgesplit.answers.score import score
from edgesplit.errors import UsageError
from edgesplit.release.manifest import decode_manifest, encode_manifest
from edgesplit_controller.model_registry.families import VariantRequest, family_of, family_to_dict
from edgesplit_controller.model_registry.golden import model_inputs, run_whole
from edgesplit_partitioner.planner.cascade_calibration import CascadeRequest
from support.detector_family import COUNT, DetectorFamily
from support.detectors import LARGE, SMALL, SURE
from support.release_maker import CLASS

ASKED = CascadeRequest(changed=0.1)


@pytest.fixture
def maker(tmp_path: Path) -> DetectorFamily:
    return DetectorFamily(tmp_path)


def test_accuracy_is_the_share_of_pictures_whose_boxes_are_all_right(maker: DetectorFamily) -> None:
    """The large one finds all, by construction; the small one not in every picture. Kept are the pictures by which both
    differ, and how sure each is."""
    stored = maker.create()
    family, answers = family_of(stored), maker.families.answers(stored)
    assert family is not None and not family.reference
    near, far = family.variants
    assert far.right == COUNT and COUNT * 0.7 < near.right < COUNT
    assert (near.answer, far.answer) == (SMALL, LARGE) and answers.answer == RULE.to_text()
    # Where truth is what the large one answers, a wrong answer is one that differs from it.
    assert answers.differs("near", "far") == [not right for right in answers.right("near")]
    assert answers.differs("far", "near") == answers.differs("near", "far")
    assert set(answers.variants["near"].scores) == {"boxes"} and not answers.truth
    near_model = maker.registry.load(maker.registry.get("near"))
    outputs = run_whole(near_model.prepared, [model_inputs(near_model, maker.pictures[4].jpeg)])[0]
    own = AnswerRule("boxes", ("dets",), layout="yolox", threshold=0.5)
    assert answers.variants["near"].scores["boxes"][4] == pytest.approx(score("boxes", own, outputs))


def test_without_labels_agreement_is_known_and_no_floor_is_held(maker: DetectorFamily) -> None:
    """With the last variant, or with the one that is named; the plan says so, and a floor is refused."""
    stored = maker.create(labelled=False)
    shown = family_to_dict(stored)
    assert shown["reference"] == "far"
    near, far = shown["variants"]
    assert (far["accuracy"], far["least_accuracy"]) == (1.0, 1.0) and 0.7 < near["accuracy"] < 1.0
    result = maker.plan(stored, cascade=ASKED)
    assert result.table.agreement_with == "far" and result.to_builtins()["reference"] == "far"
    assert result.cascade is not None and result.cascade.least_accuracy == pytest.approx(0.9)
    with pytest.raises(UsageError, match=r"have no labels.*agree with far.*create the family with labels"):
        maker.plan(stored, least_accuracy=0.5)
    other = family_to_dict(maker.create(labelled=False, reference="near@1"))
    assert other["reference"] == "near" and other["variants"][0]["right"] == COUNT
    with pytest.raises(UsageError, match="none of the variants"):
        maker.create(labelled=False, reference="elsewhere")
    with pytest.raises(UsageError, match="leave the reference out"):
        maker.create(reference="far")


def test_classifiers_without_labels_are_compared_with_the_reference_too(maker: DetectorFamily) -> None:
    """Its answers stand for the labels."""
    rng = np.random.default_rng(2)
    images = [{"image": rng.standard_normal((1, 3, 16, 16)).astype(np.float32)} for _ in range(30)]
    variants = [VariantRequest(model=maker.model.ref), VariantRequest(model=maker.push_twin().ref)]
    stored = maker.families.create("birds", variants, [(image, None) for image in images])
    answers = maker.families.answers(stored)
    assert answers.reference == family_to_dict(stored)["reference"] == "twin"
    assert answers.truth == answers.variants["twin"].labels and all(answers.right("twin"))
    assert maker.plan(stored).table.agreement_with == "twin"


def test_a_cascade_of_detectors_is_planned_and_released(maker: DetectorFamily) -> None:
    """By the least margin of a box, which is the usual score. The release gives boxes in one form; each variant has its
    own rule for its own outputs."""
    stored = maker.create()
    manifest = decode_manifest(encode_manifest(maker.build(stored, cascade=ASKED).manifest))
    assert manifest.outputs == (SPEC,)
    assert {v.name: (v.answer, v.outputs) for v in manifest.family} == {
        "near": (SMALL, ("dets",)), "far": (LARGE, ("output0",)),
    }  # fmt: skip
    cascade = manifest.plans[CLASS].cascade
    assert cascade is not None and (cascade.first, cascade.second, cascade.score) == ("near", "far", "boxes")
    assert cascade.answer == RULE.to_text() and 0.0 < cascade.threshold <= 0.5 and cascade.changed.samples == COUNT
    with pytest.raises(UsageError, match=r"no score margin: give boxes"):
        maker.plan(stored, cascade=msgspec.structs.replace(ASKED, scores=("margin",))).cascade  # noqa: B018


def test_an_output_of_the_first_variant_may_be_the_score(tmp_path: Path) -> None:
    """It is returned by no request, and the release names it for the device; the second variant has none."""
    maker = DetectorFamily(tmp_path, with_score=True)
    stored = maker.create()
    answers = maker.families.answers(stored)
    assert set(answers.variants["near"].scores) == {"boxes", f"output:{SURE}"}
    asked = msgspec.structs.replace(ASKED, scores=(f"output:{SURE}",))
    manifest = maker.build(stored, cascade=asked).manifest
    cascade = manifest.plans[CLASS].cascade
    assert cascade is not None and (cascade.score, cascade.score_output) == ("output", SURE)
    assert manifest.score_outputs == {SURE} and manifest.outputs == (SPEC,)
    both = maker.plan(stored, cascade=msgspec.structs.replace(ASKED, scores=("boxes", f"output:{SURE}"))).cascade
    assert both is not None and both.tested == 2
    with pytest.raises(UsageError, match=rf"no score output:gone: give boxes, output:{SURE}"):
        maker.plan(stored, cascade=msgspec.structs.replace(ASKED, scores=("output:gone",))).cascade  # noqa: B018


def test_values_that_are_close_make_a_family(maker: DetectorFamily) -> None:
    """Two models of one shape; the looser the tolerance, the more agree. Labels say nothing of them."""
    maker.push(maker.softer_detector(), "soft")
    variants = [VariantRequest(model="soft"), VariantRequest(model="near")]
    samples = maker.samples(labelled=False)
    loose, strict = (
        maker.families.create(name, variants, samples, answer=f"close:{tolerance}")
        for name, tolerance in (("loose", 0.4), ("strict", 0.001))
    )
    agreeing = [family_to_dict(stored)["variants"][0]["right"] for stored in (loose, strict)]
    assert agreeing[0] > agreeing[1]
    manifest = maker.build(loose).manifest
    assert [spec.name for spec in manifest.outputs] == ["dets"] and not any(v.answer for v in manifest.family)
    with pytest.raises(UsageError, match="must be named: their models have no output of one number"):
        maker.plan(loose, cascade=ASKED).cascade  # noqa: B018
    with pytest.raises(UsageError, match="not compared with labels"):
        maker.families.create("loose", variants, maker.samples(labelled=True), answer="close:0.1")


@pytest.mark.parametrize(
    ("near", "far", "says"),
    [
        ("", "", r"near: its outputs \(dets\) are not one classification.*class:OUTPUT, boxes:LAYOUT or close:0.01"),
        (SMALL, "close:0.1", r"outputs of near and far mean different things: boxes:yolox:0.5 and close:0.1"),
        ("close:0.1", "close:0.1", r"near and far mean different things: dets .*\[1, 84, 8\] and output0 .*as many"),
        ("boxes:yolov8", LARGE, r"near: boxes:yolov8 needs one output"),
    ],
)  # fmt: skip
def test_outputs_that_mean_different_things_are_refused(maker: DetectorFamily, near: str, far: str, says: str) -> None:
    """Both are named, with what may be said."""
    with pytest.raises(UsageError, match=says):
        maker.create(labelled=False, near=near, far=far)


def test_labels_of_another_kind_are_refused(maker: DetectorFamily) -> None:
    """Classes for boxes; and labels of some samples only."""
    variants = [VariantRequest(model="near", answer=SMALL), VariantRequest(model="far", answer=LARGE)]
    samples = maker.samples(labelled=True)
    with pytest.raises(UsageError, match="labels are no boxes"):
        maker.families.create("dets", variants, [(frame, 1) for frame, _ in samples])
    with pytest.raises(UsageError, match="1 of 60 samples have no label"):
        maker.families.create("dets", variants, [*samples[:-1], (samples[-1][0], None)])


def test_both_variants_give_the_same_form(maker: DetectorFamily) -> None:
    """Whatever layouts and input sizes they have, a clear picture gives the same boxes, in parts of the frame."""
    given = []
    for name, rule in (
        ("near", AnswerRule("boxes", ("dets",), layout="yolox", threshold=0.5)),
        ("far", AnswerRule("boxes", ("output0",), layout="yolov8", threshold=0.5)),
    ):
        loaded = maker.registry.load(maker.registry.get(name))
        outputs = run_whole(loaded.prepared, [model_inputs(loaded, picture.jpeg) for picture in maker.pictures[:8]])
        given.append([sorted(to_detections(rule, one)["boxes"][0][:, [0, 1, 5]].tolist()) for one in outputs])
    same = [near == far for near, far in zip(*given, strict=True)]
    assert sum(same) >= 5 and any(given[1])
