"""How long a request waits for the cloud before the device starts finishing it alone. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LEAST_S = 0.25
"""The cloud is never given up sooner than this unless the deadline asks for it."""
MARGIN_S = 0.03
"""Kept back from the deadline for handing the answer over."""
TAIL_FACTOR = 1.2
"""The tail is allowed to take this much longer than expected and still meet the deadline."""


def patience_s(left_s: float, tail_s: float | None, predicted_s: float, margin_s: float = MARGIN_S) -> float:
    """Seconds to wait for the cloud from now on; 0 means: start the tail at once, beside the cloud.

    `left_s` is what is left until the deadline, `tail_s` what finishing locally takes (None: the device cannot),
    `predicted_s` what the plan expects of link and cloud in today's conditions.
    """
    if tail_s is None:
        return max(0.0, left_s - margin_s)
    by_deadline_s = left_s - tail_s * TAIL_FACTOR - margin_s
    return max(0.0, min(by_deadline_s, max(3.0 * predicted_s, LEAST_S)))


def tail_s(
    slices: Iterable[str], measured: Mapping[str, float], predicted: Mapping[str, float], slowdown: float
) -> float:
    """Seconds the named slices take on this device: as measured here, else as predicted times the slow-down."""
    return sum(measured[name] if name in measured else predicted.get(name, 0.0) * slowdown for name in slices)
