"""What must hold whatever happens to a fleet, and who has broken it.

- never an unsigned byte loaded: each file that a device loads was in a release that was signed;
- never below the counter: neither believed by a device, nor said to it;
- always one healthy version: a device that was ever found healthy answers from its start on, unless its disk was
  damaged (then until it is repaired) or safe mode says why not;
- no accepted request lost, none answered twice.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from edgesplit.errors import EdgeError, MalformedMessage, NotFound
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import device_of
from edgesplit.oip.report import Report
from edgesplit.release.manifest import Signed, Statement

MOST_KEPT = 50


@dataclass
class Witness:
    """One fleet's."""

    signed: set[str] | None = field(default_factory=set)
    """SHA-256 of everything that was signed; None: that is not known here."""
    broken: list[str] = field(default_factory=list)
    """What may not be, in words; the first of them."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of requests: answered, fallback, refused, failed, cut off."""
    asked: int = 0
    loads: int = 0
    statements: int = 0
    _all: Any = field(default_factory=hashlib.sha256)
    _open: dict[str, float] = field(default_factory=dict)
    """Accepted requests that have had no outcome yet: by when they must."""
    _said: dict[str, int] = field(default_factory=dict)
    _believed: dict[str, int] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Of every message and outcome with its moment: two runs that are alike have the same."""
        return str(self._all.hexdigest())

    def passed(self, topic: str, payload: bytes, now: float) -> None:
        """A message has reached the broker."""
        self._all.update(f"{now:.6f} {topic}".encode())
        self.said(topic, payload)

    def complain(self, text: str) -> None:
        """Something that may not be."""
        if len(self.broken) < MOST_KEPT:
            self.broken.append(text)

    def loaded(self, device: str, sha256: str) -> None:
        """A device loads a file of these bytes."""
        self.loads += 1
        if self.signed is not None and sha256 not in self.signed:
            self.complain(f"{device} loads a file that was never signed: {sha256[:12]}")

    def said(self, topic: str, payload: bytes) -> None:
        """The controller's word to a device passes by."""
        if not topic.endswith("/desired") or not payload:
            return
        self.statements += 1
        try:
            statement = messages.decode(messages.decode(payload, Signed).payload, Statement)
        except MalformedMessage as error:
            self.complain(f"the controller said what is no statement: {error}")
            return
        device = device_of(topic)
        if statement.counter < self._said.get(device, 0):
            self.complain(f"{device} is told {statement.counter}, and was told {self._said[device]} before")
        self._said[device] = max(statement.counter, self._said.get(device, 0))

    def believed(self, device: str, counter: int) -> None:
        """A device obeys a statement."""
        if counter < self._believed.get(device, 0):
            self.complain(f"{device} obeys {counter} after {self._believed[device]}")
        self._believed[device] = max(counter, self._believed.get(device, 0))

    # Requests

    def accepted(self, request: str, by: float) -> None:
        """A request was made, and is due by then."""
        self.asked += 1
        self._open[request] = by

    def outcome(self, request: str, result: Report | EdgeError, now: float) -> None:
        """What became of it."""
        by = self._open.pop(request, None)
        if by is None:
            self.complain(f"request {request} has two outcomes")
        elif now > by + 1e-6:
            self.complain(f"request {request} had its outcome {now - by:.3f} s after its deadline")
        self.outcomes[_kind(result)] += 1
        self._all.update(f"{now:.6f} {request} {_kind(result)}".encode())

    def overdue(self, now: float) -> None:
        """To be called in the end: nothing may be open beyond its deadline."""
        for request, by in self._open.items():
            if now > by:
                self.complain(f"request {request} was lost")


def _kind(result: Report | EdgeError) -> str:
    if isinstance(result, Report):
        return "fallback" if result.fallback else "local" if result.row == "local" else "cloud"
    return "refused" if isinstance(result, NotFound) else type(result).__name__
