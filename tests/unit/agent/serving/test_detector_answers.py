"""What an engine answers for a family of detectors: boxes in one form; how sure a box or an output of one is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from edgesplit.answers.detections import RULE, SPEC
from edgesplit.cascade import Cascade, ChangedShare
from edgesplit.errors import InferenceFailed, TrustError, UsageError
from edgesplit.oip.options import InferOptions
from edgesplit.plan import Plan, Row
from edgesplit.release.manifest import Manifest, ReleaseVariant, Slice, TensorSpec
from edgesplit.runtime import Tensor, Tensors
from edgesplit_agent.policy.audit_budget import AuditLimits
from edgesplit_agent.releases.loaded_release import LoadedRelease, plan_for
from edgesplit_agent.serving.cascade import Cascades
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.serving.still_frames import StillFrames
from edgesplit_agent.state.cascade_store import CascadeStore
from edgesplit_agent.worker.dataflow import dataflow_of
from edgesplit_agent.worker.host import InProcess
from support.agent_engine import CLASS, LINK, LOCAL, ScriptedCloud, Step, eventually, world

NEAR = Row(name="near:local", device=("near.s01",), device_s=0.005, variant="near", accuracy=0.8)
FAR = Row(
    name="far:remote", remote=("far.s01",), sends=("x",), receives=("y",), up_bytes=300, variant="far", accuracy=1.0
)
CASCADE = Cascade(
    first="near", second="far", answer=RULE.to_text(), score="boxes", threshold=0.2, audit_share=0.5,
    changed=ChangedShare(at_most=0.05, certainty=0.9, samples=100, differing=0), escalated=0.3,
)  # fmt: skip
X, FOUND, Y = (TensorSpec(name, "FP32", (1, -1, 6)) for name in ("x", "found", "y"))
SURE = TensorSpec("sure", "FP32", (1,))
LAYOUT = "boxes:detections:0.5"
NEVER, ALWAYS = 1.0, 0.0


def frame(*scores: float) -> Tensor:
    """Things beside each other, which both detectors see with these scores."""
    rows = [[0.2 * at, 0.0, 0.2 * at + 0.2, 0.5, score, at] for at, score in enumerate(scores)]
    return np.array(rows, np.float32).reshape(1, -1, 6)


class NearProgram:
    """The near detector sees what is in the frame, and says how sure it is in its own way: the number of things."""

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        return {"found": tensors["x"], "sure": np.array([tensors["x"].shape[1]], np.float32)}


@dataclass
class Detectors:
    """The family behind an engine, and its far detector."""

    engine: Engine
    cloud: ScriptedCloud

    def ask(self, *scores: float, **options: Any) -> Any:
        return self.engine.infer("dets", {"x": frame(*scores)}, deadline_s=20.0, options=InferOptions(**options))

    def status(self) -> dict[str, Any]:
        status = self.engine.cascades.status("dets")
        assert status is not None
        return status


def make_manifest(cascade: Cascade | None = CASCADE, near: str = LAYOUT, far: str = LAYOUT, **plan: Any) -> Manifest:
    """The family's release."""
    table = Plan(model="dets@1", device_class=CLASS, rows=(FAR, NEAR), link=LINK, cascade=cascade, **plan)
    variants = tuple(
        ReleaseVariant(
            name=row.variant, model=f"{row.variant}@1", model_sha256="1" * 64, accuracy=row.accuracy or 0.0,
            least_accuracy=0.5, samples=100, outputs=(output,), answer=answer,
        )
        for row, output, answer in ((NEAR, "found", near), (FAR, "y", far))
    )  # fmt: skip
    slices = (
        Slice("near.s01", "onnx", ("near:a",), (X,), (FOUND, SURE)),
        Slice("far.s01", "onnx", ("far:a",), (X,), (Y,)),
    )
    return Manifest(
        model="dets@1", model_sha256="0" * 64, created="2026-01-01T00:00:00Z", input_spec=None, inputs=(X,),
        outputs=(SPEC,), slices=slices, plans={CLASS: table}, variants=variants,
    )  # fmt: skip


def loaded(manifest: Manifest) -> LoadedRelease:
    return LoadedRelease("b" * 64, manifest, plan_for(manifest, CLASS), InProcess({"near.s01": NearProgram()}))


@contextmanager
def detectors(draw: Callable[[], float] = lambda: NEVER, **fields: Any) -> Iterator[Detectors]:
    with world(LOCAL, margin_s=0.02) as (engine, cloud, _):
        cloud.steps = {"a": Step("x", "h", lambda x: x), "b": Step("h", "y", lambda h: h)}
        engine.cascades = Cascades(engine.cascades._steps, CascadeStore(), AuditLimits(1e9, 1e9), draw)
        engine.serve("dets", loaded(make_manifest(**fields)))
        yield Detectors(engine, cloud)


def test_boxes_that_are_far_from_the_threshold_are_sure() -> None:
    """From either side. Given are those that count, as one tensor; nothing is sent."""
    with detectors() as family:
        answer = family.ask(0.9, 0.1, 0.8)
        assert set(answer.outputs) == {"boxes"} and not family.cloud.asked
        assert answer.outputs["boxes"][0, :, 4] == pytest.approx([0.9, 0.8])
        assert answer.outputs["boxes"][0, :, 5].tolist() == [0.0, 2.0]
        assert answer.report.variant == "near" and answer.report.score == pytest.approx(0.3)


def test_a_box_near_the_threshold_is_escalated() -> None:
    """Also one below it, which is not given. The far detector's boxes are those above its own threshold."""
    with detectors(far="boxes:detections:0.3") as family:
        answer = family.ask(0.9, 0.45)
        assert answer.report.escalated and answer.report.score == pytest.approx(0.05)
        assert answer.outputs["boxes"][0, :, 4] == pytest.approx([0.9, 0.45])


def test_an_output_that_is_named_is_the_score() -> None:
    """It decides, and is not given to the application; the worker returns it for this."""
    cascade = msgspec.structs.replace(CASCADE, score="output", score_output="sure", threshold=2.0)
    with detectors(cascade=cascade) as family:
        sure, unsure = family.ask(0.51, 0.49), family.ask(0.9)
        assert sure.report.variant == "near" and sure.report.score == 2.0 and set(sure.outputs) == {"boxes"}
        assert unsure.report.escalated and unsure.report.score == 1.0
    assert "sure" in dataflow_of(make_manifest(cascade), ["near.s01"]).returns
    assert "sure" not in dataflow_of(make_manifest(), ["near.s01"]).returns


@pytest.mark.parametrize("moved", [0.0, 0.2])
def test_audits_compare_boxes(moved: float) -> None:
    """What the far detector sees elsewhere has no partner, and what it sees in the same place has one."""
    with detectors(draw=lambda: ALWAYS) as family:
        family.cloud.steps["b"]._of = lambda h: h + np.array([moved, 0, moved, 0, 0, 0], np.float32)
        assert family.ask(0.9).report.variant == "near"
        eventually("it is audited", lambda: family.status()["audited"] == 1)
        assert family.status()["changed"] == (moved > 0)


def test_agreement_is_no_accuracy() -> None:
    """No answer states one, and a floor is refused."""
    with detectors(agreement_with="far") as family:
        assert family.ask(0.9).report.accuracy == 0.0
        with pytest.raises(UsageError, match=r"have no labels.*agree with far"):
            family.ask(0.9, least_accuracy=0.5)
    with detectors() as family:
        assert family.ask(0.9).report.accuracy == 0.8


def test_a_layout_that_is_unknown_here_is_not_run() -> None:
    """By an agent that is older than it; without any other row the release is refused."""
    assert [row.name for row in plan_for(make_manifest(near="boxes:mystery:0.5"), CLASS).rows] == ["far:remote"]
    with pytest.raises(TrustError, match="boxes:mystery"):
        plan_for(make_manifest(near="boxes:mystery:0.5", far="boxes:mystery:0.5"), CLASS)


def test_a_class_without_a_label_is_a_failure_of_the_release() -> None:
    """Not of the request."""
    release = loaded(make_manifest())
    near = msgspec.structs.replace(release.manifest.family[0], labels=(0,))
    release.manifest = msgspec.structs.replace(release.manifest, variants=(near,))
    with pytest.raises(InferenceFailed, match=r"the answer of near is none: .*1 classes"):
        release.outputs_by("near", {"found": frame(0.9, 0.9)})
    with pytest.raises(InferenceFailed, match="no output 'found'"):
        release.outputs_by("near", {})


def test_still_frames_repeat_boxes_without_being_told_what_an_answer_is() -> None:
    """The family says it."""
    with detectors() as family:
        family.engine.still_frames = StillFrames(draw=lambda: NEVER, spacing_s=0.0)
        seen = [family.ask(0.9, skip_still=0.5).report.repeated_age_s for _ in range(40)]
        assert any(seen)


@pytest.mark.parametrize(("moved", "changed"), [(0.05, 0), (0.5, 1)])
def test_values_that_are_close_are_the_same(moved: float, changed: int) -> None:
    """A family of models that give values: outputs as they are, sure by an output that is none of them."""
    cascade = msgspec.structs.replace(
        CASCADE, answer="close:0.1", score="output", score_output="sure", threshold=2.0
    )  # fmt: skip
    with detectors(draw=lambda: ALWAYS, cascade=cascade, near="", far="") as family:
        family.cloud.steps["b"]._of = lambda h: h + np.float32(moved)
        given = family.ask(0.9, 0.8)
        assert given.report.variant == "near" and np.array_equal(given.outputs["boxes"], frame(0.9, 0.8))
        eventually("it is audited", lambda: family.status()["audited"] == 1)
        assert family.status()["changed"] == changed
