"""Flow control of a stream: which frame is read, sent, dropped and yielded, and when. No threads, no clocks.

Frames are numbered from 0 as they are read, and results are yielded in that order. At most `in_flight` frames are in
flight, or answered and not yet yielded; with a drop policy one more may wait, and either it or the newly read frame is
dropped. A consumer that stops reading therefore stops the source (`none`), or receives the newest frames when it
resumes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args

from edgesplit.client.accepted_inputs import ByName
from edgesplit.client.answer import Answer
from edgesplit.client.request import InferenceRequest, check_deadline
from edgesplit.errors import Dropped, EdgeError, UsageError
from edgesplit.oip.options import NONE, Drop, InferOptions, to_parameters

ErrorMode = Literal["raise", "yield"]
Result: TypeAlias = Answer | EdgeError
MAX_IN_FLIGHT = 64
T = TypeVar("T")


@dataclass(frozen=True)
class StreamSettings:
    """The options of one stream, checked: UsageError for values out of range."""

    model: str
    in_flight: int
    drop: Drop
    deadline_s: float
    errors: ErrorMode
    outputs: tuple[str, ...] = ()
    options: InferOptions = NONE
    to_inputs: Callable[[Any], ByName] = lambda frame: frame
    """Turns what the application gave as a frame into inputs by name."""

    def __post_init__(self) -> None:
        check_deadline(self.deadline_s)
        if not 0 < self.in_flight <= MAX_IN_FLIGHT:
            raise UsageError(f"in_flight is {self.in_flight}: 1 to {MAX_IN_FLIGHT}")
        for name, value, known in (("drop", self.drop, Drop), ("errors", self.errors, ErrorMode)):
            if value not in get_args(known):
                raise UsageError(f"{name} is {value!r}: one of {', '.join(get_args(known))}")

    def request(self, stream: str, frame: Any) -> InferenceRequest:
        """The inference request for one frame; its parameters carry the stream's name and the drop policy. UsageError
        if `frame` cannot be an input."""
        inputs = self.to_inputs(frame)
        options = replace(self.options, stream=self.options.stream or stream, drop=self.drop)
        return InferenceRequest.create(self.model, inputs, self.outputs, parameters=to_parameters(options))

    def to_application(self, number: int, result: Result) -> Result | None:
        """What the application receives for a frame's result; None for nothing. Raises the error if `errors` is
        "raise"."""
        if isinstance(result, Answer):
            return replace(result, frame=number)
        if self.errors == "yield":
            return result
        if not isinstance(result, Dropped):
            raise result
        return None


@dataclass
class _Entry(Generic[T]):
    number: int
    content: T | None
    is_in_flight: bool = False
    result: Result | None = None
    count: int = 1
    """How many consecutive dropped frames this entry stands for."""


class FrameWindow(Generic[T]):
    """The frames between a source and a consumer. `T` is what the caller needs to send a frame."""

    def __init__(self, in_flight: int, drop: Drop) -> None:
        self._in_flight = in_flight
        self._drop: Drop = drop
        self._entries: deque[_Entry[T]] = deque()
        self._next = 0
        self._source_ended = False

    @property
    def can_accept(self) -> bool:
        """Whether another frame may be read from the source now."""
        return self._drop != "none" or len(self._entries) < self._in_flight

    @property
    def is_over(self) -> bool:
        """Whether the source has ended and every result was yielded."""
        return self._source_ended and not self._entries

    def add(self, content: T) -> None:
        """Add a frame that was read from the source; if there is no room for it, one frame is dropped."""
        entry = _Entry(self._next, content)
        self._next += 1
        self._entries.append(entry)
        waiting = [queued for queued in self._entries if not queued.is_in_flight and queued.result is None]
        begun = sum(queued.is_in_flight for queued in self._entries)
        if self._drop != "none" and begun + len(waiting) > self._in_flight + 1:
            self._drop_entry(waiting[0] if self._drop == "oldest" else entry)

    def start_next(self) -> tuple[int, T] | None:
        """Number and content of the next frame to send, which is in flight from now on; None if none may be sent
        now."""
        if sum(queued.is_in_flight for queued in self._entries) >= self._in_flight:
            return None
        for entry in self._entries:
            if not entry.is_in_flight and entry.result is None and entry.content is not None:
                entry.is_in_flight = True
                content, entry.content = entry.content, None
                return entry.number, content
        return None

    def set_result(self, number: int, result: Result) -> None:
        """Store the answer or error of frame `number`."""
        next(queued for queued in self._entries if queued.number == number).result = result

    def end_source(self, error: EdgeError | None = None) -> None:
        """The source has no more frames; `error`, if given, becomes the last result."""
        self._source_ended = True
        if error is not None:
            self._entries.append(_Entry(self._next, None, result=error))

    def next_result(self) -> tuple[int, Result] | None:
        """Number and result of the next frame in order; None if that result is not there yet."""
        first = self._entries[0] if self._entries else None
        if first is None or first.result is None:
            return None
        number, result = first.number, first.result
        if first.count > 1:
            first.number, first.count = first.number + 1, first.count - 1
        else:
            self._entries.popleft()
        return (number, Dropped(f"frame {number}: {result}")) if type(result) is _DroppedHere else (number, result)

    def _drop_entry(self, entry: _Entry[T]) -> None:
        """Drop `entry`. Consecutive dropped frames share one entry, so a consumer that sleeps costs no memory."""
        entry.content, entry.result = None, _DroppedHere("dropped, because answers come more slowly than frames")
        index = self._entries.index(entry)
        previous = self._entries[index - 1] if index else None
        if previous is not None and type(previous.result) is _DroppedHere:
            previous.count += 1
            del self._entries[index]


class _DroppedHere(Dropped):
    """A frame dropped here, not by the server."""
