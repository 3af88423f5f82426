"""Retention rules: how much of what nothing uses any more is kept (plain values)."""

from __future__ import annotations

from dataclasses import dataclass

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """Retention rules of an installation; options of `edgectl up`."""

    releases: int = 3
    """Newest releases of each model (of all its versions) that are kept unused."""
    versions: int = 0
    """Newest versions of each model that are kept unused; 0: all."""
    history_s: float = 90 * DAY_S
    """How long rollouts and proposals are kept after their end, in seconds."""
    unused_s: float = DAY_S
    """How long files and releases that nothing refers to are kept after they were stored last, in seconds: as long as a
    release may take to be signed on another machine."""
