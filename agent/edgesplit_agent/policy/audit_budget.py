"""The budget of a cascade's audits: so many a minute, and so many bytes. Pure: a token bucket, time comes in."""

from __future__ import annotations

from dataclasses import dataclass, replace

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class AuditLimits:
    """What audits may cost, as averages over minutes; each runs the second variant once more."""

    per_minute: float = 6.0
    """Audits a minute; 0: none. It bounds their energy too."""
    bytes_per_minute: float = 1e6
    """Bytes up and down a minute; one audit may exceed it, and the next ones wait."""


AUDIT_LIMITS = AuditLimits()


@dataclass(frozen=True, slots=True)
class AuditBudget:
    """What is left of the limits."""

    limits: AuditLimits
    audits: float
    bytes: float
    at: float = 0.0
    """Time of the last credit, in seconds of the caller's clock."""

    @classmethod
    def full(cls, limits: AuditLimits, now: float) -> AuditBudget:
        """A minute's worth; at least one audit, where any are allowed."""
        return cls(limits, _most_audits(limits), limits.bytes_per_minute, now)

    @property
    def allows_one(self) -> bool:
        """Whether another audit may begin."""
        return self.audits >= 1.0 and self.bytes > 0.0

    def credited(self, now: float) -> AuditBudget:
        """The budget at a later time: at most a minute's worth is saved."""
        minutes = max(0.0, now - self.at) / MINUTE_S
        return replace(
            self,
            audits=min(_most_audits(self.limits), self.audits + minutes * self.limits.per_minute),
            bytes=min(self.limits.bytes_per_minute, self.bytes + minutes * self.limits.bytes_per_minute),
            at=max(self.at, now),
        )

    def debited(self, moved_bytes: int) -> AuditBudget:
        """The budget after one audit that moved so many bytes."""
        return replace(self, audits=self.audits - 1.0, bytes=self.bytes - moved_bytes)


def _most_audits(limits: AuditLimits) -> float:
    return max(1.0, limits.per_minute) if limits.per_minute > 0 else 0.0
