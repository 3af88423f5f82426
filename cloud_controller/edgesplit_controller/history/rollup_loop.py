"""The loop around `rolling`: adds up what devices measured, every so often, in the process that leads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import monotonic

from edgesplit_controller.history.rollup import AT_ONCE, Rolling

log = logging.getLogger(__name__)

EVERY_S = 15.0
LONGEST_S = 60.0
REST = 20.0
"""So many times as long as it took is rested, up to `LONGEST_S`: what a large fleet says in a minute is then written
once."""
TRIM_S = 3_600.0


def add_up(
    rolling: Rolling,
    trims: Sequence[Callable[[], None]],
    leads: Callable[[], bool],
    stack: ExitStack,
    ending: threading.Event,
    every_s: float = EVERY_S,
) -> None:
    """Begin; `stack` waits for the end, which `ending` asks for. `trims` drop what is too old, once an hour."""

    def run() -> None:
        trimmed_at = float("-inf")
        rest_s = every_s
        while not ending.wait(rest_s):
            began, rest_s = monotonic(), every_s
            if not leads():
                continue
            try:
                while rolling.step() >= AT_ONCE and leads() and not ending.is_set():
                    pass
                if monotonic() - trimmed_at >= TRIM_S:
                    trimmed_at = monotonic()
                    for trim in trims:
                        trim()
                rest_s = max(every_s, min(LONGEST_S, REST * (monotonic() - began)))
            except Exception:
                log.exception("what devices measured could not be added up")

    thread = threading.Thread(target=run, name="add up", daemon=True)
    thread.start()
    stack.callback(thread.join, 10)
    stack.callback(ending.set)
