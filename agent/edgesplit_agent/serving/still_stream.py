"""One stream whose still frames are given its last answer: calibrating, then repeating with audits, perhaps off.

Decides from thumbnails and a drawn number; the engine runs the model. No locks, no clock, no randomness of its own.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from operator import sub
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.comparison import answers_differ
from edgesplit.answers.sequential import SequentialTest
from edgesplit.answers.share_bound import draws_needed
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.quantities import format_duration
from edgesplit_agent.policy.frame_difference import DIFFERENT, Thumbnail, difference
from edgesplit_agent.policy.still_calibration import (
    DELTA,
    SPACING_S,
    THRESHOLDS,
    Calibration,
    CalibrationCounts,
    tightened,
)
from edgesplit_agent.serving.request import Answer

State = Literal["calibrating", "repeating", "off"]
FIRST_AUDIT_SHARE, AUDIT_SHARE = 0.10, 0.02
"""Greatest and least probability that a frame is drawn for audit."""
MAX_TEXT = 400
"""Longest text in a state that is kept."""


@dataclass(frozen=True, slots=True)
class AnsweredFrame:
    """The newest frame that the model answered."""

    thumbnail: Thumbnail
    answer: Answer
    at: float
    """When its request arrived, in seconds of the caller's clock."""


class KeptState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a stream has found out, which is written to disk and survives a restart: no frames, and no answers."""

    rule: str
    """The answer rule, and"""
    allowed: float
    """the share of answers that may change, and"""
    spacing_s: float
    """the spacing of the frames that count, for which it was found."""
    test: SequentialTest
    calibration: CalibrationCounts | None = None
    """None: the calibration has ended."""
    threshold: float = 0.0
    calibrated: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    alarm: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    problem: Annotated[str, Meta(max_length=MAX_TEXT)] = ""

    def __post_init__(self) -> None:
        """ValueError where no stream can have this state."""
        if not 0.0 <= self.threshold <= THRESHOLDS[-1]:
            raise ValueError(f"a threshold of {self.threshold} is not from 0 to {THRESHOLDS[-1]}")


@dataclass(frozen=True, slots=True)
class Look:
    """What is decided about one frame before it is answered."""

    thumbnail: Thumbnail
    at: float
    taken_at_s: float
    """When it was taken: by the application's clock where that says so, else when its request arrived."""
    repeats: AnsweredFrame | None = None
    """The answered frame that this one is like; None: it must be answered by the model."""
    distance: float = DIFFERENT
    """Its difference to that frame, or to the newest answered one."""
    threshold: float = 0.0
    is_audit: bool = False
    """Whether it was drawn for audit: the model answers it although it is still."""


@dataclass(slots=True)
class StillCounts:
    """Frames of a stream, or of a model's streams together."""

    repeated: int = 0
    """Answers that were repeated."""
    same: int = 0
    """Frames drawn for audit whose answer was the model's: still ones compared, moved ones answered by it anyway."""
    changed: int = 0
    """Still frames drawn for audit to which the model's answer was another."""
    unaudited: int = 0
    """Still frames drawn for audit that the model could not answer."""
    alarms: int = 0
    """Times that the audited share exceeded the allowance, and the threshold was tightened."""

    def plus(self, other: StillCounts) -> StillCounts:
        """Both together."""
        return StillCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def since(self, earlier: StillCounts) -> StillCounts:
        """What came after the earlier counts."""
        return StillCounts(*map(sub, astuple(self), astuple(earlier)))


class StillStream:
    """The state of one stream. Not thread-safe."""

    def __init__(
        self,
        rule: AnswerRule,
        allowed: float,
        delta: float = DELTA,
        *,
        spacing_s: float = SPACING_S,
        kept: KeptState | None = None,
    ) -> None:
        """`allowed`: share of the stream's answers that may differ from the model's, between 0 and 1. `kept`: what was
        found out before; without effect where that was for other terms."""
        self.rule = rule
        self.allowed = allowed
        self.counts = StillCounts()
        self._spacing_s = spacing_s
        fresh = KeptState(rule.to_text(), allowed, spacing_s, SequentialTest(allowed, delta))
        before = kept if kept is not None and _terms(kept) == _terms(fresh) else None
        self.threshold = before.threshold if before else 0.0
        self.problem = before.problem if before else ""
        """Why no answer is repeated any more; empty if there is no reason."""
        self.calibrated = before.calibrated if before else ""
        """What the calibration saw, in words; empty before its end."""
        self.alarm = before.alarm if before else ""
        """The last alarm in words; empty before the first."""
        self._calibration: Calibration | None = None
        if before is None or before.calibration is not None:
            counts = before.calibration if before else None
            self._calibration = Calibration(rule, allowed, delta, spacing_s=spacing_s, counts=counts)
        self._test = (before or fresh).test
        self._newest: AnsweredFrame | None = None

    def to_keep(self) -> KeptState:
        """What a later run of the agent goes on with."""
        return KeptState(
            self.rule.to_text(), self.allowed, self._spacing_s, self._test,
            self._calibration.counts if self._calibration is not None else None, self.threshold,
            self.calibrated, self.alarm, self.problem,
        )  # fmt: skip

    @property
    def audit_probability(self) -> float:
        """Probability with which the stream's next frame is to be drawn for audit, before it is looked at.

        It falls with the number of frames audited since the calibration or the last alarm: from as many on as a
        promise takes where no answer changes. It depends on the past alone, so each audit weighs the same
        (`edgesplit.answers.sequential`).
        """
        evidence = self._test.observed / draws_needed(self.allowed, self._test.delta)
        return max(AUDIT_SHARE, FIRST_AUDIT_SHARE / max(1.0, evidence))

    @property
    def state(self) -> State:
        """Where the stream is."""
        if self._calibration is not None:
            return "calibrating"
        return "repeating" if self.threshold > 0.0 else "off"

    @property
    def progress(self) -> str:
        """The state in words."""
        if self._calibration is not None:
            counted, needed = self._calibration.frames, self._calibration.needed
            left_s = self._calibration.left_s
            left = format_duration(left_s if left_s < 120 else 60 * round(left_s / 60))
            return f"calibrating: {counted} of {needed} frames, about {left} more"
        if self.threshold > 0.0:
            return f"repeats answers while a frame differs by less than {self.threshold:.2%} of full scale"
        return f"off: {self.problem}"

    def look(self, frame: Thumbnail, at: float, draws_audit: bool, taken_at_s: float | None = None) -> Look:
        """Whether the frame repeats an answer. `draws_audit` was drawn before anything about it was known."""
        newest, taken_at_s = self._newest, at if taken_at_s is None else taken_at_s
        if self.state != "repeating" or newest is None:
            return Look(frame, at, taken_at_s)
        distance = difference(newest.thumbnail, frame)
        is_still = distance < self.threshold
        return Look(frame, at, taken_at_s, newest if is_still else None, distance, self.threshold, draws_audit)

    def on_repeated(self) -> None:
        """An answer was repeated."""
        self.counts.repeated += 1

    def on_answered(self, look: Look, answer: Answer) -> None:
        """The model answered the frame."""
        if self._calibration is not None:
            self._calibrate(look, answer)
        elif look.is_audit and self.state == "repeating":
            earlier = look.repeats.answer.outputs if look.repeats is not None else answer.outputs
            self._audit(look.repeats is not None and answers_differ(self.rule, earlier, answer.outputs))
        if self._newest is None or look.at >= self._newest.at:
            self._newest = AnsweredFrame(look.thumbnail, answer, look.at)

    def on_unaudited(self) -> None:
        """The model could not answer a still frame that was drawn for audit."""
        self.counts.unaudited += 1

    def stop(self, problem: str) -> None:
        """Repeat no answer from now on."""
        self._calibration = self._newest = None
        self.threshold, self.problem = 0.0, problem[:MAX_TEXT]

    @property
    def held_bytes(self) -> int:
        """Bytes of the answers that are kept, at most."""
        if self._newest is None:
            return 0
        size = sum(values.nbytes for values in self._newest.answer.outputs.values())
        return size * (1 + (self._calibration.references if self._calibration is not None else 0))

    def _calibrate(self, look: Look, answer: Answer) -> None:
        if self._calibration is None or (self._newest is not None and look.at < self._newest.at):
            return  # answered out of turn: its predecessor was another
        self._calibration.add(look.thumbnail, answer.outputs, look.taken_at_s)
        choice = self._calibration.choose()
        if choice is not None:
            self._calibration = None
            self.threshold = choice.threshold
            seen = f"{choice.changed} of {choice.repeated} repeated answers changed in {choice.frames} frames"
            self.calibrated = seen
            self.problem = "" if choice.threshold else "no frame was still, or too many answers changed"

    def _audit(self, differs: bool) -> None:
        self.counts.changed += differs
        self.counts.same += not differs
        before, self._test = self._test, self._test.observe(differs)
        if self._test.alarms == before.alarms:
            return
        self.counts.alarms += 1
        self.threshold = tightened(self.threshold)
        seen = f"{before.changed + differs} of {before.observed + 1} audited frames changed, {self.allowed:.2%} allowed"
        self.alarm = f"{seen}: {'threshold halved' if self.threshold else 'no answer is repeated any more'}"
        self.problem = "" if self.threshold else f"too many answers changed ({seen})"


def _terms(state: KeptState) -> tuple[str, float, float, float, float]:
    """What a state was found for."""
    return state.rule, state.allowed, state.spacing_s, state.test.allowed, state.test.delta


warm_up_structs(__name__)
