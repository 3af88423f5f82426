"""Background thread that runs the telemetry roll-up periodically, in the process that holds the lease."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import monotonic

from edgesplit_controller.history.rollup import MESSAGES_PER_TRANSACTION, RollUp

log = logging.getLogger(__name__)

EVERY_S = 15.0
"""Shortest pause between two runs."""
LONGEST_PAUSE_S = 60.0
"""Longest pause between two runs."""
PAUSE_FACTOR = 20.0
"""The pause is this many times as long as the run took, up to `LONGEST_PAUSE_S`: with a large fleet, a minute's
messages are then written at once."""
TRIM_EVERY_S = 3_600.0
"""Pause between two deletions of old rows."""


def start_rollup(
    rollup: RollUp,
    trims: Sequence[Callable[[], None]],
    is_leader: Callable[[], bool],
    stack: ExitStack,
    ending: threading.Event,
    every_s: float = EVERY_S,
) -> None:
    """Start the thread; `stack` joins it on exit, after setting `ending`. `is_leader` reports whether this process may
    run the roll-up; `trims` delete old rows, once an hour."""

    def run() -> None:
        trimmed_at = float("-inf")
        pause_s = every_s
        while not ending.wait(pause_s):
            began, pause_s = monotonic(), every_s
            if not is_leader():
                continue
            try:
                while rollup.step() >= MESSAGES_PER_TRANSACTION and is_leader() and not ending.is_set():
                    pass
                if monotonic() - trimmed_at >= TRIM_EVERY_S:
                    trimmed_at = monotonic()
                    for trim in trims:
                        trim()
                pause_s = max(every_s, min(LONGEST_PAUSE_S, PAUSE_FACTOR * (monotonic() - began)))
            except Exception:
                log.exception("what devices measured could not be added up")

    thread = threading.Thread(target=run, name="add up", daemon=True)
    thread.start()
    stack.callback(thread.join, 10)
    stack.callback(ending.set)
