"""The offload server's front end before a handler that may wait, so that one test can be put to both HTTP servers."""

from __future__ import annotations

from typing import Any

from edgesplit.http1.head import ParsedHead
from edgesplit.http1.server import Handler, Request, call_handler
from edgesplit_offload.frontend.event_loop import EventLoop
from edgesplit_offload.frontend.server import Answer, HttpServer
from edgesplit_offload.scheduling.arrivals import ArrivalStats


class LoopServer(HttpServer):
    """Its connections are looked after by a loop of its own, each request is answered by another thread."""

    def __init__(self, handler: Handler, **options: Any) -> None:
        self.loop = EventLoop(lambda: None, self.on_timer)
        self._blocking = handler
        super().__init__(self, self.loop, **options)

    def route(self, asked: ParsedHead) -> object:
        """Nothing is known of it."""
        return None

    def check_head(self, asked: ParsedHead, route: object, peer: str | None) -> None:
        """Every body is let in."""

    def is_revoked(self, serial: int) -> bool:
        """No certificate is."""
        return False

    def handle(self, request: Request, route: object, habit: ArrivalStats, answer: Answer) -> None:
        """By whoever has time."""
        self.loop.run_in_thread(lambda: answer(call_handler(self._blocking, request)))

    def start(self) -> None:
        """Listen."""
        super().start()
        self.loop.start()

    def stop(self, drain_s: float = 5.0) -> None:
        """And the loop."""
        super().stop(drain_s)
        self.loop.stop(1.0)
