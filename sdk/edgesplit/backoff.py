"""Exponential back-off with jitter: how long to wait before a retry, one rule for every retry in the project."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_EXPONENT = 64
"""Exponent beyond which every bound in use is reached; larger ones would overflow a float."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Back-off that doubles with each failure in a row, from `first_s` up to `longest_s`.

    `jitter`, uniform in [0, 1), shortens a pause by up to half, so that clients that failed together do not retry
    together ("equal jitter" in Brooker, Exponential Backoff and Jitter, AWS Architecture Blog 2015).
    """

    first_s: float
    longest_s: float

    def pause_s(self, failures: int, jitter: float | None = None) -> float:
        """Seconds to wait after `failures` earlier failures in a row: 0 gives `first_s`, 1 twice that. Without
        `jitter` the pause is whole."""
        whole_s = min(self.longest_s, self.first_s * 2.0 ** min(max(0, failures), _MAX_EXPONENT))
        return whole_s if jitter is None else whole_s * (0.5 + 0.5 * jitter)
