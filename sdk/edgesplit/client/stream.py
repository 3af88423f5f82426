"""`Client.stream`: one thread reads the source, one per frame in flight sends requests, the caller's thread yields
results."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Any

from edgesplit.client.answer import Answer
from edgesplit.client.frame_window import FrameWindow, Result, StreamSettings
from edgesplit.client.request import InferenceRequest
from edgesplit.errors import EdgeError

Send = Callable[[InferenceRequest, float, float], Answer]
"""Sends a request with retries until its deadline (monotonic clock), given also as seconds from its begin."""


def stream_answers(
    settings: StreamSettings, frames: Iterable[Any], send: Send, cancel: Callable[[], None]
) -> Iterator[Result]:
    """Results in frame order, filtered by `settings.errors`. `cancel` ends the requests in flight at the stream's
    end."""
    stream = _Stream(settings, frames, send)
    stream.start()
    try:
        while (numbered_result := stream.next()) is not None:
            if (result := settings.to_application(*numbered_result)) is not None:
                yield result
    finally:
        stream.stop()
        cancel()


class _Stream:
    def __init__(self, settings: StreamSettings, frames: Iterable[Any], send: Send) -> None:
        self._settings = settings
        self._frames = frames
        self._send = send
        self._name = uuid.uuid4().hex
        self._window: FrameWindow[tuple[Any, float]] = FrameWindow(settings.in_flight, settings.drop)
        self._changed = threading.Condition()
        self._stopped = False
        self._source_error: BaseException | None = None
        """What the source raised; raised to the consumer after all earlier results."""

    def start(self) -> None:
        """Start the reading and the sending threads."""
        for target in (self._read_source, *[self._send_frames] * self._settings.in_flight):
            threading.Thread(target=target, name="stream", daemon=True).start()

    def stop(self) -> None:
        """End the stream: the threads finish."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def next(self) -> tuple[int, Result] | None:
        """Number and result of the next frame in order, once available; None at the end. Raises what the source
        raised."""
        with self._changed:
            while (numbered_result := self._window.next_result()) is None:
                if self._window.is_over:
                    if self._source_error is not None:
                        raise self._source_error
                    return None
                self._changed.wait()
            self._changed.notify_all()
            return numbered_result

    def _read_source(self) -> None:
        """Reader thread: reads the source as far ahead as the window allows."""
        try:
            source = iter(self._frames)
            while self._wait_for_room():
                frame = next(source)
                with self._changed:
                    self._window.add((frame, monotonic() + self._settings.deadline_s))
                    self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as error:
            self._source_error = error
        with self._changed:
            self._window.end_source()
            self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._window.can_accept)
            return not self._stopped

    def _send_frames(self) -> None:
        """Sender thread: sends one frame after the other."""
        while (next_frame := self._next_frame()) is not None:
            number, (frame, deadline) = next_frame
            try:
                request = self._settings.request(self._name, frame)
                result: Result = self._send(request, deadline, self._settings.deadline_s)
            except EdgeError as error:
                result = error
            except Exception as error:
                result = EdgeError(f"frame {number}: {type(error).__name__}: {error}")
            with self._changed:
                self._window.set_result(number, result)
                self._changed.notify_all()

    def _next_frame(self) -> tuple[int, tuple[Any, float]] | None:
        """The next frame to send, once there is one; None when there will be no more."""
        with self._changed:
            while not self._stopped and not self._window.is_over:
                if (next_frame := self._window.start_next()) is not None:
                    return next_frame
                self._changed.wait()
            self._changed.notify_all()
            return None
