"""Which frame of a stream is taken, begun, dropped and given out, and when: decided here, without threads or clocks.

Frames are numbered from 0 as they are taken. Results are given out in that order. At most `in_flight` frames are under
way or answered and not yet given out; where frames may be dropped one more waits, and it, or the one that comes, gives
way. A consumer that stops reading therefore stops everything (`none`), or is given the newest when it comes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, get_args

from edgesplit.client.request import Answer, Question, check_deadline
from edgesplit.errors import Dropped, EdgeError, UsageError
from edgesplit.oip.options import NONE, Drop, Wishes, to_parameters

Errors = Literal["raise", "yield"]
Result = Answer | EdgeError
MOST_IN_FLIGHT = 64
T = TypeVar("T")


@dataclass(frozen=True)
class StreamSettings:
    """What an application says of a stream; UsageError for what cannot be."""

    model: str
    in_flight: int
    drop: Drop
    deadline_s: float
    errors: Errors
    outputs: tuple[str, ...] = ()
    wishes: Wishes = NONE

    def __post_init__(self) -> None:
        check_deadline(self.deadline_s)
        if not 0 < self.in_flight <= MOST_IN_FLIGHT:
            raise UsageError(f"in_flight is {self.in_flight}: 1 to {MOST_IN_FLIGHT}")
        for name, value, known in (("drop", self.drop, Drop), ("errors", self.errors, Errors)):
            if value not in get_args(known):
                raise UsageError(f"{name} is {value!r}: one of {', '.join(get_args(known))}")

    def question(self, stream: str, frame: Any) -> Question:
        """The request for one frame; it tells the server which stream it is of and what may give way."""
        if not isinstance(frame, Mapping):
            raise UsageError(f"a frame is a {type(frame).__name__}, not a mapping of inputs by name")
        wishes = replace(self.wishes, stream=self.wishes.stream or stream, drop=self.drop)
        return Question.of(self.model, frame, self.outputs, parameters=to_parameters(wishes))

    def given(self, number: int, result: Result) -> Result | None:
        """What the application gets of a frame's result: None for nothing. Raises the error where it wants that."""
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
    begun: bool = False
    result: Result | None = None
    count: int = 1
    """Of frames next to each other that were dropped."""


class Window(Generic[T]):
    """The frames between a source and a consumer. `T` is what the caller needs to begin one."""

    def __init__(self, in_flight: int, drop: Drop) -> None:
        self._in_flight = in_flight
        self._drop: Drop = drop
        self._entries: deque[_Entry[T]] = deque()
        self._next = 0
        self._source_ended = False

    @property
    def wants(self) -> bool:
        """May another frame be taken from the source now?"""
        return self._drop != "none" or len(self._entries) < self._in_flight

    @property
    def over(self) -> bool:
        """The source has ended and everything was given out."""
        return self._source_ended and not self._entries

    def take(self, content: T) -> None:
        """A frame has been taken from the source. Where there is no room for it, one gives way."""
        entry = _Entry(self._next, content)
        self._next += 1
        self._entries.append(entry)
        waiting = [one for one in self._entries if not one.begun and one.result is None]
        begun = sum(one.begun for one in self._entries)
        if self._drop != "none" and begun + len(waiting) > self._in_flight + 1:
            self._give_way(waiting[0] if self._drop == "oldest" else entry)

    def begin(self) -> tuple[int, T] | None:
        """The next frame to send, by number, if one may be sent now; it is under way from now on."""
        if sum(one.begun for one in self._entries) >= self._in_flight:
            return None
        for entry in self._entries:
            if not entry.begun and entry.result is None and entry.content is not None:
                entry.begun = True
                content, entry.content = entry.content, None
                return entry.number, content
        return None

    def finished(self, number: int, result: Result) -> None:
        """That frame has its answer or its error."""
        next(one for one in self._entries if one.number == number).result = result

    def ended(self, error: EdgeError | None = None) -> None:
        """The source gives no more; with an error, that is the last result."""
        self._source_ended = True
        if error is not None:
            self._entries.append(_Entry(self._next, None, result=error))

    def give(self) -> tuple[int, Result] | None:
        """The next result in order, by its frame's number; None where it is not there yet."""
        first = self._entries[0] if self._entries else None
        if first is None or first.result is None:
            return None
        number, result = first.number, first.result
        if first.count > 1:
            first.number, first.count = first.number + 1, first.count - 1
        else:
            self._entries.popleft()
        return (number, Dropped(f"frame {number}: {result}")) if type(result) is _GaveWay else (number, result)

    def _give_way(self, entry: _Entry[T]) -> None:
        """`entry` is dropped; neighbours that were are one entry, so a consumer that sleeps costs no memory."""
        entry.content, entry.result = None, _GaveWay("it gave way, for answers come more slowly than frames")
        at = self._entries.index(entry)
        before = self._entries[at - 1] if at else None
        if before is not None and type(before.result) is _GaveWay:
            before.count += 1
            del self._entries[at]


class _GaveWay(Dropped):
    """Here, not at the server."""
