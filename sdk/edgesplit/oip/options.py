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
HEDGE, STALE_OK = "edgesplit_hedge", "edgesplit_stale_ok"
MAX_STREAM_NAME = 80
MAX_QUEUE = 1_000_000
MAX_AGE_S = 86_400.0


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


NONE = InferOptions()
_NAMES = frozenset((STREAM, DROP, QUEUE, HEDGE, STALE_OK))


def to_parameters(options: InferOptions) -> dict[str, Scalar]:
    """As request parameters; options with their default value are left out."""
    named: dict[str, Scalar | None] = {
        STREAM: options.stream or None, DROP: options.drop if options.drop != "none" else None, QUEUE: options.queue,
        HEDGE: options.hedge, STALE_OK: options.stale_ok_s or None,
    }  # fmt: skip
    return {name: value for name, value in named.items() if value is not None}


def from_parameters(parameters: Mapping[str, Scalar]) -> InferOptions:
    """The options in a request's parameters. UsageError for invalid values."""
    if _NAMES.isdisjoint(parameters):
        return NONE
    queue, hedge = parameters.get(QUEUE), parameters.get(HEDGE)
    return InferOptions(
        stream=_text(parameters, STREAM),
        drop=_text(parameters, DROP) or "none",  # type: ignore[arg-type]  # __post_init__ looks
        queue=None if queue is None else int(_number(QUEUE, queue)),
        hedge=None if hedge is None else _text(parameters, HEDGE),  # type: ignore[arg-type]
        stale_ok_s=_number(STALE_OK, parameters.get(STALE_OK, 0)),
    )


def _text(parameters: Mapping[str, Scalar], name: str) -> str:
    value = parameters.get(name, "")
    if not isinstance(value, str):
        raise UsageError(f"{name}: {str(value)[:80]!r} is no text")
    return value


def _number(name: str, value: Scalar) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{name}: {str(value)[:80]!r} is no number")
    return number
