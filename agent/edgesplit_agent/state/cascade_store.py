"""What a cascade has learnt at work, on disk by release: its threshold after alarms, and its sequential test."""

from __future__ import annotations

import logging
import math
import threading
from pathlib import Path

import msgspec

from edgesplit.answers.sequential import SequentialTest
from edgesplit.atomic_files import write_durably
from edgesplit.decoding import decode_json
from edgesplit.errors import MalformedMessage
from edgesplit.msgspec_warmup import warm_up_structs

log = logging.getLogger(__name__)

MAX_RELEASES = 32
"""Number of releases whose state is stored."""
MAX_BYTES = 2**20
"""Longest file that is read."""


class AuditState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cascade's state."""

    threshold: float
    test: SequentialTest

    def __post_init__(self) -> None:
        """ValueError, which msgspec reports as a field that is wrong, for a threshold that no agent writes."""
        if not math.isfinite(self.threshold):
            raise ValueError(f"a threshold of {self.threshold}")


class CascadeStore:
    """The states in one file. Thread-safe."""

    def __init__(self, file: Path | None = None) -> None:
        """None: nothing is stored."""
        self._file = file
        self._lock = threading.Lock()

    def load(self, release: str) -> AuditState | None:
        """The state of that release (its digest), which is one model's; None where there is none. A damaged file counts
        as none, with a warning in the log."""
        with self._lock:
            return self._read().get(release)

    def store(self, release: str, state: AuditState) -> None:
        """Store a state. A disk error is logged: after a restart the state before counts."""
        if self._file is None:
            return
        with self._lock:
            others = {digest: other for digest, other in self._read().items() if digest != release}
            states = dict([*others.items(), (release, state)][-MAX_RELEASES:])
            try:
                write_durably(self._file, msgspec.json.encode(states))
            except OSError as error:
                log.warning("cannot store the cascade of release %s: %s", release[:12], error.strerror)

    def _read(self) -> dict[str, AuditState]:
        if self._file is None:
            return {}
        try:
            return decode_json(self._file.read_bytes(), dict[str, AuditState], "states", MAX_BYTES)
        except FileNotFoundError:
            return {}
        except (OSError, MalformedMessage) as error:
            log.warning("%s cannot be read, cascades start with their plans' thresholds: %s", self._file, error)
            return {}


warm_up_structs(__name__)
