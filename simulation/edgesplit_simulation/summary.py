"""The state of a simulated fleet during a run and its results at the end, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from edgesplit.quantities import format_duration
from edgesplit_simulation.faults.injector import FaultInjector
from edgesplit_simulation.fleet_members import BaseFleet

INVARIANTS = (
    "no unsigned byte was loaded",
    "no device was sent or applied an older statement",
    "every device that was once healthy answered from its start on",
    "no accepted request was lost or answered twice",
)
"""The invariants, as printed."""


@dataclass(frozen=True)
class Summary:
    """The state of a fleet at one moment."""

    simulated: bool
    virtual: bool
    seed: int
    devices: int
    seconds: float
    """Elapsed seconds of the fleet's own time."""
    states: dict[str, int] = field(default_factory=dict)
    """Number of devices by state: connected, without connection, off, revoked, safe mode."""
    releases: dict[str, int] = field(default_factory=dict)
    """Number of devices by the release that they serve (`model release`)."""
    requests: dict[str, int] = field(default_factory=dict)
    """Number of requests by outcome."""
    asked: int = 0
    """Number of requests."""
    starts: int = 0
    """Number of device starts."""
    statements: int = 0
    """Number of statements sent to devices, accepted or not; 0 at an external broker."""
    messages: int = 0
    """Number of messages through the in-process broker; 0 at an external one."""
    loads: int = 0
    """Number of files loaded."""
    faults: dict[str, int] = field(default_factory=dict)
    """Number of faults by kind."""
    broken: list[str] = field(default_factory=list)
    """Descriptions of violated invariants."""
    unchecked: list[str] = field(default_factory=list)
    """Invariants that cannot be checked in this kind of run."""
    fingerprint: str = ""
    """In virtual time: hash of the run, equal for equal seed and faults; else empty."""

    @classmethod
    def from_fleet(
        cls, fleet: BaseFleet, injector: FaultInjector | None, *, virtual: bool, messages: int = 0
    ) -> Summary:
        """Summarise the fleet as it is now."""
        witness = fleet.checker
        running: Counter[str] = Counter()
        for device in fleet.devices.values():
            running.update(f"{model} {release[:12]}" for model, release in device.running.items())
        return cls(
            simulated=True, virtual=virtual, seed=fleet.seed, devices=len(fleet.devices),
            seconds=round(fleet.elapsed_s, 3), states=dict(Counter(_state(fleet, name) for name in fleet.names)),
            releases=dict(running), requests=dict(witness.outcomes), asked=witness.request_count,
            starts=sum(device.start_count for device in fleet.devices.values()), statements=witness.statement_count,
            messages=messages, loads=witness.load_count, faults=dict(injector.counts) if injector is not None else {},
            broken=list(witness.violations), unchecked=[] if virtual else list(INVARIANTS[:2]),
            fingerprint=witness.fingerprint if virtual else "",
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """The summary as JSON-serialisable values."""
        return asdict(self)

    def progress_line(self) -> str:
        """One line of progress."""
        parts = [format_duration(self.seconds), _counts(self.states), _counts(self.releases)]
        parts.append(f"{self.asked} requests" + (f", {self.messages} messages" if self.messages else ""))
        if self.broken:
            parts.append(f"{len(self.broken)} invariants violated")
        return "  ".join(part for part in parts if part)

    def report_text(self) -> str:
        """The final report."""
        time = "virtual time" if self.virtual else "real time, at a real broker"
        lines = [
            f"{self.devices} simulated devices, {format_duration(self.seconds)} of {time}, seed {self.seed}",
            f"devices    {_counts(self.states)}; {self.starts} starts",
            f"releases   {_counts(self.releases) or 'none'}; {self.loads} files loaded",
            f"requests   {self.asked}: {_counts(self.requests) or 'none'}",
        ]
        if self.virtual:
            lines.append(f"messages   {self.messages}, {self.statements} of them statements")
        if self.faults:
            lines.append(f"faults     {_counts(self.faults)}")
        lines += [f"{self._mark(promise)} {promise}" for promise in INVARIANTS]
        lines += [f"BROKEN     {text}" for text in self.broken]
        if self.fingerprint:
            lines.append(f"fingerprint {self.fingerprint[:16]}: the same seed and faults give the same")
        return "\n".join(lines)

    def _mark(self, promise: str) -> str:
        if promise in self.unchecked:
            return "not checked here:"
        return "see below:" if self.broken else "kept:"


def _state(fleet: BaseFleet, name: str) -> str:
    device = fleet.devices[name]
    if name in fleet.revoked:
        return "revoked"
    if not device.is_on:
        return "off"
    if device.safe_mode:
        return "safe mode"
    return "connected" if device.is_connected else "without connection"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
