"""New releases are loaded and run once when they come, so that no device's first request waits for that.

A thread of low priority looks at the folder of releases. What lies there at the start is loaded on demand, as ever: a
server with many models must not load them all because it was restarted. Nothing is let go for what nobody asked for
yet, and whatever goes wrong here is told to the first who asks.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from edgesplit.errors import EdgeError
from edgesplit.identifiers import SHA256
from edgesplit_offload.models.batch_benefit import NICENESS, STOP_S
from edgesplit_offload.models.remote_half import FarHalf
from edgesplit_offload.models.repository import Shelf

log = logging.getLogger(__name__)

LOOK_S = 1.0
TRIES = 10
"""Looks at a release that is still being written."""


class Warming:
    """Of one process."""

    def __init__(self, folder: Path, shelf: Shelf, look_s: float = LOOK_S) -> None:
        self._folder = folder
        self._shelf = shelf
        self._look_s = look_s
        self._stopping = threading.Event()
        self._known = set(self._there())
        self._left: dict[str, int] = {}
        self._thread = threading.Thread(target=self._work, name="warming", daemon=True)

    def start(self) -> None:
        """From now on."""
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more, and wait for what runs: an engine must not be at work while its process ends."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def look(self) -> None:
        """Warm what has come since the last look."""
        there = set(self._there())
        self._left.update(dict.fromkeys(there - self._known, TRIES))
        self._known = there
        for digest in [one for one in self._left if one in there]:
            try:
                halves = self._shelf.halves(digest)
            except (EdgeError, OSError) as error:  # being written, or not to be believed: who asks will hear of it
                self._left[digest] -= 1
                if not self._left[digest]:
                    log.info("release %s is not warmed: %s", digest[:12], error)
                    del self._left[digest]
                continue
            del self._left[digest]
            self._warm(digest, halves)

    def _warm(self, digest: str, halves: Iterable[FarHalf]) -> None:
        count = 0
        for half in halves:
            if self._stopping.is_set() or not half.fits:
                continue
            try:
                half.warm()
                count += 1
            except EdgeError as error:
                log.info("release %s is not all warmed: %s", digest[:12], error)
        log.info("release %s: %d far halves are warm", digest[:12], count)

    def _there(self) -> list[str]:
        with suppress(OSError):
            return [one.name for one in self._folder.iterdir() if SHA256.fullmatch(one.name)]
        return []

    def _work(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._stopping.wait(self._look_s):
            try:
                self.look()
            except Exception:
                log.exception("a new release could not be looked at")
