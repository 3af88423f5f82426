"""The invariants that hold whatever happens to a fleet, and the violations found.

- never an unsigned byte loaded: each file that a device loads belongs to a signed release;
- never below the counter: a device neither accepts nor is sent a statement with a lower counter than before;
- always one healthy version: a device that was ever found healthy answers from its start on, unless its disk was
  damaged (then until it is repaired) or it is in safe mode;
- no accepted request lost, none answered twice.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from edgesplit.errors import EdgeError, MalformedMessage, NotFound
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import device_of_topic
from edgesplit.oip.report import Report
from edgesplit.release.manifest import Signed, Statement

MAX_VIOLATIONS = 50
"""How many violations are recorded."""


@dataclass
class InvariantChecker:
    """Checks the invariants of one fleet and counts what it observes."""

    signed_files: set[str] | None = field(default_factory=set)
    """SHA-256 of every signed file; None where the controller is external and its files are not known."""
    violations: list[str] = field(default_factory=list)
    """Descriptions of the first `MAX_VIOLATIONS` violations."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of requests by outcome: local, cloud, fallback, refused, or the error's class."""
    request_count: int = 0
    """Number of requests."""
    load_count: int = 0
    """Number of files loaded."""
    statement_count: int = 0
    """Number of statements sent to devices."""
    _hash: Any = field(default_factory=hashlib.sha256)
    _deadlines: dict[str, float] = field(default_factory=dict)
    """Deadlines of requests in flight, by request."""
    _sent_counters: dict[str, int] = field(default_factory=dict)
    """Highest statement counter sent, by device."""
    _accepted_counters: dict[str, int] = field(default_factory=dict)
    """Highest statement counter accepted, by device."""

    @property
    def fingerprint(self) -> str:
        """Hash of every message and outcome with its time; two identical runs have the same."""
        return str(self._hash.hexdigest())

    def on_message(self, topic: str, payload: bytes, now: float) -> None:
        """A message has reached the broker."""
        self._hash.update(f"{now:.6f} {topic}".encode())
        self.on_published(topic, payload)

    def add_violation(self, text: str) -> None:
        """Record a violation."""
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(text)

    def on_file_loaded(self, device: str, sha256: str) -> None:
        """A device loads a file with this SHA-256."""
        self.load_count += 1
        if self.signed_files is not None and sha256 not in self.signed_files:
            self.add_violation(f"{device} loads a file that was never signed: {sha256[:12]}")

    def on_published(self, topic: str, payload: bytes) -> None:
        """A message was published: if it is a statement to a device, check its counter."""
        if not topic.endswith("/desired") or not payload:
            return
        self.statement_count += 1
        try:
            statement = messages.decode(messages.decode(payload, Signed).payload, Statement)
        except MalformedMessage as error:
            self.add_violation(f"the controller published an invalid statement: {error}")
            return
        device = device_of_topic(topic)
        if statement.counter < self._sent_counters.get(device, 0):
            self.add_violation(f"{device} was sent statement {statement.counter} after {self._sent_counters[device]}")
        self._sent_counters[device] = max(statement.counter, self._sent_counters.get(device, 0))

    def on_statement_accepted(self, device: str, counter: int) -> None:
        """A device has accepted a statement."""
        if counter < self._accepted_counters.get(device, 0):
            self.add_violation(f"{device} applies statement {counter} after {self._accepted_counters[device]}")
        self._accepted_counters[device] = max(counter, self._accepted_counters.get(device, 0))

    # Requests

    def on_request(self, request: str, deadline: float) -> None:
        """A request was accepted; it must end by `deadline`."""
        self.request_count += 1
        self._deadlines[request] = deadline

    def on_outcome(self, request: str, result: Report | EdgeError, now: float) -> None:
        """A request has ended with a report or an error."""
        deadline = self._deadlines.pop(request, None)
        if deadline is None:
            self.add_violation(f"request {request} has two outcomes")
        elif now > deadline + 1e-6:
            self.add_violation(f"request {request} had its outcome {now - deadline:.3f} s after its deadline")
        self.outcomes[_kind(result)] += 1
        self._hash.update(f"{now:.6f} {request} {_kind(result)}".encode())

    def check_overdue(self, now: float) -> None:
        """Report every request in flight whose deadline has passed; call at the end of a run."""
        for request, deadline in self._deadlines.items():
            if now > deadline:
                self.add_violation(f"request {request} was lost")


def _kind(result: Report | EdgeError) -> str:
    """How an outcome is counted."""
    if isinstance(result, Report):
        return "fallback" if result.fallback else "cloud" if result.up_bytes else "local"
    return "refused" if isinstance(result, NotFound) else type(result).__name__
