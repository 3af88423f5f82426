"""Loads new releases and runs them once when they arrive, so that no device's first request waits for that; closes
those that were removed.

A low-priority thread watches the folder of releases. Releases that are there at the start are loaded on demand: a
server with many models must not load them all because it was restarted. Nothing is evicted for a release that was not
requested yet, and errors here are only logged: the first request reports them.
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
from edgesplit_offload.models.remote_half import RemoteHalf
from edgesplit_offload.models.repository import ModelRepository

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
TRIES = 10
"""Attempts to open a release that may still be being written."""


class WarmUp:
    """The warm-up thread of one process."""

    def __init__(self, folder: Path, models: ModelRepository, interval_s: float = INTERVAL_S) -> None:
        self._folder = folder
        self._models = models
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._known = set(self._present())
        self._attempts_left: dict[str, int] = {}
        self._thread = threading.Thread(target=self._work, name="warming", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Start nothing more and wait for what runs: an engine must not be active while its process ends."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def check(self) -> None:
        """Warm up the releases that have arrived since the last call, and close those that have gone."""
        present = set(self._present())
        for digest in self._known - present:
            self._models.close(digest)
        self._attempts_left.update(dict.fromkeys(present - self._known, TRIES))
        self._known = present
        for digest in [digest_left for digest_left in self._attempts_left if digest_left in present]:
            try:
                halves = self._models.remote_halves(digest)
            except (EdgeError, OSError) as error:  # still being written, or not trusted: the first request reports it
                self._attempts_left[digest] -= 1
                if not self._attempts_left[digest]:
                    log.info("release %s is not warmed up: %s", digest[:12], error)
                    del self._attempts_left[digest]
                continue
            del self._attempts_left[digest]
            self._warm(digest, halves)

    def _warm(self, digest: str, halves: Iterable[RemoteHalf]) -> None:
        count = 0
        for half in halves:
            if self._stopping.is_set() or not half.has_room:
                continue
            try:
                half.warm_up()
                count += 1
            except EdgeError as error:
                log.info("release %s is only partly warmed up: %s", digest[:12], error)
        log.info("release %s: %d remote halves are warmed up", digest[:12], count)

    def _present(self) -> list[str]:
        with suppress(OSError):
            return [folder.name for folder in self._folder.iterdir() if SHA256.fullmatch(folder.name)]
        return []

    def _work(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._stopping.wait(self._interval_s):
            try:
                self.check()
            except Exception:
                log.exception("a new release could not be warmed up")
