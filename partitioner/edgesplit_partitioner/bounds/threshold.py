"""The score from which a small model may answer by itself: fixed on frames on which both models ran.

The loss of a frame at a threshold is 1 if the small model's score reaches it (it would answer) and its answer differs
from the big one's. Thresholds are walked from strict to lax, each is tested by the exact binomial bound, and the walk
stops before the first whose bound exceeds what is allowed: fixed-sequence testing (Angelopoulos, Bates, Candès, Jordan,
Lei, "Learn then Test", 2110.01052, section 4). The loss only grows as the threshold falls. All thresholds between two
neighbouring scores accept the frames that the upper one accepts, so the scores of the frames serve as thresholds. The
test that errs first is that at the strictest threshold whose true share exceeds the allowance, and it errs with
probability at most delta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from edgesplit.errors import UsageError
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.quantities import format_percentage
from edgesplit_partitioner.bounds.binomial import most_errors, trials_needed, upper_share


class ThresholdChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A threshold with its promise: of all frames, at most `allowed` are answered here and differ, 1 - delta sure."""

    threshold: float | None
    """The small model answers where its score is at least this; None: it never does."""
    frames: int
    """Frames on which the threshold was fixed."""
    stay: int
    """Those of them that the small model answers."""
    changed: int
    """Those of them that it answers differently from the big one."""
    bound: float
    """Upper bound of the share that is answered here and differs; 0 where nothing stays."""
    allowed: float
    delta: float
    needed: int
    """The least number of frames that can support the allowance."""

    @property
    def stay_share(self) -> float:
        """Share of the frames that the small model answers."""
        return self.stay / self.frames if self.frames else 0.0

    @property
    def too_few(self) -> bool:
        """Whether no outcome on so few frames could have supported the allowance."""
        return self.frames < self.needed

    def to_text(self) -> str:
        """The choice in a sentence."""
        promise = (
            f"at most {format_percentage(self.allowed)} of answers differ ({format_percentage(1.0 - self.delta)} sure"
        )
        if self.too_few:
            return f"{self.frames} samples are too few for {promise}): it takes at least {self.needed}"
        if self.threshold is None:
            return f"no frame stays here: even the surest answers do not show that {promise}, {self.frames} samples)"
        return f"{format_percentage(self.stay_share)} of frames stay here; {promise}, {self.frames} samples)"


def choose_threshold(scores: Sequence[float], differs: Sequence[bool], allowed: float, delta: float) -> ThresholdChoice:
    """The laxest threshold that keeps the allowance, with probability at least 1 - delta over the draw of the frames.

    `scores` are the small model's, larger is surer, -inf for never; `differs` says whether the big one's answer is
    another. Frames are independent draws of what the devices will see. UsageError where the two have different lengths
    or a score is not a number.
    """
    if len(scores) != len(differs):
        raise UsageError(f"{len(scores)} scores and {len(differs)} comparisons: one of each is needed for every frame")
    if any(math.isnan(score) for score in scores):
        raise UsageError("a score is not a number: give -inf for an answer that is never sure")
    allowed_errors = most_errors(len(scores), allowed, delta)
    threshold, stay, changed = _walk(sorted(zip(scores, differs, strict=True), reverse=True), allowed_errors)
    return ThresholdChoice(
        threshold=threshold,
        frames=len(scores),
        stay=stay,
        changed=changed,
        bound=0.0 if threshold is None else upper_share(changed, len(scores), delta),
        allowed=allowed,
        delta=delta,
        needed=trials_needed(allowed, delta),
    )


def _walk(frames: Sequence[tuple[float, bool]], allowed_errors: int) -> tuple[float | None, int, int]:
    """Walk frames by falling score. Returns the last threshold with no more errors than allowed, the frames that reach
    it, and the errors among them. Frames of equal score are let in together."""
    accepted: tuple[float | None, int, int] = (None, 0, 0)
    errors = 0
    for place, (score, differs) in enumerate(frames):
        errors += differs
        if errors > allowed_errors or score == -math.inf:
            break
        if place + 1 == len(frames) or frames[place + 1][0] < score:
            accepted = (score, place + 1, errors)
    return accepted


warm_up_structs(__name__)
