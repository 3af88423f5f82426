"""The threshold below which a frame counts as still: fixed on frames that the model answered all of.

Each threshold plays the stream by itself: while a frame differs from the one that it answered last by less than the
threshold, it would repeat that answer, and that is an error where the model's answer is another. Thresholds are tested
from strict to lax, and the last before the first whose errors do not show that the limit is kept is used (fixed
sequence testing, "Learn then Test", Angelopoulos et al. 2110.01052): with frames drawn independently, the share of
changed answers exceeds the limit with probability at most delta. Frames of one camera are not independent, so the
promise is also audited at work (`serving.still_frames`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.comparison import answers_differ
from edgesplit.answers.share_bound import draws_needed, share_is_kept
from edgesplit.lazy_import import Tensor
from edgesplit_agent.policy.frame_difference import Thumbnail, difference

DELTA = 0.1
"""Probability that the promise of a calibration is wrong; "90 % sure"."""
THRESHOLDS = tuple(2.0 ** (step / 2) / 1024 for step in range(15))
"""Candidates, from a quarter of a grey level to an eighth of full scale. They are the same for every stream: a choice
among thresholds that depend on the frames would have to be paid for."""
FRAMES_FACTOR = 2
"""Frames of a calibration, in units of what it takes without any error: room for a few errors."""


@dataclass(frozen=True, slots=True)
class ThresholdChoice:
    """What a calibration found."""

    threshold: float
    """0: no threshold keeps the limit, so no answer is repeated."""
    frames: int
    repeated: int
    """Frames whose answer would have been repeated at this threshold."""
    changed: int
    """Those of them for which the model's answer is another."""


@dataclass(slots=True)
class _Play:
    """One threshold's own course through the stream."""

    reference: Thumbnail
    outputs: Mapping[str, Tensor]
    repeated: int = 0
    changed: int = 0


class Calibration:
    """The calibration of one stream. Not thread-safe."""

    def __init__(self, rule: AnswerRule, allowed: float, delta: float = DELTA) -> None:
        self._rule = rule
        self._allowed = allowed
        self._delta = delta
        self._plays: list[_Play] = []
        self.frames = 0
        """Frames so far that came after another one."""
        self.needed = FRAMES_FACTOR * draws_needed(allowed, delta)
        """Frames that it takes."""

    def add(self, frame: Thumbnail, outputs: Mapping[str, Tensor]) -> None:
        """Count the stream's next frame with the model's answer to it."""
        if not self._plays:
            self._plays = [_Play(frame, outputs) for _ in THRESHOLDS]
            return
        self.frames += 1
        # Most thresholds share their reference, so each reference is compared once.
        compared: dict[int, tuple[float, bool]] = {}
        for threshold, play in zip(THRESHOLDS, self._plays, strict=True):
            key = id(play.reference)
            if key not in compared:
                differs = answers_differ(self._rule, play.outputs, outputs)
                compared[key] = difference(play.reference, frame), differs
            distance, differs = compared[key]
            if distance < threshold:
                play.repeated += 1
                play.changed += differs
            else:
                play.reference, play.outputs = frame, outputs

    @property
    def references(self) -> int:
        """Answers that are kept to compare with."""
        return len({id(play.reference) for play in self._plays})

    def choose(self) -> ThresholdChoice | None:
        """The threshold, once there are enough frames; None before.

        Of thresholds that repeat the same frames here the least is taken: nothing was seen of what lies above it.
        """
        if self.frames < self.needed:
            return None
        chosen = ThresholdChoice(0.0, self.frames, 0, 0)
        for threshold, play in zip(THRESHOLDS, self._plays, strict=True):
            if not share_is_kept(play.changed, self.frames, self._allowed, self._delta):
                break
            if play.repeated > chosen.repeated:
                chosen = ThresholdChoice(threshold, self.frames, play.repeated, play.changed)
        return chosen


def tightened(threshold: float) -> float:
    """The threshold after an alarm: half, and 0 (no answer is repeated) below the strictest candidate."""
    return threshold / 2 if threshold / 2 >= THRESHOLDS[0] else 0.0
