"""What an engine answers with an early exit: it ends there, goes on without computing anything twice, and audits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from edgesplit.cascade import EXIT, WHOLE, Cascade, ChangedShare
from edgesplit.errors import MalformedMessage, Unsure
from edgesplit.oip.options import InferOptions
from edgesplit.plan import Plan, Row
from edgesplit.release.manifest import Manifest, Slice, TensorSpec, decode_manifest, encode_manifest
from edgesplit.runtime import Tensor
from edgesplit_agent.policy.audit_budget import AuditLimits
from edgesplit_agent.releases.loaded_release import LoadedRelease, plan_for
from edgesplit_agent.serving.cascade import Cascades
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.state.cascade_store import CascadeStore
from edgesplit_agent.worker.dataflow import dataflow_of
from edgesplit_agent.worker.host import InProcess
from edgesplit_agent.worker.session_merging import merges_of
from support.agent_engine import CLASS, LINK, LOCAL, H, ScriptedCloud, Step, X, Y, eventually, unavailable, world

EARLY = TensorSpec("early", "FP32", (4,))
"""Other in shape than the output, `y`."""
ALONE = Row(name="local", device=("a", "e", "b"), device_s=0.02)
CUT = Row(
    name="cut-1", device=("a", "e"), remote=("b",), sends=("h",), receives=("y",), up_bytes=300, device_s=0.01
)  # fmt: skip
BOTH = (CUT, ALONE)
CASCADE = Cascade(
    first=EXIT, second=WHOLE, answer="class:y", score="margin", threshold=0.5, audit_share=0.5, exit_output="early",
    changed=ChangedShare(at_most=0.05, certainty=0.9, samples=100, differing=0), escalated=0.3,
)  # fmt: skip
CLEAR = np.array([[0.0, 0.1, 0.1, 0.8]], np.float32)
"""The exit is sure of class 3 by 0.7, and y = 2 (x + 1) says the same."""
VAGUE = np.array([[0.3, 0.4, 0.2, 0.1]], np.float32)
NEVER, ALWAYS = 1.0, 0.0
LONG_S = 20.0


def manifest(*rows: Row, cascade: Cascade | None = CASCADE, **fields: Any) -> Manifest:
    """x -> h; h -> early by a head of its own; h -> y."""
    slices = (
        Slice("a", "onnx", ("a",), (X,), (H,)),
        Slice("e", "onnx", ("e",), (H,), (EARLY,)),
        Slice("b", "onnx", ("b",), (H,), (Y,)),
    )
    plan = Plan(
        model="birds@1", device_class=CLASS, rows=rows, link=LINK, slice_s={"a": 0.01, "e": 0.001, "b": 0.01},
        cascade=cascade, **fields,
    )  # fmt: skip
    return Manifest(
        model="birds@1", model_sha256="0" * 64, created="2026-01-01T00:00:00Z", input_spec=None, inputs=(X,),
        outputs=(Y,), slices=slices, plans={CLASS: plan},
    )  # fmt: skip


@dataclass
class Birds:
    """A model with an early exit behind an engine."""

    engine: Engine
    cloud: ScriptedCloud
    steps: dict[str, Step]

    def ask(self, frame: Tensor = CLEAR, *, deadline_s: float = LONG_S, **options: Any) -> Any:
        return self.engine.infer("birds", {"x": frame}, deadline_s=deadline_s, options=InferOptions(**options))

    @property
    def runs(self) -> dict[str, int]:
        """Runs of each slice here."""
        return {name: step.runs for name, step in self.steps.items()}

    @property
    def status(self) -> dict[str, Any]:
        status = self.engine.cascades.status("birds")
        assert status is not None
        return status


@contextmanager
def birds(*rows: Row, draw: Callable[[], float] = lambda: NEVER, **fields: Any) -> Iterator[Birds]:
    steps = {
        "a": Step("x", "h", lambda x: x + np.float32(1)),
        "e": Step("h", "early", lambda h: (h - np.float32(1)).reshape(4)),
        "b": Step("h", "y", lambda h: h * np.float32(2)),
    }
    described = manifest(*rows, **fields)
    release = LoadedRelease("b" * 64, described, plan_for(described, CLASS), InProcess(steps))
    with world(LOCAL, margin_s=0.02) as (engine, cloud, _):
        engine.cascades = Cascades(engine.cascades._steps, CascadeStore(), AuditLimits(1e9, 1e9), draw)
        engine.serve("birds", release)
        yield Birds(engine, cloud, steps)


def whole(frame: Tensor) -> Tensor:
    """What the model answers to the end."""
    answer: Tensor = (frame + np.float32(1)) * np.float32(2)
    return answer


@pytest.mark.parametrize("rows", [BOTH, (ALONE,), (CUT,)], ids=["both", "local", "cut"])
def test_a_sure_answer_is_the_exits(rows: tuple[Row, ...]) -> None:
    """Bit for bit, under the output's name and in its shape; nothing behind the exit runs, and nothing is sent."""
    with birds(*rows) as model:
        answer = model.ask()
        early = (CLEAR + np.float32(1)) - np.float32(1)
        assert list(answer.outputs) == ["y"] and answer.outputs["y"].shape == (1, 4)
        assert np.array_equal(answer.outputs["y"], early)
        assert model.runs == {"a": 1, "e": 1, "b": 0} and not model.cloud.asked
        report = answer.report
        assert report.score == pytest.approx(0.7) and not (report.escalated or report.unsure or report.fallback)
        assert report.row == EXIT and "exit is sure: score 0.7, 0.5 needed" in report.reason
        assert report.predicted_s == pytest.approx(0.011)


@pytest.mark.parametrize("rows", [BOTH, (ALONE,), (CUT,)], ids=["both", "local", "cut"])
def test_an_unsure_request_goes_on_behind_the_exit(rows: tuple[Row, ...]) -> None:
    """By the selected row, whole bit for bit; no slice runs twice here, and the cloud gets the boundary."""
    with birds(*rows) as model:
        answer = model.ask(VAGUE)
        assert np.array_equal(answer.outputs["y"], whole(VAGUE)) and list(answer.outputs) == ["y"]
        report, is_local = answer.report, rows == (ALONE,)
        assert (report.escalated, report.row) == (True, "local" if is_local else "cut-1")
        assert model.runs == {"a": 1, "e": 1, "b": int(is_local)}
        assert model.cloud.steps["a"].runs == 0 and model.cloud.steps["b"].runs == int(not is_local)
        assert report.score == pytest.approx(0.1) and report.reason.startswith("exit was unsure, score 0.1, 0.5 needed")
        assert report.device_s > 0 and report.predicted_s < 0.05, "what is before the exit is predicted once"


@pytest.mark.parametrize("cause", ["fails", "breaker"])
def test_without_the_cloud_the_device_goes_on(cause: str) -> None:
    """The local rest runs from the boundary, so that nothing is unsure."""
    with birds(*BOTH) as model:
        model.cloud.script = unavailable
        model.cloud.healthy = False
        for _ in range(5 if cause == "breaker" else 1):
            answer = model.ask(VAGUE)
        assert np.array_equal(answer.outputs["y"], whole(VAGUE))
        assert answer.report.escalated and not answer.report.unsure
        assert model.runs["a"] == model.runs["e"] == model.runs["b"]


@pytest.mark.parametrize("refuse", [False, True])
def test_what_is_late_is_answered_early_and_marked(refuse: bool) -> None:
    """Or refused, where the application wants that."""
    with birds(CUT) as model:
        model.cloud.script = model.cloud.hold
        if refuse:
            with pytest.raises(Unsure, match="whole could not be asked in time"):
                model.ask(VAGUE, deadline_s=0.5, refuse_unsure=True)
            return
        answer = model.ask(VAGUE, deadline_s=0.5)
        assert answer.report.unsure and not answer.report.escalated
        assert np.array_equal(answer.outputs["y"].argmax(), VAGUE.argmax()) and model.runs["e"] == 1


def test_a_forced_row_ends_early_too() -> None:
    """It is the row by which unsure requests go on."""
    with birds(*BOTH, forced_row="local") as model:
        assert model.ask(CLEAR).report.row == EXIT
        assert model.ask(VAGUE).report.row == "local" and not model.cloud.asked


def test_the_only_row_is_no_shortcut_past_the_exit() -> None:
    """Lanes and preselection go by it."""
    described = manifest(ALONE)
    assert LoadedRelease("b" * 64, described, described.plans[CLASS], InProcess({})).only_row is None
    described = manifest(ALONE, cascade=None)
    assert LoadedRelease("b" * 64, described, described.plans[CLASS], InProcess({})).only_row == ALONE


@pytest.mark.parametrize("rows", [(CUT,), (ALONE,)], ids=["cut", "local"])
def test_an_audit_runs_the_rest_from_the_boundary(rows: tuple[Row, ...]) -> None:
    """After the answer, from copies: the application uses its memory again. What differs is counted as changed."""
    with birds(*rows, draw=lambda: ALWAYS) as model:
        frame = CLEAR.copy()
        answer = model.ask(frame)
        frame[:] = 0.0
        assert not answer.report.escalated
        eventually("it is compared", lambda: model.status["audited"] == 1)
        assert (model.status["changed"], model.runs["a"], model.runs["e"]) == (0, 1, 1)
        assert model.runs["b"] + model.cloud.steps["b"].runs == 1 and model.cloud.steps["a"].runs == 0
        for step in (model.steps["b"], model.cloud.steps["b"]):
            step._of = lambda h: -h
        model.ask(CLEAR)
        eventually("it is compared", lambda: model.status["audited"] == 2)
        assert model.status["changed"] == 1
        assert model.status["answered"] == {EXIT: 2}


def test_a_worker_returns_the_exit_and_merges_up_to_it() -> None:
    """In mode fast what runs at once ends at the exit."""
    described = manifest(*BOTH)
    assert dataflow_of(described, ["a", "e"]).returns == ("h", "early")
    assert dataflow_of(manifest(*BOTH, cascade=None), ["a", "e"]).returns == ("h",)
    runs = [merge.order for merge in merges_of(described, described.plans[CLASS], 10**9)]
    assert all(set(run) <= {"a", "e"} or set(run) <= {"b"} for run in runs)


def test_an_exit_is_signed_with_its_plan() -> None:
    """It comes back as it was."""
    described = manifest(*BOTH)
    assert decode_manifest(encode_manifest(described)) == described
    assert described.slices_for("early") == ("a", "e") and described.exit_outputs == {"early"}
    assert b"exit_output" not in encode_manifest(manifest(*BOTH, cascade=None))


@pytest.mark.parametrize(
    ("changes", "rows", "told"),
    [
        ({"exit_output": "late"}, BOTH, "not computed by a part"),
        ({"exit_output": "y"}, BOTH, "not computed by a part"),
        ({"first": "a"}, BOTH, "not of one model with one output"),
        ({}, (ALONE, Row(name="r", remote=("a", "e", "b"), sends=("x",), receives=("y",))), "row 'r' does not compute"),
        ({"escalated": 2.0}, BOTH, "not between 0 and 1"),
    ],
)
def test_an_exit_that_no_device_could_keep_is_refused(
    changes: dict[str, Any], rows: tuple[Row, ...], told: str
) -> None:
    """When the release is made, and by each device."""
    described = manifest(*rows, cascade=msgspec.structs.replace(CASCADE, **changes))
    with pytest.raises(MalformedMessage, match=told):
        decode_manifest(encode_manifest(described))


def test_an_exit_of_another_size_answers_nothing() -> None:
    """The whole model does."""
    with birds(*BOTH) as model:
        model.steps["e"]._of = lambda h: h[:, :3]
        answer = model.ask(CLEAR)
        assert answer.report.escalated and answer.report.score is None
        assert np.array_equal(answer.outputs["y"], whole(CLEAR))
