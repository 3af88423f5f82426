"""The threshold below which a frame counts as still: fixed on frames that the model answered all of.

Each threshold plays the stream by itself: while a frame differs from the one that it answered last by less than the
threshold, it would repeat that answer, and that is an error where the model's answer is another. Thresholds are tested
from strict to lax, and the last before the first whose errors do not show that the limit is kept is used (fixed
sequence testing, "Learn then Test", Angelopoulos et al. 2110.01052): with frames drawn independently, the share of
changed answers exceeds the limit with probability at most delta. Frames of one scene are not independent: every frame
is played, but only one in `spacing_s` seconds counts for the test, so that it sees as many scenes as it counts frames.
What is shorter than the scenes of a stream promises too much still, so the promise is also audited at work
(`serving.still_stream`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.comparison import answers_differ
from edgesplit.answers.share_bound import draws_needed, share_is_kept
from edgesplit.lazy_import import Tensor
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit_agent.policy.frame_difference import Thumbnail, difference

DELTA = 0.1
"""Probability that the promise of a calibration is wrong; "90 % sure"."""
THRESHOLDS = tuple(2.0 ** (step / 2) / 1024 for step in range(15))
"""Candidates, from a quarter of a grey level to an eighth of full scale. They are the same for every stream: a choice
among thresholds that depend on the frames would have to be paid for."""
FRAMES_FACTOR = 2
"""Frames of a calibration, in units of what it takes without any error: room for a few errors."""
SPACING_S = 10.0
"""Least seconds between frames that count: a compromise between the length of scenes and that of the calibration."""


@dataclass(frozen=True, slots=True)
class ThresholdChoice:
    """What a calibration found."""

    threshold: float
    """0: no threshold keeps the limit, so no answer is repeated."""
    frames: int
    """Frames that counted; of them those whose answer"""
    repeated: int
    """would have been repeated at this threshold."""
    changed: int
    """Those of them for which the model's answer is another."""


class CalibrationCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a calibration has counted so far, which is written to disk as it is."""

    frames: int
    """Frames that counted."""
    plays: tuple[tuple[int, int], ...]
    """By threshold: those of them whose answer would have been repeated, and the changed ones among these."""

    def __post_init__(self) -> None:
        """ValueError where no calibration can have counted this."""
        if len(self.plays) != len(THRESHOLDS):
            raise ValueError(f"counts of {len(self.plays)} thresholds where there are {len(THRESHOLDS)}")
        if not all(0 <= changed <= repeated <= self.frames for repeated, changed in self.plays):
            raise ValueError("more answers changed than were repeated, or more were repeated than frames counted")


@dataclass(slots=True)
class _Play:
    """One threshold's own course through the stream."""

    repeated: int = 0
    changed: int = 0
    reference: Thumbnail | None = None
    """The frame that was answered last, and"""
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    """the answer to it."""


class Calibration:
    """The calibration of one stream. Not thread-safe."""

    def __init__(
        self,
        rule: AnswerRule,
        allowed: float,
        delta: float = DELTA,
        *,
        spacing_s: float = SPACING_S,
        counts: CalibrationCounts | None = None,
    ) -> None:
        """`spacing_s`: least seconds between frames that count; 0: each counts. `counts`: of an earlier run of the
        agent, which this one goes on with."""
        self._rule = rule
        self._allowed = allowed
        self._delta = delta
        self._spacing_s = spacing_s
        self._plays = [_Play(*play) for play in counts.plays] if counts else [_Play() for _ in THRESHOLDS]
        self.frames = counts.frames if counts else 0
        """Frames that counted so far."""
        self.needed = FRAMES_FACTOR * draws_needed(allowed, delta)
        """Frames that have to count."""
        self._counted_at_s: float | None = None
        """When the last frame that counted was taken, or the first one; None before that."""
        self._timed_frames, self._timed_s = 0, 0.0
        """Frames that counted since the start, and the seconds that they took."""

    def add(self, frame: Thumbnail, outputs: Mapping[str, Tensor], at_s: float) -> None:
        """Play the stream's next frame, which was taken at `at_s`, with the model's answer to it."""
        counts = self._counts(at_s)
        # Most thresholds share their reference, so each reference is compared once.
        compared: dict[int, tuple[float, bool]] = {}
        for threshold, play in zip(THRESHOLDS, self._plays, strict=True):
            if play.reference is None:
                play.reference, play.outputs = frame, outputs
                continue
            key = id(play.reference)
            if key not in compared:
                differs = counts and answers_differ(self._rule, play.outputs, outputs)
                compared[key] = difference(play.reference, frame), differs
            distance, differs = compared[key]
            if distance < threshold:
                play.repeated += counts
                play.changed += differs
            else:
                play.reference, play.outputs = frame, outputs

    def _counts(self, at_s: float) -> bool:
        """Whether a frame that was taken then counts for the test, and not only moves the plays on."""
        if self._counted_at_s is None or at_s < self._counted_at_s:  # the first frame, or the clock was set back
            self._counted_at_s = at_s
            return False
        passed_s = at_s - self._counted_at_s
        if passed_s < self._spacing_s:
            return False
        self._counted_at_s = at_s
        self._timed_s += passed_s
        self._timed_frames += 1
        self.frames += 1
        return True

    @property
    def counts(self) -> CalibrationCounts:
        """What was counted so far."""
        return CalibrationCounts(self.frames, tuple((play.repeated, play.changed) for play in self._plays))

    @property
    def left_s(self) -> float:
        """Seconds that the rest will take, at the rate of frames so far."""
        measured_s = self._timed_s / self._timed_frames if self._timed_frames else 0.0
        return max(0, self.needed - self.frames) * max(self._spacing_s, measured_s)

    @property
    def references(self) -> int:
        """Answers that are kept to compare with."""
        return len({id(play.reference) for play in self._plays if play.reference is not None})

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


warm_up_structs(__name__)
