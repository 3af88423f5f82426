"""`Client.stream`: one thread reads the source, one per frame under way asks, the caller's own gives the results."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import Any, Protocol

from edgesplit.client.frame_window import Result, StreamSettings, Window
from edgesplit.client.request import Answer, Question
from edgesplit.errors import EdgeError


class Asks(Protocol):
    """What a stream needs of a client."""

    def answer(self, question: Question, deadline: float, deadline_s: float) -> Answer:
        """Ask until it is answered or the deadline has come."""
        ...

    def close(self) -> None:
        """End what is under way."""
        ...


def answers(settings: StreamSettings, frames: Iterable[Any], client: Asks) -> Iterator[Result]:
    """Results in order, as `settings.errors` wants them. `client` is the stream's own and is closed with it."""
    stream = _Stream(settings, frames, client)
    stream.start()
    try:
        while (given := stream.next()) is not None:
            if (result := settings.given(*given)) is not None:
                yield result
    finally:
        stream.stop()


class _Stream:
    def __init__(self, settings: StreamSettings, frames: Iterable[Any], client: Asks) -> None:
        self._settings = settings
        self._frames = frames
        self._client = client
        self._name = uuid.uuid4().hex
        self._window: Window[tuple[Any, float]] = Window(settings.in_flight, settings.drop)
        self._changed = threading.Condition()
        self._stopped = False
        self._broken: BaseException | None = None
        """What the source itself raised; it rises when all before it were given out."""

    def start(self) -> None:
        """Begin to read and to ask."""
        for run in (self._read, *[self._ask] * self._settings.in_flight):
            threading.Thread(target=run, name="stream", daemon=True).start()

    def stop(self) -> None:
        """Nobody wants more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._client.close()

    def next(self) -> tuple[int, Result] | None:
        """The next result, once it is there; None at the end."""
        with self._changed:
            while (given := self._window.give()) is None:
                if self._window.over:
                    if self._broken is not None:
                        raise self._broken
                    return None
                self._changed.wait()
            self._changed.notify_all()
            return given

    def _read(self) -> None:
        """On a thread of its own: the source, as far ahead as the window allows."""
        try:
            source = iter(self._frames)
            while self._may_take():
                frame = next(source)
                with self._changed:
                    self._window.take((frame, monotonic() + self._settings.deadline_s))
                    self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as error:
            self._broken = error
        with self._changed:
            self._window.ended()
            self._changed.notify_all()

    def _may_take(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._window.wants)
            return not self._stopped

    def _ask(self) -> None:
        """On a thread of its own: one frame after the other."""
        while (begun := self._begin()) is not None:
            number, (frame, deadline) = begun
            try:
                question = self._settings.question(self._name, frame)
                result: Result = self._client.answer(question, deadline, self._settings.deadline_s)
            except EdgeError as error:
                result = error
            except Exception as error:
                result = EdgeError(f"frame {number}: {type(error).__name__}: {error}")
            with self._changed:
                self._window.finished(number, result)
                self._changed.notify_all()

    def _begin(self) -> tuple[int, tuple[Any, float]] | None:
        """The next frame to ask about, once there is one; None when none will be."""
        with self._changed:
            while not self._stopped and not self._window.over:
                if (begun := self._window.begin()) is not None:
                    return begun
                self._changed.wait()
            self._changed.notify_all()
            return None
