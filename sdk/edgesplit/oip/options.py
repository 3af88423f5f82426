"""Per-request options of an application, beside the tensors; they travel as Open Inference Protocol request parameters.

The deadline is not among them: it travels as `timeout`, as Triton's does (`oip.timeout_s`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from edgesplit.errors import UsageError
from edgesplit.oip.protocol import Scalar

Drop = Literal["none", "oldest", "newest"]
Hedge = Literal["auto", "always", "never"]

STREAM, DROP, QUEUE = "edgesplit_stream", "edgesplit_drop", "edgesplit_queue"
HEDGE, STALE_OK, LEAST_ACCURACY = "edgesplit_hedge", "edgesplit_stale_ok", "edgesplit_least_accuracy"
SKIP_STILL, ANSWER, TAKEN_AT = "edgesplit_skip_still", "edgesplit_answer", "edgesplit_taken_at"
REFUSE_UNSURE = "edgesplit_refuse_unsure"
MAX_STREAM_NAME = 80
MAX_QUEUE = 1_000_000
MAX_AGE_S = 86_400.0
MIN_CHANGED, MAX_CHANGED = 1e-4, 0.5
"""Range of the share of answers that repeating may change; the least takes 46,000 frames to calibrate."""
MAX_ANSWER_RULE = 200
MAX_TIME_S = 1e12
"""Largest time of a frame, in seconds of any clock."""


@dataclass(frozen=True, slots=True)
class InferOptions:
    """Options of one inference request; each parameter is described in docs/protocol.md. All may be left out.
    UsageError for values out of range."""

    stream: str = ""
    drop: Drop = "none"
    queue: int | None = None
    """Frames of the stream that may wait for their turn; None: no limit beyond the agent's queue."""
    hedge: Hedge | None = None
    """None: the agent's configured policy."""
    stale_ok_s: float = 0.0
    """Greatest age in seconds of an earlier answer of the stream that is acceptable instead; 0: none."""
    skip_still: float | None = None
    """Share of the stream's answers that may differ from the model's because still frames are given the last answer;
    0: no answer is repeated; None: what the operator set for named streams."""
    answer: str = ""
    """The answer rule, which says when two answers differ; empty: the class, where the model is a classifier."""
    taken_at_s: float | None = None
    """When the frame was taken, in seconds of the stream's own clock, as of a recording that is sent faster than it was
    made; None: when it arrives. Still frames are calibrated by it."""
    least_accuracy: float = 0.0
    """Of a family: least accuracy of the variant that answers, 0 to 1. The plan may ask for more."""
    refuse_unsure: bool = False
    """In a cascade: an error (`errors.Unsure`) in place of an unsure answer, where the second variant cannot be asked
    in time."""

    def __post_init__(self) -> None:
        if len(self.stream) > MAX_STREAM_NAME:
            raise UsageError(f"{STREAM}: a name of {len(self.stream)} characters, at most {MAX_STREAM_NAME}")
        if self.drop not in get_args(Drop):
            raise UsageError(f"{DROP}: {str(self.drop)[:80]!r} is not one of {', '.join(get_args(Drop))}")
        if self.hedge is not None and self.hedge not in get_args(Hedge):
            raise UsageError(f"{HEDGE}: {str(self.hedge)[:80]!r} is not one of {', '.join(get_args(Hedge))}")
        if self.queue is not None and not 1 <= self.queue <= MAX_QUEUE:
            raise UsageError(f"{QUEUE}: {self.queue} is no number of frames that may wait, 1 or more")
        if self.queue is not None and self.drop == "none":
            raise UsageError(f"{QUEUE} needs {DROP}: `oldest` or `newest`, the frame to drop")
        if not 0 <= self.stale_ok_s <= MAX_AGE_S:
            raise UsageError(f"{STALE_OK}: {self.stale_ok_s} is no age in seconds, 0 to {MAX_AGE_S:g}")
        if self.skip_still is not None and not (self.skip_still == 0 or MIN_CHANGED <= self.skip_still <= MAX_CHANGED):
            raise UsageError(f"{SKIP_STILL}: {self.skip_still} is no share, {MIN_CHANGED:g} to {MAX_CHANGED:g}, or 0")
        if len(self.answer) > MAX_ANSWER_RULE:
            raise UsageError(f"{ANSWER}: a rule of {len(self.answer)} characters, at most {MAX_ANSWER_RULE}")
        if self.taken_at_s is not None and not abs(self.taken_at_s) <= MAX_TIME_S:
            raise UsageError(f"{TAKEN_AT}: {self.taken_at_s} is no time in seconds")
        if not 0 <= self.least_accuracy <= 1:
            raise UsageError(f"{LEAST_ACCURACY}: {self.least_accuracy} is no share, 0 to 1 (0.7 for 70 %)")


NONE = InferOptions()
_NAMES = frozenset((
    STREAM, DROP, QUEUE, HEDGE, STALE_OK, SKIP_STILL, ANSWER, TAKEN_AT, LEAST_ACCURACY, REFUSE_UNSURE,
))  # fmt: skip


def to_parameters(options: InferOptions) -> dict[str, Scalar]:
    """As request parameters; options with their default value are left out."""
    named: dict[str, Scalar | None] = {
        STREAM: options.stream or None, DROP: options.drop if options.drop != "none" else None, QUEUE: options.queue,
        HEDGE: options.hedge, STALE_OK: options.stale_ok_s or None,
        SKIP_STILL: options.skip_still, ANSWER: options.answer or None, TAKEN_AT: options.taken_at_s,
        LEAST_ACCURACY: options.least_accuracy or None, REFUSE_UNSURE: options.refuse_unsure or None,
    }  # fmt: skip
    return {name: value for name, value in named.items() if value is not None}


def from_parameters(parameters: Mapping[str, Scalar]) -> InferOptions:
    """The options in a request's parameters. UsageError for invalid values."""
    if _NAMES.isdisjoint(parameters):
        return NONE
    queue, hedge, skip_still = parameters.get(QUEUE), parameters.get(HEDGE), parameters.get(SKIP_STILL)
    taken_at = parameters.get(TAKEN_AT)
    return InferOptions(
        stream=_text(parameters, STREAM),
        drop=_text(parameters, DROP) or "none",  # type: ignore[arg-type]  # __post_init__ looks
        queue=None if queue is None else int(_number(QUEUE, queue)),
        hedge=None if hedge is None else _text(parameters, HEDGE),  # type: ignore[arg-type]
        stale_ok_s=_number(STALE_OK, parameters.get(STALE_OK, 0)),
        skip_still=None if skip_still is None else _number(SKIP_STILL, skip_still),
        answer=_text(parameters, ANSWER),
        taken_at_s=None if taken_at is None else _number(TAKEN_AT, taken_at),
        least_accuracy=_number(LEAST_ACCURACY, parameters.get(LEAST_ACCURACY, 0)),
        refuse_unsure=_flag(REFUSE_UNSURE, parameters.get(REFUSE_UNSURE, False)),
    )


def _text(parameters: Mapping[str, Scalar], name: str) -> str:
    value = parameters.get(name, "")
    if not isinstance(value, str):
        raise UsageError(f"{name}: {str(value)[:80]!r} is no text")
    return value


def _flag(name: str, value: Scalar) -> bool:
    """A flag, which clients that can send only text send as one of two words."""
    words = {"true": True, "false": False}
    flag = words.get(value) if isinstance(value, str) else value
    if not isinstance(flag, bool):
        raise UsageError(f"{name}: {str(value)[:80]!r} is neither true nor false")
    return flag


def _number(name: str, value: Scalar) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{name}: {str(value)[:80]!r} is no number")
    return number
