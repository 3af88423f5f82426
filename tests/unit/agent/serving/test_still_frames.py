"""Still frames of a stream through the engine: calibration, repetition, audits, alarms, and who is left alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.sequential import SequentialTest
from edgesplit.errors import InferenceFailed, UsageError
from edgesplit.mqtt.messages import REPEATS_CHANGED
from edgesplit.observability import metrics
from edgesplit.oip.options import NONE, InferOptions
from edgesplit.oip.report import Report
from edgesplit.release.manifest import TensorSpec
from edgesplit.runtime import Tensor
from edgesplit_agent.policy.frame_difference import Thumbnail
from edgesplit_agent.policy.still_calibration import DELTA, THRESHOLDS
from edgesplit_agent.serving import still_stream
from edgesplit_agent.serving.engine import Answer, Engine
from edgesplit_agent.serving.metrics import engine_series
from edgesplit_agent.serving.still_frames import StillFrames
from edgesplit_agent.serving.still_states import read_states, write_states
from edgesplit_agent.serving.still_stream import KeptState, StillStream
from edgesplit_agent.telemetry.conditions import reported_conditions
from support.agent_engine import INPUT, LOCAL, RecordList, Step, active, programs, world
from support.still_scenes import Scenes

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
        engine.still_frames = StillFrames(default, draw=draw, **{"spacing_s": 0.0, **how})
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


def test_bad_threshold_is_found_within_hundreds_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """A threshold that changes 24 % of the answers where 5 % are allowed, in scenes of 30 frames: audits are denser at
    first, so that half of 20 streams (seeds 0 to 19) raise an alarm within 400 frames, and all within 3,000. The
    frames are of one pixel, whose difference is plain arithmetic here."""
    monkeypatch.setattr(
        still_stream, "difference", lambda one, other: abs(float(one.levels[0, 0]) - float(other.levels[0, 0]))
    )
    scenes = Scenes(unsure=0.5, frames=30)
    assert scenes.changed_share(THRESHOLDS[-1]) > 0.2
    frames = sorted(_frames_to_alarm(scenes, seed, most=3_000) for seed in range(20))
    print(f"frames to the alarm, seeds 0 to 19: {frames}")
    assert frames[10] < 400 and frames[-1] < 3_000


def _frames_to_alarm(scenes: Scenes, seed: int, most: int) -> int:
    kept = KeptState(RULE.to_text(), ALLOWED, 0.0, SequentialTest(ALLOWED, DELTA), threshold=THRESHOLDS[-1])
    stream, rng = StillStream(RULE, ALLOWED, spacing_s=0.0, kept=kept), random.Random(f"audits {seed}")
    for number, (thumbnail, label) in zip(range(most), scenes.stream(seed), strict=False):
        look = stream.look(thumbnail, float(number), rng.random() < stream.audit_probability)
        if look.repeats is None or look.is_audit:
            stream.on_answered(look, _answer(label))
        if stream.counts.alarms:
            return number
    return most


def test_audits_thin_out_as_evidence_comes() -> None:
    """From 10 % to 2 % of the frames, by what was audited since the calibration, and 10 % again after an alarm."""
    stream = _working_stream()
    shares = []
    for _ in range(300):
        shares.append(stream.audit_probability)
        _audit(stream, differs=False)
    assert shares[0] == shares[45] == 0.10 and shares == sorted(shares, reverse=True) and shares[-1] == 0.02
    while not stream.counts.alarms:
        _audit(stream, differs=True)
    assert stream.audit_probability == 0.10


def test_frames_that_count_are_apart() -> None:
    """Frames that arrive at once calibrate only by the times at which the application says they were taken."""
    with camera(spacing_s=60.0) as door:
        for _ in range(NEEDED + 1):
            door.see()
        (stream,) = door.engine.still_frames.status()
        assert stream["detail"] == "calibrating: 0 of 90 frames, about 1h30m more"
        for minute in range(NEEDED + 1):
            door.see(options=InferOptions(stream="recorded", skip_still=ALLOWED, taken_at_s=1.7e9 + 60.0 * minute))
        assert [stream["state"] for stream in door.engine.still_frames.status()] == ["calibrating", "repeating"]


def test_calibration_and_alarms_survive_a_restart(tmp_path: Path) -> None:
    """The threshold after an alarm, the test and the reasons; the first frame is answered, as no frame is kept."""
    file = tmp_path / "still_frames.json"
    with camera(file=file) as door:
        door.engine.still_frames.start()
        door.calibrate()
        stream = next(iter(door.engine.still_frames._entries.values())).stream
        before = stream.to_keep()
        door.engine.still_frames.stop()
    assert before.threshold > 0 and before.calibration is None and INPUT.tobytes() not in file.read_bytes()
    with camera(file=file) as door:
        assert not door.see().report.repeated_age_s and door.see().report.repeated_age_s
        stream = next(iter(door.engine.still_frames._entries.values())).stream
        assert stream.to_keep() == before
        door.engine.still_frames._draw = lambda: ALWAYS
        flips = count()
        door.steps["b"]._of = lambda h: np.roll(h, next(flips), axis=-1)
        while not stream.counts.alarms:
            door.see()
            assert next(flips) < 1_000
        assert stream.to_keep().threshold < before.threshold
        assert door.engine.still_frames._states()["tiny", "a" * 64, "door"] == stream.to_keep()


def test_calibration_goes_on_after_a_restart(tmp_path: Path) -> None:
    """A device that starts often would never have enough frames."""
    file = tmp_path / "still_frames.json"
    for part in range(2):
        with camera(file=file) as door:
            door.engine.still_frames.start()
            for _ in range(31):
                door.see()
            assert door.engine.still_frames.status()[0]["detail"].startswith(f"calibrating: {30 + part * 30} of 90")
            door.engine.still_frames.stop()


def test_other_terms_start_anew(tmp_path: Path) -> None:
    """Another share, another spacing, another release: what was found for one says nothing about the other."""
    file = tmp_path / "still_frames.json"
    with camera(file=file) as door:
        door.engine.still_frames.start()
        door.calibrate()
        door.engine.still_frames.stop()
    for options, how in ((InferOptions(stream="door", skip_still=0.1), {}), (CAMERA, {"spacing_s": 1.0})):
        with camera(file=file, **how) as door:
            door.see(options=options)
            assert door.engine.still_frames.status()[0]["state"] == "calibrating"
    with camera(file=file) as door:
        door.engine.serve("tiny", active(LOCAL, digest="b" * 64))
        door.see()
        assert door.engine.still_frames.status()[0]["state"] == "calibrating"
        door.engine.serve("tiny", active(LOCAL))
        door.see()
        assert door.engine.still_frames.status()[0]["state"] == "repeating", "a roll-back finds what was found before"


@pytest.mark.parametrize(
    "garbage", [b"", b"{}", b"[1]", b"\xff\xfe", b"[" * 100_000, b"[]" + b" " * 600_000, b'[{"model": "tiny"}]']
)
def test_damaged_file_is_a_fresh_start(tmp_path: Path, caplog: pytest.LogCaptureFixture, garbage: bytes) -> None:
    """With a line in the log that names the file."""
    file = tmp_path / "still_frames.json"
    file.write_bytes(garbage)
    with camera(file=file) as door:
        door.engine.still_frames.start()
        door.calibrate()
        door.engine.still_frames.stop()
    assert "still_frames.json" in caplog.text and "anew" in caplog.text
    assert len(read_states(file)) == 1


def test_state_that_no_stream_can_have_is_refused() -> None:
    """A threshold above the laxest would repeat what was never tested."""
    with pytest.raises(ValueError, match="threshold"):
        KeptState("class:y", ALLOWED, 0.0, SequentialTest(ALLOWED, DELTA), threshold=1.0)


def test_states_are_bounded_and_a_full_disk_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest 64; and nothing raises where they cannot be written."""
    state = KeptState("class:y", ALLOWED, 0.0, SequentialTest(ALLOWED, DELTA))
    states = {("tiny", "a" * 64, str(number)): state for number in range(100)}
    write_states(tmp_path / "states.json", states)
    assert [key[2] for key in read_states(tmp_path / "states.json")] == [str(number) for number in range(36, 100)]
    (tmp_path / "file").touch()
    write_states(tmp_path / "file" / "states.json", states)
    assert "cannot keep" in caplog.text


def test_telemetry_counts_what_came_since_the_last_window() -> None:
    """Each frame in one window; models without such streams have none."""
    with camera() as door:
        assert door.engine.still_frames.take_window() == {}
        door.calibrate()
        door.see()
        door.engine.still_frames.take_window()
        for _ in range(4):
            door.see()
        first = door.engine.still_frames.take_window()["tiny"]
        door.engine.still_frames._draw = lambda: ALWAYS
        door.see()
        second = door.engine.still_frames.take_window()["tiny"]
        assert (first.repeated, first.audited_same, first.allowed) == (4, 0, ALLOWED)
        assert (second.repeated, second.audited_same, second.changed) == (0, 1, 0)
        door.engine.drop("tiny")
        assert door.engine.still_frames.take_window() == {}


def _working_stream() -> StillStream:
    """A stream whose calibration saw frames that stand still."""
    stream = StillStream(RULE, ALLOWED, spacing_s=0.0)
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
    return Answer({"y": np.eye(10, dtype=np.float32)[label][None]}, Report(release="a" * 64, row="local"))
