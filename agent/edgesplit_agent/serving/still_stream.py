"""One stream whose still frames are given its last answer: calibrating, then repeating with audits, perhaps off.

Decides from thumbnails and a drawn number; the engine runs the model. No locks, no clock, no randomness of its own.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.comparison import answers_differ
from edgesplit.answers.sequential import SequentialTest
from edgesplit_agent.policy.frame_difference import DIFFERENT, Thumbnail, difference
from edgesplit_agent.policy.still_calibration import DELTA, Calibration, tightened
from edgesplit_agent.serving.request import Answer

State = Literal["calibrating", "repeating", "off"]


@dataclass(frozen=True, slots=True)
class AnsweredFrame:
    """The newest frame that the model answered."""

    thumbnail: Thumbnail
    answer: Answer
    at: float
    """When its request arrived, in seconds of the caller's clock."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is decided about one frame before it is answered."""

    thumbnail: Thumbnail
    at: float
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


class StillStream:
    """The state of one stream. Not thread-safe."""

    def __init__(self, rule: AnswerRule, allowed: float, delta: float = DELTA) -> None:
        """`allowed`: share of the stream's answers that may differ from the model's, between 0 and 1."""
        self.rule = rule
        self.allowed = allowed
        self.counts = StillCounts()
        self.threshold = 0.0
        self.problem = ""
        """Why no answer is repeated any more; empty if there is no reason."""
        self.calibrated = ""
        """What the calibration saw, in words; empty before its end."""
        self.alarm = ""
        """The last alarm in words; empty before the first."""
        self._calibration: Calibration | None = Calibration(rule, allowed, delta)
        self._test = SequentialTest(allowed, delta)
        self._newest: AnsweredFrame | None = None

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
            return f"calibrating: {self._calibration.frames} of {self._calibration.needed} frames"
        if self.threshold > 0.0:
            return f"repeats answers while a frame differs by less than {self.threshold:.2%} of full scale"
        return f"off: {self.problem}"

    def look(self, frame: Thumbnail, at: float, draws_audit: bool) -> Look:
        """Whether the frame repeats an answer. `draws_audit` was drawn before anything about it was known."""
        newest = self._newest
        if self.state != "repeating" or newest is None:
            return Look(frame, at)
        distance = difference(newest.thumbnail, frame)
        is_still = distance < self.threshold
        return Look(frame, at, newest if is_still else None, distance, self.threshold, draws_audit)

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
        self.threshold, self.problem = 0.0, problem

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
        self._calibration.add(look.thumbnail, answer.outputs)
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
