"""What a simulated fleet is like at a moment, and what became of it in the end: for people, and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from edgesplit_simulation.faults.injector import Storm
from edgesplit_simulation.fleet_members import Members
from edgesplit_simulation.quantities import span_text

PROMISES = (
    "no byte was loaded that nobody signed",
    "no device was told or obeyed an older statement",
    "every device that was once healthy answered from its start on",
    "no accepted request was lost or answered twice",
)


@dataclass(frozen=True)
class Summary:
    """One moment."""

    simulated: bool
    virtual: bool
    seed: int
    devices: int
    seconds: float
    """Of the fleet's own time."""
    states: dict[str, int] = field(default_factory=dict)
    """Devices: connected, without a connection, off, revoked, in safe mode."""
    releases: dict[str, int] = field(default_factory=dict)
    """Devices by what they answer by, `model release`."""
    requests: dict[str, int] = field(default_factory=dict)
    """By what became of them."""
    asked: int = 0
    starts: int = 0
    statements: int = 0
    """Believed and not, as they were said; 0 at a broker that is not ours."""
    messages: int = 0
    """Through a broker of ours."""
    loads: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """Promises of which nothing is known here."""
    fingerprint: str = ""
    """In virtual time: the same seed and faults have the same."""

    @classmethod
    def of(cls, fleet: Members, storm: Storm | None, *, virtual: bool, messages: int = 0) -> Summary:
        """How it is now."""
        witness = fleet.witness
        running: Counter[str] = Counter()
        for device in fleet.devices.values():
            running.update(f"{model} {release[:12]}" for model, release in device.running.items())
        return cls(
            simulated=True,
            virtual=virtual,
            seed=fleet.seed,
            devices=len(fleet.devices),
            seconds=round(fleet.passed_s, 3),
            states=dict(Counter(_state(fleet, name) for name in fleet.names)),
            releases=dict(running),
            requests=dict(witness.outcomes),
            asked=witness.asked,
            starts=sum(device.starts for device in fleet.devices.values()),
            statements=witness.statements,
            messages=messages,
            loads=witness.loads,
            faults=dict(storm.counts) if storm is not None else {},
            broken=list(witness.broken),
            unchecked=[] if virtual else list(PROMISES[:2]),
            fingerprint=witness.fingerprint if virtual else "",
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def line(self) -> str:
        """One line, while it runs."""
        parts = [span_text(self.seconds), _counts(self.states), _counts(self.releases)]
        parts.append(f"{self.asked} requests" + (f", {self.messages} messages" if self.messages else ""))
        if self.broken:
            parts.append(f"{len(self.broken)} promises broken")
        return "  ".join(part for part in parts if part)

    def text(self) -> str:
        """The end, whole."""
        time = "virtual time" if self.virtual else "real time, at a real broker"
        lines = [
            f"{self.devices} simulated devices, {span_text(self.seconds)} of {time}, seed {self.seed}",
            f"devices    {_counts(self.states)}; {self.starts} starts",
            f"releases   {_counts(self.releases) or 'none'}; {self.loads} files loaded",
            f"requests   {self.asked}: {_counts(self.requests) or 'none'}",
        ]
        if self.virtual:
            lines.append(f"messages   {self.messages}, {self.statements} of them statements")
        if self.faults:
            lines.append(f"faults     {_counts(self.faults)}")
        lines += [f"{self._mark(promise)} {promise}" for promise in PROMISES]
        lines += [f"BROKEN     {text}" for text in self.broken]
        if self.fingerprint:
            lines.append(f"fingerprint {self.fingerprint[:16]}: the same seed and faults give the same")
        return "\n".join(lines)

    def _mark(self, promise: str) -> str:
        if promise in self.unchecked:
            return "not looked at here:"
        return "see below:" if self.broken else "kept:"


def _state(fleet: Members, name: str) -> str:
    device = fleet.devices[name]
    if name in fleet.revoked:
        return "revoked"
    if not device.is_on:
        return "off"
    if device.safe_mode:
        return "safe mode"
    return "connected" if device.is_connected else "without connection"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])))
