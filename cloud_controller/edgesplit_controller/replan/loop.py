"""The clock of the loop: every minute the replanner looks, when heavy work has its turn, until the controller ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack

EVERY_S = 60.0
PATIENCE_S = 0.5
"""Between two looks at whether the controller is ending, while a turn is waited for."""

log = logging.getLogger(__name__)


def watch(
    look: Callable[[], None],
    submit: Callable[[Callable[[], None]], Future[None]],
    leads: Callable[[], bool],
    stack: ExitStack,
    ending: threading.Event,
    every_s: float = EVERY_S,
) -> None:
    """Begin; `stack` waits for the end, which `ending` asks for. Of several processes the one that `leads` looks."""

    def run() -> None:
        while not ending.wait(every_s):
            if not leads():
                continue
            turn = submit(look)
            while not wait([turn], PATIENCE_S).done:
                if ending.is_set():
                    turn.cancel()
                    return
            if error := turn.exception():
                log.error("plans could not be looked after", exc_info=error)

    thread = threading.Thread(target=run, name="replan", daemon=True)
    thread.start()
    stack.callback(thread.join, 10)
    stack.callback(ending.set)
