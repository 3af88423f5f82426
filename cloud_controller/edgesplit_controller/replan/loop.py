"""Background thread that submits the replanner to the heavy job queue once a minute, until the controller stops."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack

EVERY_S = 60.0
"""Interval between two runs."""
POLL_S = 0.5
"""Interval at which a pending job is checked for the stop of the controller."""

log = logging.getLogger(__name__)


def start_replanning(
    replan: Callable[[], None],
    submit: Callable[[Callable[[], None]], Future[None]],
    is_leader: Callable[[], bool],
    stack: ExitStack,
    ending: threading.Event,
    every_s: float = EVERY_S,
) -> None:
    """Start the thread; `stack` joins it on exit, after setting `ending`. Of several processes only the one for which
    `is_leader` returns true submits the job `replan`."""

    def run() -> None:
        while not ending.wait(every_s):
            if not is_leader():
                continue
            job = submit(replan)
            while not wait([job], POLL_S).done:
                if ending.is_set():
                    job.cancel()
                    return
            if error := job.exception():
                log.error("plans could not be looked after", exc_info=error)

    thread = threading.Thread(target=run, name="replan", daemon=True)
    thread.start()
    stack.callback(thread.join, 10)
    stack.callback(ending.set)
