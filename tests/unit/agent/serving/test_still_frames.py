"""Still frames of a stream through the engine: calibration, repetition, audits, alarms, and who is left alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.errors import InferenceFailed, UsageError
from edgesplit.mqtt.messages import REPEATS_CHANGED
from edgesplit.observability import metrics
from edgesplit.oip.options import NONE, InferOptions
from edgesplit.oip.report import Report
from edgesplit.release.manifest import TensorSpec
from edgesplit.runtime import Tensor
from edgesplit_agent.policy.frame_difference import Thumbnail
from edgesplit_agent.policy.still_calibration import DELTA, THRESHOLDS
from edgesplit_agent.serving.engine import Answer, Engine
from edgesplit_agent.serving.metrics import engine_series
from edgesplit_agent.serving.still_frames import StillFrames
from edgesplit_agent.serving.still_stream import StillStream
from edgesplit_agent.telemetry.conditions import reported_conditions
from support.agent_engine import INPUT, LOCAL, RecordList, Step, active, programs, world

ALLOWED = 0.05
CAMERA = InferOptions(stream="door", skip_still=ALLOWED)
LONG_S = 60.0
RULE = AnswerRule("class", ("y",))
STILL = Thumbnail(np.zeros((1, 1), np.float32), 1.0, b"")
NEVER, ALWAYS = 1.0, 0.0
"""Numbers that are drawn for audits."""
NEEDED = 90
"""Frames of a calibration at 5 %, after the first."""
MOVED = INPUT[:, ::-1] * 10


class Camera:
    """A stream's frames through an engine."""

    def __init__(self, engine: Engine, steps: dict[str, Step], options: InferOptions) -> None:
        self.engine = engine
        self.steps = steps
        self.options = options

    def see(self, frame: Tensor = INPUT, **how: Any) -> Answer:
        return self.engine.infer("tiny", {"x": frame}, deadline_s=LONG_S, **{"options": self.options, **how})

    def calibrate(self) -> None:
        """Frames that stand still under a little noise, until answers are repeated."""
        rng = np.random.default_rng(4)
        for _ in range(NEEDED + 1):
            assert not self.see(INPUT + rng.normal(0, 0.01, INPUT.shape).astype(np.float32)).report.repeated_age_s
        (stream,) = self.engine.still_frames.status()
        assert stream["state"] == "repeating", stream

    @property
    def runs(self) -> int:
        """How often the model ran."""
        return self.steps["a"].runs


@contextmanager
def camera(
    options: InferOptions = CAMERA, draw: Callable[[], float] = lambda: NEVER, default: float = 0.0, **how: Any
) -> Iterator[Camera]:
    steps = programs()
    with world(LOCAL, steps=steps) as (engine, _, _):
        engine.still_frames = StillFrames(default, draw=draw, **how)
        yield Camera(engine, steps, options)


def test_still_frame_is_given_the_last_answer_with_its_age() -> None:
    """The model does not run; the report has the earlier answer's row, its age and the reason, and no work of its
    own."""
    with camera() as door:
        kept = RecordList()
        door.engine.observe(kept)
        door.calibrate()
        runs, records = door.runs, len(kept.records)
        fresh = door.see(MOVED)
        repeated, again = door.see(MOVED), door.see(MOVED)
        assert door.runs == runs + 1 and repeated.outputs is again.outputs is fresh.outputs
        assert 0 < repeated.report.repeated_age_s < again.report.repeated_age_s
        assert (repeated.report.row, repeated.report.release) == (fresh.report.row, fresh.report.release)
        assert repeated.report.device_s == repeated.report.joules == 0 and "is repeated" in repeated.report.reason
        assert fresh.report.repeated_age_s == 0
        assert len(kept.records) == records + 1, "a repeated answer is no request of the model"


def test_moved_frame_is_answered_by_the_model() -> None:
    """Each frame is compared with the one that was answered last, not with the one before it: slow drift is seen."""
    with camera() as door:
        door.calibrate()
        (threshold,) = (entry.stream.threshold for entry in door.engine.still_frames._entries.values())
        runs, span, frames = door.runs, float(INPUT.max() - INPUT.min()), 40
        for number in range(1, frames + 1):
            door.see(INPUT + np.float32(number * threshold * span / 4))
        assert frames / 5 - 1 <= door.runs - runs <= frames / 3


def test_audited_frames_are_answered_by_the_model_and_counted() -> None:
    """Each frame of the stream may be drawn; what moved is answered by the model anyway and cannot be wrong."""
    with camera() as door:
        door.calibrate()
        door.see()
        door.engine.still_frames._draw = lambda: ALWAYS
        runs = door.runs
        assert [door.see(frame).report.repeated_age_s for frame in (INPUT, INPUT, MOVED)] == [0, 0, 0]
        assert door.runs == runs + 3
        counts = door.engine.still_frames.counts()["tiny"]
        assert (counts.same, counts.changed, counts.repeated) == (3, 0, 1)


def test_alarm_tightens_the_threshold_until_no_answer_is_repeated() -> None:
    """The model begins to see what the thumbnails do not: an alarm, a condition and metrics; then another, to the
    end."""
    with camera() as door:
        door.calibrate()
        door.engine.still_frames._draw = lambda: ALWAYS
        assert not door.engine.still_frames.alarms()
        flips = iter(range(10_000))
        door.steps["b"]._of = lambda h: np.roll(h, next(flips), axis=-1)
        thresholds = []
        while (stream := door.engine.still_frames.status()[0])["state"] == "repeating":
            thresholds.append(next(iter(door.engine.still_frames._entries.values())).stream.threshold)
            door.see()
            assert len(thresholds) < 500
        assert sorted(set(thresholds), reverse=True) == list(dict.fromkeys(thresholds)), "it never grows"
        assert thresholds[-1] >= THRESHOLDS[0] and stream["state"] == "off" and "too many" in stream["detail"]
        (alarm,) = door.engine.still_frames.alarms()
        assert alarm.startswith("stream 'door' of tiny: ") and "audited frames changed, 5.00% allowed" in alarm
        (condition,) = reported_conditions([], repeat_alarms=[alarm])
        assert condition.kind == REPEATS_CHANGED and condition.text == alarm
        counts = door.engine.still_frames.counts()["tiny"]
        series = {(entry.family, entry.labels): entry.value for entry in engine_series(door.engine, True)}  # type: ignore[union-attr]
        assert series[metrics.AGENT_REPEAT_ALARMS.name, ("tiny",)] == counts.alarms > 0
        assert series[metrics.AGENT_REPEAT_AUDITS.name, ("tiny", "changed")] == counts.changed > 0
        runs = door.runs
        door.see()
        assert door.runs == runs + 1


def test_still_frame_that_the_model_cannot_audit_is_repeated_and_counted() -> None:
    """A failing model fails no still frame; one that moved has the error."""
    with camera() as door:
        door.calibrate()
        door.see()
        door.engine.still_frames._draw = lambda: ALWAYS
        door.steps["a"].error = InferenceFailed("the accelerator has gone")
        assert door.see().report.repeated_age_s > 0
        assert door.engine.still_frames.counts()["tiny"].unaudited == 1
        with pytest.raises(InferenceFailed):
            door.see(MOVED)


def test_stale_answer_is_no_reference() -> None:
    """The stream's last good answer in place of an error says nothing about the frame."""
    with camera(InferOptions(stream="door", skip_still=ALLOWED, stale_ok_s=3600.0)) as door:
        door.calibrate()
        door.see()
        door.steps["a"].error = InferenceFailed("the accelerator has gone")
        assert door.see(MOVED).report.stale
        door.engine.still_frames._draw = lambda: ALWAYS
        assert door.see().report.repeated_age_s, "a still frame that is not audited is no error's victim"
        assert door.engine.still_frames.counts()["tiny"].unaudited == 1
        door.steps["a"].error = None
        assert not door.see(MOVED).report.repeated_age_s


def test_only_named_streams_have_the_operators_setting() -> None:
    """Requests without a stream may be of several cameras; a stream may opt out; an operator's inference is none."""
    with camera(InferOptions(stream="door"), default=ALLOWED) as door:
        door.calibrate()
        door.see()
        assert door.see().report.repeated_age_s
        for how in (
            {"options": NONE},
            {"options": InferOptions(stream="door", skip_still=0.0)},
            {"background": True},
        ):
            assert not door.see(**how).report.repeated_age_s


def test_unknown_answers_are_not_compared() -> None:
    """Asked for, it is refused with what to say; by the operator's setting alone the model answers."""
    steps = programs()
    steps["b"]._of = lambda h: np.stack([h, h])
    for default, options in ((0.0, CAMERA), (ALLOWED, InferOptions(stream="door"))):
        with world(LOCAL, steps=steps) as (engine, _, release):
            engine.still_frames = StillFrames(default)
            object.__setattr__(release, "outputs", (TensorSpec("y", "FP32", (2, 4)),))
            if default:
                assert not engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S, options=options).report.repeated_age_s
                assert engine.still_frames.status() == []
            else:
                with pytest.raises(UsageError, match="edgesplit_answer"):
                    engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S, options=options)


def test_rule_may_be_named() -> None:
    """A tolerance on all outputs; a rule that does not fit the model is refused."""
    with camera(InferOptions(stream="door", skip_still=ALLOWED, answer="close:0.1")) as door:
        door.calibrate()
        assert door.engine.still_frames.status()[0]["answer"] == "close:0.1"
        with pytest.raises(UsageError, match="no layout of boxes is called 'none'"):
            door.see(options=InferOptions(skip_still=ALLOWED, answer="boxes:none"))


def test_new_release_repeats_no_answer_of_the_old_one() -> None:
    """It calibrates anew; what was counted stays."""
    with camera() as door:
        door.calibrate()
        door.see()
        door.see()
        door.engine.serve("tiny", active(LOCAL, digest="b" * 64))
        assert door.see().report.repeated_age_s == 0
        (stream,) = door.engine.still_frames.status()
        assert stream["state"] == "calibrating" and door.engine.still_frames.counts()["tiny"].repeated == 2


def test_memory_is_bounded_in_streams_and_bytes() -> None:
    """The streams that were seen longest ago are forgotten."""
    with camera(streams=3) as door:
        for number in range(10):
            door.see(options=InferOptions(stream=f"s-{number}", skip_still=ALLOWED))
        assert [stream["stream"] for stream in door.engine.still_frames.status()] == ["s-7", "s-8", "s-9"]
    with camera(held_bytes=100) as door:
        for number in range(10):
            door.see(options=InferOptions(stream=f"s-{number}", skip_still=ALLOWED))
        held = sum(entry.stream.held_bytes for entry in door.engine.still_frames._entries.values())
        assert 0 < held <= 100


def test_promise_holds_until_the_world_changes() -> None:
    """A stream at work in a world of known truth: at half the allowance no alarm in 40 streams of 1,500 audited frames
    (seeds 0 to 39); at four times, one within 200 frames."""
    alarms, late = 0, 0
    for seed in range(40):
        rng = random.Random(seed)
        stream = _working_stream()
        for _ in range(1_500):
            _audit(stream, differs=rng.random() < ALLOWED / 2)
        alarms += stream.counts.alarms > 0
        changed = _working_stream()
        for _ in range(200):
            _audit(changed, differs=rng.random() < 4 * ALLOWED)
        late += changed.counts.alarms == 0
    assert alarms <= 40 * DELTA and late <= 4


def _working_stream() -> StillStream:
    """A stream whose calibration saw frames that stand still."""
    stream = StillStream(RULE, ALLOWED)
    while stream.state == "calibrating":
        stream.on_answered(stream.look(STILL, 1.0, False), _answer(0))
    return stream


def _audit(stream: StillStream, *, differs: bool) -> None:
    """One still frame that was drawn for audit: the class changes if `differs`, and stays what it was then."""
    earlier = stream.look(STILL, 2.0, True)
    if earlier.repeats is None:
        return
    label = int(earlier.repeats.answer.outputs["y"].argmax())
    stream.on_answered(earlier, _answer((label + differs) % 4))


def _answer(label: int) -> Answer:
    return Answer({"y": np.eye(4, dtype=np.float32)[label][None]}, Report(release="a" * 64, row="local"))
