"""Runs probes periodically and records their results in the database, from which any process reads them.

Each process records what it sees under its own number. A row is written when something changed, and otherwise every
`REFRESH_S`, so that a process that is gone is recognised by an outdated row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from edgesplit.errors import EdgeError
from edgesplit_controller.components.probes import Probe, ProbeResult
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.components import ComponentStateRow

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 5.0
"""Seconds between two rounds of probes."""
REFRESH_S = 20.0
"""Seconds after which an unchanged result is written again."""
MAX_TEXT_CHARS = 300
"""Characters of a text that are stored."""


class StatusRecorder:
    """Runs the probes and records their results; `step` is one round."""

    def __init__(self, database: Database, process: int, probes: Sequence[Probe], *, now: Callable[[], float]) -> None:
        self._database = database
        self._process = process
        self._probes = list(probes)
        self._now = now

    def step(self) -> None:
        """Run every probe, and record results that changed or were recorded too long ago."""
        results = [_run_probe(look) for look in self._probes]
        try:
            self._record([result for result in results if result is not None])
        except EdgeError as error:
            log.warning("could not record the states of the components: %s", error)

    def _record(self, results: Sequence[ProbeResult]) -> None:
        now = self._now()
        with self._database.write_concurrent() as session:
            for result in results:
                row = session.get(ComponentStateRow, (self._process, result.name))
                if row is None:
                    row = ComponentStateRow(
                        process=self._process, name=result.name, state="", text="", since=now, at=now
                    )
                    session.add(row)
                if row.state != result.state:
                    row.since = now
                    if result.state == "bad" and result.event:
                        record_event(session, now, "controller", result.event, result.name, reason=result.text)
                if (row.state, row.text) != (result.state, result.text) or now - row.at >= REFRESH_S:
                    row.state, row.text, row.at = result.state, result.text[:MAX_TEXT_CHARS], now


def _run_probe(probe: Probe) -> ProbeResult | None:
    try:
        return probe()
    except Exception:  # a probe that fails must not hide the other components
        log.exception("the probe of a component failed")
        return None
