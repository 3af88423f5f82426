"""How an application wants one request to be answered, beside its tensors: Open Inference Protocol request parameters.

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
STREAM_LENGTH = 80
LONGEST_QUEUE = 1_000_000
LONGEST_AGE_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Wishes:
    """What docs/protocol.md says of each parameter; all may be left out."""

    stream: str = ""
    drop: Drop = "none"
    queue: int | None = None
    """Frames of the stream that may wait for their turn; None: as many as there is room for."""
    hedge: Hedge | None = None
    """None: as the agent was told."""
    stale_ok_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.stream) > STREAM_LENGTH:
            raise UsageError(f"{STREAM}: a name of {len(self.stream)} characters, at most {STREAM_LENGTH}")
        if self.drop not in get_args(Drop):
            raise UsageError(f"{DROP}: {str(self.drop)[:80]!r} is none of {', '.join(get_args(Drop))}")
        if self.hedge is not None and self.hedge not in get_args(Hedge):
            raise UsageError(f"{HEDGE}: {str(self.hedge)[:80]!r} is none of {', '.join(get_args(Hedge))}")
        if self.queue is not None and not 1 <= self.queue <= LONGEST_QUEUE:
            raise UsageError(f"{QUEUE}: {self.queue} is no number of frames that may wait, 1 or more")
        if self.queue is not None and self.drop == "none":
            raise UsageError(f"{QUEUE} needs {DROP}: `oldest` or `newest` says which frame gives way")
        if not 0 <= self.stale_ok_s <= LONGEST_AGE_S:
            raise UsageError(f"{STALE_OK}: {self.stale_ok_s} is no age in seconds, 0 to {LONGEST_AGE_S:g}")


NONE = Wishes()
_NAMES = frozenset((STREAM, DROP, QUEUE, HEDGE, STALE_OK))


def to_parameters(wishes: Wishes) -> dict[str, Scalar]:
    """As request parameters; what was not wished for is left out."""
    named: dict[str, Scalar | None] = {
        STREAM: wishes.stream or None,
        DROP: wishes.drop if wishes.drop != "none" else None,
        QUEUE: wishes.queue,
        HEDGE: wishes.hedge,
        STALE_OK: wishes.stale_ok_s or None,
    }
    return {name: value for name, value in named.items() if value is not None}


def from_parameters(parameters: Mapping[str, Scalar]) -> Wishes:
    """What a request wishes for. UsageError for what means nothing."""
    if _NAMES.isdisjoint(parameters):
        return NONE
    queue, hedge = parameters.get(QUEUE), parameters.get(HEDGE)
    return Wishes(
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
