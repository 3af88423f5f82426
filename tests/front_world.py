"""The offload server's front end before a handler that may wait, so that one test can be put to both HTTP servers."""

from __future__ import annotations

from typing import Any

from edgesplit.http1.head import Asked
from edgesplit.http1.server import Handler, Request, answer_of
from edgesplit_offload.frontend.event_loop import Loop
from edgesplit_offload.frontend.server import Answer, Front
from edgesplit_offload.scheduling.arrivals import Habit


class LoopServer(Front):
    """Its connections are looked after by a loop of its own, each request is answered by another thread."""

    def __init__(self, handler: Handler, **options: Any) -> None:
        self.loop = Loop(lambda: None, self.look)
        self._blocking = handler
        super().__init__(self, self.loop, **options)

    def route(self, asked: Asked) -> object:
        """Nothing is known of it."""
        return None

    def handle(self, request: Request, route: object, habit: Habit, answer: Answer) -> None:
        """By whoever has time."""
        self.loop.lend(lambda: answer(answer_of(self._blocking, request)))

    def start(self) -> None:
        """Listen."""
        super().start()
        self.loop.start()

    def stop(self, drain_s: float = 5.0) -> None:
        """And the loop."""
        super().stop(drain_s)
        self.loop.stop(1.0)
