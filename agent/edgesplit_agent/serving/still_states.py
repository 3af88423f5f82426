"""What streams with repeated answers have found out, kept in a file: calibrations, thresholds and audits.

Written seldom, because flash wears: at once where a stream's calibration ended or an alarm was raised, else every few
minutes if anything has changed, and at the end. A file that is damaged or was written for other terms costs a fresh
start of its streams, no more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from edgesplit.atomic_files import write_durably
from edgesplit.decoding import decode_json
from edgesplit.errors import MalformedMessage
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit_agent.serving.still_stream import KeptState

log = logging.getLogger(__name__)
MAX_STATES = 64
"""Maximum number of states that are kept."""
MAX_BYTES = 512 * 1024
"""Maximum size of the file."""
INTERVAL_S = 300.0
"""Seconds between writes of what audits and calibrations count."""

Key = tuple[str, str, str]
"""Model, digest of its release, and stream."""
States = dict[Key, KeptState]


class _KeptStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    release: str
    stream: str
    state: KeptState


def read_states(file: Path) -> States:
    """The states in the file; none where there is no file, or it is damaged, which is logged."""
    try:
        kept = decode_json(file.read_bytes(), list[_KeptStream], "states", MAX_BYTES)
    except FileNotFoundError:
        return {}
    except (OSError, MalformedMessage) as error:
        log.warning("%s cannot be used, so still frames are calibrated anew: %s", file, error)
        return {}
    return {(entry.model, entry.release, entry.stream): entry.state for entry in kept[-MAX_STATES:]}


def write_states(file: Path, states: States) -> None:
    """Write the newest states. A disk error is logged: it costs calibrating again after a restart."""
    newest = list(states.items())[-MAX_STATES:]
    try:
        write_durably(file, msgspec.json.encode([_KeptStream(*key, state) for key, state in newest]))
    except OSError as error:
        log.warning("cannot keep the calibration of still frames in %s: %s", file, error)


class StateWriter:
    """Writes the states that `collect` returns to a file, on a thread of its own."""

    def __init__(
        self, file: Path, collect: Callable[[], States], written: States, interval_s: float = INTERVAL_S
    ) -> None:
        """`written`: what the file holds."""
        self._file = file
        self._collect = collect
        self._interval_s = interval_s
        self._is_due = threading.Event()
        self._ended = False
        self._written = written
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write from now on."""
        self._thread = threading.Thread(target=self._run, name="still-states", daemon=True)
        self._thread.start()

    def write_soon(self) -> None:
        """Write without waiting for the interval to end, and without blocking the caller."""
        self._is_due.set()

    def stop(self) -> None:
        """Write what has changed since the last time, and end."""
        if self._thread is None:
            return
        self._ended = True
        self._is_due.set()
        self._thread.join()
        self._thread = None
        self._write()

    def _run(self) -> None:
        while not self._ended:
            self._is_due.wait(self._interval_s)
            self._is_due.clear()
            self._write()

    def _write(self) -> None:
        states = self._collect()
        if states != self._written:
            write_states(self._file, states)
            self._written = states


warm_up_structs(__name__)
