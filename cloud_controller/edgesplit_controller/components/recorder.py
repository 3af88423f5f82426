"""The loop that looks at the parts now and then and writes down what it found, for whichever process is asked.

Each process speaks for itself: it notes what it sees under its own number. A row is written when something changed, and
else every `AGAIN_S`, so that a process that is gone is known by its silence.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from edgesplit.errors import EdgeError
from edgesplit_controller.components.probes import Look, Seen
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.components import PartRow

log = logging.getLogger(__name__)

EVERY_S = 5.0
AGAIN_S = 20.0
LONGEST = 300


class Noting:
    """`start`, then `stop`. `step` is one round."""

    def __init__(self, database: Database, process: int, looks: Sequence[Look], *, now: Callable[[], float]) -> None:
        self._database = database
        self._process = process
        self._looks = list(looks)
        self._now = now
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="parts", daemon=True)

    def start(self) -> None:
        """Begin, on a thread of its own; the first round before this returns."""
        self.step()
        self._thread.start()

    def stop(self) -> None:
        """No more."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def step(self) -> None:
        """Look at every part, and note what is new or was noted too long ago."""
        found = [_looked(look) for look in self._looks]
        try:
            self._note([one for one in found if one is not None])
        except EdgeError as error:
            log.warning("how the parts are could not be noted: %s", error)

    def _note(self, found: Sequence[Seen]) -> None:
        now = self._now()
        with self._database.hear() as session:
            for seen in found:
                row = session.get(PartRow, (self._process, seen.name))
                if row is None:
                    row = PartRow(process=self._process, name=seen.name, state="", text="", since=now, at=now)
                    session.add(row)
                if row.state != seen.state:
                    row.since = now
                if (row.state, row.text) != (seen.state, seen.text) or now - row.at >= AGAIN_S:
                    row.state, row.text, row.at = seen.state, seen.text[:LONGEST], now

    def _work(self) -> None:
        while not self._ending.wait(EVERY_S):
            try:
                self.step()
            except Exception:  # the next look may do better, and nobody would look again
                log.exception("the parts could not be looked at")


def _looked(look: Look) -> Seen | None:
    try:
        return look()
    except Exception:  # one part that cannot be looked at hides no other
        log.exception("a part could not be looked at")
        return None
