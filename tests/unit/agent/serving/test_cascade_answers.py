"""What an engine answers by a cascade: sure, escalated, unsure; its audits; and what a restart keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgesplit.cascade import Cascade, ChangedShare
from edgesplit.errors import InferenceFailed, LinkError, Unsure
from edgesplit.mqtt.messages import CASCADE_CHANGED
from edgesplit.mqtt.telemetry import ROW_REASON_CHARS
from edgesplit.observability import metrics
from edgesplit.oip.options import InferOptions
from edgesplit.plan import Plan, Row
from edgesplit.release.manifest import Manifest, ReleaseVariant, Slice
from edgesplit.runtime import Tensor
from edgesplit_agent.policy.audit_budget import AuditLimits
from edgesplit_agent.power.mode import PowerMode
from edgesplit_agent.releases.loaded_release import LoadedRelease, plan_for
from edgesplit_agent.serving.cascade import Cascades
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.serving.metrics import engine_series, outcome_label
from edgesplit_agent.serving.still_frames import StillFrames
from edgesplit_agent.state.cascade_store import CascadeStore
from edgesplit_agent.telemetry.conditions import reported_conditions
from edgesplit_agent.telemetry.windows import TelemetryWindows, with_cascades
from edgesplit_agent.worker.host import InProcess
from support.agent_engine import (
    CLASS,
    LINK,
    LOCAL,
    RecordList,
    ScriptedCloud,
    Step,
    X,
    Y,
    eventually,
    unavailable,
    world,
)

LONG_S = 20.0
SMALL = Row(name="small:local", device=("small.s01",), device_s=0.005, variant="small", accuracy=0.6)
LARGE = Row(
    name="large:remote", remote=("large.s01",), sends=("x",), receives=("y",), up_bytes=300, variant="large",
    accuracy=0.9,
)  # fmt: skip
CASCADE = Cascade(
    first="small", second="large", answer="class:y", score="margin", threshold=0.5, audit_share=0.5,
    changed=ChangedShare(at_most=0.05, certainty=0.9, samples=100, differing=0), escalated=0.3,
)  # fmt: skip
CLEAR = np.array([[0.0, 0.1, 0.1, 0.8]], np.float32)
"""The small one is sure of class 3, and the large one (2 (x + 1)) says the same."""
VAGUE = np.array([[0.3, 0.4, 0.2, 0.1]], np.float32)
NEVER, ALWAYS = 1.0, 0.0
UNBOUNDED = AuditLimits(1e9, 1e9)


@dataclass
class Birds:
    """A family behind an engine: a small variant here, whose answer is its input, and a large one in the cloud."""

    engine: Engine
    cloud: ScriptedCloud
    small: Step
    release: LoadedRelease

    def ask(self, frame: Tensor = CLEAR, *, deadline_s: float = LONG_S, request_id: str = "", **options: Any) -> Any:
        return self.engine.infer(
            "birds", {"x": frame}, deadline_s=deadline_s, request_id=request_id, options=InferOptions(**options)
        )

    @property
    def status(self) -> dict[str, Any]:
        status = self.engine.cascades.status("birds")
        assert status is not None
        return status

    def audited(self, frames: int) -> None:
        """Wait until so many audits are known."""
        eventually("audits", lambda: self.status["audited"] + self.status["unaudited"] >= frames)


def make_release(
    *, cascade: Cascade | None = CASCADE, digest: str = "b" * 64, **fields: Any
) -> tuple[LoadedRelease, Step]:
    """A release of the family, and the small variant's program."""
    slices = (
        Slice("small.s01", "onnx", ("small:a",), (X,), (Y,)),
        Slice("large.s01", "onnx", ("large:a",), (X,), (Y,)),
    )
    plan = Plan(
        model="birds@1", device_class=CLASS, rows=(LARGE, SMALL), link=LINK, objective="accuracy", cascade=cascade,
        slice_s={"small.s01": 0.005}, **fields,
    )  # fmt: skip
    variants = tuple(
        ReleaseVariant(
            name=row.variant, model=f"{row.variant}@1", model_sha256="1" * 64, accuracy=row.accuracy or 0.0,
            least_accuracy=0.5, samples=100, outputs=("y",),
        )
        for row in (SMALL, LARGE)
    )  # fmt: skip
    manifest = Manifest(
        model="birds@1", model_sha256="0" * 64, created="2026-01-01T00:00:00Z", input_spec=None, inputs=(X,),
        outputs=(Y,), slices=slices, plans={CLASS: plan}, variants=variants,
    )  # fmt: skip
    small = Step("x", "y", lambda x: x)
    return LoadedRelease(digest, manifest, plan_for(manifest, CLASS), InProcess({"small.s01": small})), small


@contextmanager
def birds(
    draw: Callable[[], float] = lambda: NEVER, store: CascadeStore | None = None, limits: AuditLimits = UNBOUNDED,
    **fields: Any,
) -> Iterator[Birds]:  # fmt: skip
    release, small = make_release(**fields)
    with world(LOCAL, margin_s=0.02) as (engine, cloud, _):
        engine.cascades = Cascades(engine.cascades._steps, store or CascadeStore(), limits, draw)
        engine.serve("birds", release)
        yield Birds(engine, cloud, small, release)


def test_a_sure_answer_is_given_at_once() -> None:
    """It names its variant and its score; nothing is sent."""
    with birds() as family:
        answer = family.ask()
        report = answer.report
        assert np.array_equal(answer.outputs["y"], CLEAR) and not family.cloud.asked
        assert (report.variant, report.accuracy, report.row) == ("small", 0.6, "small:local")
        assert report.score == pytest.approx(0.7) and not (report.escalated or report.unsure or report.fallback)
        assert "small is sure: score 0.7, 0.5 needed" in report.reason


def test_an_unsure_answer_is_escalated() -> None:
    """The second variant answers, from the input; the report has the first one's score and both times."""
    with birds() as family:
        kept = RecordList()
        family.engine.observe(kept)
        answer = family.ask(VAGUE)
        report = answer.report
        assert np.array_equal(answer.outputs["y"], (VAGUE + 1) * 2)
        assert (report.variant, report.accuracy, report.row) == ("large", 0.9, "large:remote")
        assert report.score == pytest.approx(0.1) and report.escalated and not report.unsure
        assert report.reason.startswith("small was unsure, score 0.1, 0.5 needed; ")
        assert report.device_s > 0 and report.up_bytes > 0 and report.predicted_s >= 0.005
        assert family.small.runs == 1 and len(kept.records) == 1 and kept.records[0].outcome == report


def test_the_reason_tells_who_answers_most() -> None:
    """Not the last escalation alone; of what came since the last report, or before it where nothing did."""
    with birds() as family:
        cascades = family.engine.cascades
        assert cascades.reason("birds", "as planned") == cascades.reason("other", "as planned") == "as planned"
        family.ask()
        sure = "small on this device is sure of 100 % of the requests"
        assert cascades.reason("birds", "") == cascades.reason("birds", "an old one") == sure
        for frame in (CLEAR, CLEAR, VAGUE):
            family.ask(frame)
        told = cascades.reason("birds", "the cloud: as planned")
        assert told == f"{sure.replace('100', '75')}, else large is asked: the cloud: as planned"
        cascades.close_windows()
        assert cascades.reason("birds", "the cloud: as planned") == told
        family.ask(VAGUE)
        assert cascades.reason("birds", "why").startswith("small on this device is sure of 0 % of the requests, else")
        assert len(cascades.reason("birds", "x" * 400)) <= ROW_REASON_CHARS


@pytest.mark.parametrize("cause", ["fails", "breaker", "late"])
def test_without_the_cloud_the_unsure_answer_is_given_and_marked(cause: str) -> None:
    """It is not computed again; it is in time, and says why."""
    with birds() as family:
        if cause == "late":
            family.cloud.script = family.cloud.hold
        else:
            family.cloud.script = unavailable
        for _ in range(4 if cause == "breaker" else 1):
            answer = family.ask(VAGUE, deadline_s=3.0 if cause == "late" else LONG_S)
        report = answer.report
        assert np.array_equal(answer.outputs["y"], VAGUE)
        assert (report.variant, report.unsure, report.escalated) == ("small", True, False)
        assert report.score == pytest.approx(0.1) and "large could not be asked in time" in report.reason
        assert family.small.runs == family.status["unsure"] == family.status["answered"]["small"]


def test_a_request_may_refuse_unsure_answers() -> None:
    """A typed error says so. It is the application's wish: it is not the release's fault, and a retry runs again."""
    with birds() as family:
        kept = RecordList()
        windows = family.engine.observe(TelemetryWindows())
        family.engine.observe(kept)
        family.cloud.script = unavailable
        with pytest.raises(Unsure, match=r"small is unsure, score 0\.1, 0\.5 needed, and large could not be asked"):
            family.ask(VAGUE, refuse_unsure=True, request_id="1")
        assert outcome_label(kept.records[0].outcome) == "unsure"  # type: ignore[arg-type]
        assert windows().close_windows(family.engine.serving, family.engine.conditions)[0].failed == 0
        assert family.status["unsure"] == 1 and family.status["answered"] == {"small": 0}
        assert family.ask(CLEAR, refuse_unsure=True).report.variant == "small", "a sure one is given"
        family.cloud.script = lambda request, good: good
        eventually("asked again", lambda: _variant_of(family) == "large")


def _variant_of(family: Birds) -> str:
    try:
        return str(family.ask(VAGUE, refuse_unsure=True, request_id="1").report.variant)
    except Unsure:
        return ""


def test_a_stale_answer_that_is_unsure_is_not_given_to_who_refuses_it() -> None:
    """Even where it accepts stale ones."""
    with birds() as family:
        family.cloud.script = unavailable
        assert family.ask(VAGUE, stream="door", stale_ok_s=60.0).report.unsure
        with pytest.raises(Unsure):
            family.ask(VAGUE, stream="door", stale_ok_s=60.0, refuse_unsure=True)


def test_a_request_for_more_accuracy_skips_the_first() -> None:
    """Only variants that are accurate enough are asked; then there is no score."""
    with birds() as family:
        report = family.ask(CLEAR, least_accuracy=0.8).report
        assert (report.variant, report.score, report.escalated, family.small.runs) == ("large", None, False, 0)
        family.cloud.script = unavailable
        with pytest.raises(LinkError):
            family.ask(CLEAR, least_accuracy=0.8)


@pytest.mark.parametrize("how", ["forced", "without"])
def test_a_forced_row_or_a_plan_without_a_cascade_answers_as_ever(how: str) -> None:
    """No score and no marks, and no counts in telemetry."""
    fields: dict[str, Any] = {"forced_row": "large:remote"} if how == "forced" else {"cascade": None}
    with birds(**fields) as family:
        report = family.ask(CLEAR).report
        assert (report.variant, report.score, report.escalated, report.unsure) == ("large", None, False, False)
        assert family.engine.cascades.status("birds") is None and not family.engine.cascades.close_windows()
        assert not family.engine.cascades.totals()


def test_a_first_variant_that_fails_is_replaced_by_the_second() -> None:
    """Its error is the answer only where the second cannot be asked either."""
    with birds() as family:
        family.small.error = InferenceFailed("no memory")
        report = family.ask(CLEAR).report
        assert (report.variant, report.score, report.escalated) == ("large", None, True)
        assert report.reason.startswith("small failed; ")
        family.cloud.script = unavailable
        with pytest.raises(InferenceFailed, match="no memory"):
            family.ask(CLEAR)


def test_a_repeated_request_gets_the_same_marks() -> None:
    """By its id; and a still frame that repeats an answer repeats its marks too."""
    with birds() as family:
        first, again = family.ask(VAGUE, request_id="1"), family.ask(VAGUE, request_id="1")
        assert first.report == again.report and len(family.cloud.asked) == 1
        family.engine.still_frames = StillFrames(draw=lambda: NEVER, spacing_s=0.0)
        seen = [family.ask(VAGUE, skip_still=0.5).report for _ in range(40)]
        repeated = [report for report in seen if report.repeated_age_s > 0]
        assert repeated and {(report.variant, report.escalated, report.score) for report in repeated} == {
            ("large", True, first.report.score)
        }


def test_the_plans_deadline_bounds_the_escalation() -> None:
    """The unsure answer is there when the plan wants an answer, and not when the request's own time is over."""
    with birds(deadline_s=0.4) as family:
        family.cloud.script = family.cloud.hold
        report = family.ask(VAGUE, deadline_s=LONG_S).report
        assert report.unsure and report.latency_s < LONG_S / 2


def test_outputs_that_are_no_numbers_are_escalated() -> None:
    """Their score is the least that reports can carry."""
    with birds() as family:
        family.small._of = lambda x: x * np.float32(np.nan)
        report = family.ask(CLEAR).report
        assert report.escalated and report.score == -1e15


@pytest.mark.parametrize("changes", [{"answer": "class:z"}, {"score": "beauty"}, {"score": "output"}])
def test_a_cascade_that_cannot_be_scored_escalates_everything(changes: dict[str, str]) -> None:
    """Rather than giving answers that nobody vouches for."""
    with birds(draw=lambda: ALWAYS, cascade=msgspec.structs.replace(CASCADE, **changes)) as family:
        assert family.ask(CLEAR).report.escalated


# Audits


def test_a_drawn_sure_answer_is_compared_after_it_was_given() -> None:
    """The second variant sees the frame as it was, although the application uses its memory again; the audit is no
    request."""
    with birds(draw=lambda: ALWAYS) as family:
        kept = RecordList()
        family.engine.observe(kept)
        family.cloud.script = family.cloud.hold
        frame = CLEAR.copy()
        report = family.ask(frame).report
        assert report.variant == "small" and not report.escalated
        frame[:] = VAGUE
        assert family.cloud.holding.wait(20)
        assert family.ask(CLEAR).report.variant == "small", "it is in nobody's way"
        family.cloud.let_go.set()
        eventually("it is compared", lambda: family.status["audited"] == 1)
        assert (family.status["changed"], family.status["unaudited"]) == (0, 1)
        answered = [record for record in kept.records if record.outcome is not None]
        assert len(answered) == 2 and len(family.cloud.asked) == 1


def test_a_drawn_frame_that_is_escalated_costs_nothing() -> None:
    """It counts as not changed."""
    with birds(draw=lambda: ALWAYS) as family:
        assert family.ask(VAGUE).report.escalated
        family.audited(1)
        assert (family.status["audited"], family.status["changed"], len(family.cloud.asked)) == (1, 0, 1)


@pytest.mark.parametrize("obstacle", ["link", "saver", "budget", "fails"])
def test_what_prevents_audits_is_counted(obstacle: str) -> None:
    """The answer was given; the frame is unaudited, and nothing is sent where the obstacle was known."""
    limits = AuditLimits(0) if obstacle == "budget" else UNBOUNDED
    with birds(draw=lambda: ALWAYS, limits=limits) as family:
        if obstacle == "saver":
            family.engine._power.mode = PowerMode("saver")
        if obstacle in ("link", "fails"):
            family.cloud.script = unavailable
            family.cloud.healthy = False
        if obstacle == "link":
            while family.engine.own_target.snapshot().is_available:
                family.ask(VAGUE)
            asked = len(family.cloud.asked)
        before = family.status["unaudited"]
        assert family.ask(CLEAR).report.variant == "small"
        eventually("counted", lambda: family.status["unaudited"] == before + 1)
        if obstacle == "link":
            assert len(family.cloud.asked) == asked
        assert family.status["changed"] == 0


def until_alarm(family: Birds) -> None:
    """Sure answers that the large variant never shares, until the threshold is tightened."""
    family.cloud.steps["b"]._of = lambda h: -h
    for number in range(1, 200):
        family.ask(CLEAR + np.float32(number * 1e-4) * np.array([[0, 0, 0, 1]], np.float32))
        family.audited(number)
        if family.status["alarms"]:
            return
    raise AssertionError("no alarm")


def test_an_alarm_tightens_the_threshold_and_is_reported() -> None:
    """In the status, as a condition of the device, in metrics and in telemetry."""
    with birds(draw=lambda: ALWAYS) as family:
        windows = family.engine.observe(TelemetryWindows())
        until_alarm(family)
        status = family.status
        assert status["threshold"] > CASCADE.threshold == status["planned_threshold"]
        (alarm,) = family.engine.cascades.alarms()
        assert alarm.startswith("birds: ") and "5.00% allowed: threshold raised from 0.5 to " in alarm
        (condition,) = reported_conditions([], cascade_alarms=[alarm])
        assert (condition.kind, condition.text) == (CASCADE_CHANGED, alarm)
        series = {(entry.family, entry.labels): entry.value for entry in engine_series(family.engine, True)}  # type: ignore[union-attr]
        assert series[metrics.AGENT_CASCADE_ALARMS.name, ("birds",)] == 1
        assert series[metrics.AGENT_CASCADE_AUDITS.name, ("birds", "changed")] == status["changed"]
        assert series[metrics.AGENT_CASCADE_ANSWERS.name, ("birds", "sure")] == status["sure"]
        assert series[metrics.AGENT_CASCADE_THRESHOLD.name, ("birds",)] == status["threshold"]
        closed = windows().close_windows(family.engine.serving, family.engine.conditions)
        sent = {window.model: window for window in with_cascades(closed, family.engine.cascades.close_windows())}
        counts = sent["birds"].cascade
        assert counts is not None and sent["tiny"].cascade is None
        assert (counts.alarms, counts.changed, counts.threshold) == (1, status["changed"], status["threshold"])
        assert counts.allowed == 0.05 and counts.answered["small"] == counts.sure == status["sure"]
        assert sent["birds"].row == "small:local" and sent["birds"].switches == 0
        (again,) = family.engine.cascades.close_windows().values()
        assert again.sure == again.alarms == 0 and again.threshold == status["threshold"]


def test_escalation_is_no_switch_of_rows() -> None:
    """The row in use stays the first one's."""
    with birds() as family:
        windows = family.engine.observe(TelemetryWindows())
        for frame in (CLEAR, VAGUE, CLEAR):
            family.ask(frame)
        window = windows().close_windows(family.engine.serving, family.engine.conditions)[0]
        assert (window.model, window.requests, window.switches, window.row) == ("birds", 3, 0, "small:local")


def test_a_restart_keeps_a_tightened_threshold(tmp_path: Path) -> None:
    """And the test's state; another release begins with its own."""
    file = tmp_path / "cascades.json"
    with birds(draw=lambda: ALWAYS, store=CascadeStore(file)) as family:
        until_alarm(family)
        tightened = family.status["threshold"]
        eventually("it is written at once", file.exists)
    with birds(store=CascadeStore(file)) as family:
        assert family.status["threshold"] == tightened > CASCADE.threshold
        assert family.ask(CLEAR).report.escalated, "it was sure before"
        family.engine.serve("birds", make_release(digest="c" * 64)[0])
        assert family.status["threshold"] == CASCADE.threshold


GARBAGE = (b"", b"\xff\xfe", b"[1, 2]", b'{"b": 1}', b"{" * 100_000, b'{"b": {"threshold": 1e999, "test": {}}}')


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_the_state_file_is_a_fresh_start(
    tmp_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line in the log; the next state replaces it."""
    file = tmp_path / "cascades.json"
    file.write_bytes(garbage)
    with birds(draw=lambda: ALWAYS, store=CascadeStore(file)) as family:
        assert family.status["threshold"] == CASCADE.threshold and family.ask(CLEAR).report.variant == "small"
        assert "cascades start with their plans' thresholds" in caplog.text
        family.audited(1)
    state = CascadeStore(file).load("b" * 64)
    assert state is not None and state.test.observed == 1


def test_a_full_disk_stops_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was learnt is lost at the next restart, and the log says so."""
    file = tmp_path / "file" / "cascades.json"
    file.parent.write_text("not a folder")
    with birds(draw=lambda: ALWAYS, store=CascadeStore(file)) as family:
        until_alarm(family)
        assert family.ask(CLEAR).report.variant in ("small", "large")
    assert "cannot store the cascade" in caplog.text
