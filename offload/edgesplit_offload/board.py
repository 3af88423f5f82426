"""What several serving processes have counted, brought together: each posts a file of its own, one reads them all.

A process that dies leaves what it had posted, and its successor in the same place goes on from there, so a sum never
falls while the server lives (Prometheus would take that for a restart of everything). At most a second's counts of a
process that was killed are lost. Gauges of a process that posts no more are left away.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from edgesplit.errors import MalformedMessage
from edgesplit.seen.families import BY_NAME
from edgesplit.seen.ledger import Ledger, Series, packed, summed, unpacked

log = logging.getLogger(__name__)

POST_S = 1.0
STALE_S = 10.0
"""Without a post for so long, a process is taken to be gone, and its gauges with it."""
SUFFIX = ".counts"


class Board:
    """One process's place on the board of a folder."""

    def __init__(self, folder: Path, place: int, ledger: Ledger, read: Callable[[], Sequence[Series]]) -> None:
        """`read` gives all that is to be posted: the ledger's series, and gauges."""
        self._file = folder / f"{place}{SUFFIX}"
        self._ledger = ledger
        self._read = read
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="counts", daemon=True)

    def start(self) -> None:
        """Go on from what the one before in this place had counted; post from now on."""
        self._ledger.resume(one for one in _counted(self._file) if BY_NAME[one.family].kind != "gauge")
        self.post()
        self._thread.start()

    def stop(self) -> None:
        """Post for the last time."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(POST_S * 5)
        self.post()

    def post(self) -> None:
        """Show what is counted now. A reader sees the old post or the new one, nothing between."""
        made = self._file.with_suffix(".new")
        try:
            made.write_bytes(packed(self._read()))
            os.replace(made, self._file)
        except OSError as error:
            log.warning("cannot show what was counted: %s", error)

    def _run(self) -> None:
        while not self._ending.wait(POST_S):
            self.post()


def posted(folder: Path, now: Callable[[], float] = time.time) -> list[Series]:
    """What the processes of this folder have counted together, as far as they have posted it."""
    processes = []
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        counted = _counted(file)
        fresh = _age_s(file, now()) <= STALE_S
        processes.append([one for one in counted if fresh or BY_NAME[one.family].kind != "gauge"])
    return summed(processes)


def _age_s(file: Path, now: float) -> float:
    with contextlib.suppress(OSError):
        return now - file.stat().st_mtime
    return STALE_S + 1.0


def _counted(file: Path) -> list[Series]:
    try:
        return unpacked(file.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, MalformedMessage) as error:
        log.warning("what was counted in %s cannot be read: %s", file.name, error)
        return []
