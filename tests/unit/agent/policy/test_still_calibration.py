"""The threshold of still frames: fixed on frames that the model answered, in worlds whose truth is known."""

from __future__ import annotations

import random

import numpy as np

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit_agent.policy.frame_difference import Thumbnail
from edgesplit_agent.policy.still_calibration import THRESHOLDS, Calibration, ThresholdChoice, tightened
from support.still_video import one_hot

RULE = AnswerRule("class", ("y",))
DELTA = 0.1


def frame(level: float) -> Thumbnail:
    """A frame of one pixel."""
    return Thumbnail(np.array([[level]], np.float32), 1.0, b"")


class World:
    """A camera whose level jitters. The answer is the scene's, but on some still frames another: the further a frame
    is from where the scene began, the more often."""

    def __init__(self, seed: int, change_scene: float, error_per_distance: float) -> None:
        self._rng = random.Random(seed)
        self._change, self._error = change_scene, error_per_distance
        self._scene = self._drift = 0.0

    def next(self) -> tuple[float, int]:
        """Level and true answer of the next frame."""
        if self._rng.random() < self._change:
            self._scene, self._drift = self._rng.uniform(0, 100), 0.0
        self._drift = min(0.1, abs(self._rng.gauss(0, 0.02)))
        is_odd = self._rng.random() < self._error * self._drift
        return self._scene + self._drift, int(self._scene) % 9 if not is_odd else 9


def calibrated(world: World, allowed: float) -> ThresholdChoice:
    calibration = Calibration(RULE, allowed, DELTA)
    while (choice := calibration.choose()) is None:
        level, answer = world.next()
        calibration.add(frame(level), one_hot(answer))
    return choice


def changed_share(world: World, threshold: float, frames: int) -> float:
    """Share of changed answers where this threshold plays on: the truth, up to chance."""
    reference, given, changed = *world.next(), 0
    for _ in range(frames):
        level, answer = world.next()
        if np.float32(abs(np.float32(level) - np.float32(reference))) < threshold:
            changed += answer != given
        else:
            reference, given = level, answer
    return changed / frames


def test_promise_is_kept_in_nine_of_ten_worlds() -> None:
    """120 calibrations at 5 % in a world where the laxest threshold changes far more (seeds 0 to 119)."""
    allowed, broken, used = 0.05, 0, 0
    for seed in range(120):
        choice = calibrated(World(seed, change_scene=0.2, error_per_distance=3.0), allowed)
        used += choice.repeated > 0
        broken += changed_share(World(1_000 + seed, 0.2, 3.0), choice.threshold, 2_000) > allowed + 0.005
    assert changed_share(World(7, 0.2, 3.0), THRESHOLDS[-1], 20_000) > allowed, "the world is a hard one"
    assert used > 60
    assert broken / 120 < DELTA + 3 * (DELTA * (1 - DELTA) / 120) ** 0.5


def test_least_threshold_of_those_that_repeat_the_same_frames() -> None:
    """Nothing was seen of larger differences, so they are not called still."""
    calibration = Calibration(RULE, 0.05, DELTA)
    while (choice := calibration.choose()) is None:
        calibration.add(frame(0.003 * (calibration.frames % 2)), one_hot(1))
    assert choice.repeated == choice.frames == calibration.needed == 90 and choice.changed == 0
    assert 0.003 < choice.threshold < 0.003 * 1.5


def test_still_frames_whose_answers_change_are_not_repeated() -> None:
    """The model sees what the thumbnail does not: the threshold stays 0."""
    calibration = Calibration(RULE, 0.05, DELTA)
    while (choice := calibration.choose()) is None:
        calibration.add(frame(0.0), one_hot(calibration.frames % 3))
    assert choice.threshold == 0 and choice.repeated == 0


def test_answers_kept_for_comparison_are_few() -> None:
    """However long the calibration, each threshold keeps one answer, and most share theirs."""
    world, calibration = World(3, change_scene=0.3, error_per_distance=0.0), Calibration(RULE, 0.01)
    for _ in range(300):
        level, answer = world.next()
        calibration.add(frame(level), one_hot(answer))
        assert calibration.references <= len(THRESHOLDS)
    assert calibration.needed == 460 and calibration.choose() is None


def test_alarms_end_at_no_threshold() -> None:
    """Halved until it is below the strictest candidate, then 0: from the laxest in eight alarms."""
    threshold, alarms = THRESHOLDS[-1], 0
    while threshold:
        threshold, alarms = tightened(threshold), alarms + 1
    assert alarms == 8 and tightened(0.0) == 0.0
