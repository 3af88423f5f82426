"""Back-off: doubles, is bounded, and jitter takes away at most half."""

from __future__ import annotations

import pytest

from edgesplit.backoff import Backoff

RETRY = Backoff(first_s=0.5, longest_s=30.0)


@pytest.mark.parametrize(("failures", "pause_s"), [(0, 0.5), (1, 1.0), (5, 16.0), (6, 30.0), (10_000, 30.0), (-1, 0.5)])
def test_pauses_double_up_to_the_longest(failures: int, pause_s: float) -> None:
    """Whatever the number of failures, which is unbounded."""
    assert RETRY.pause_s(failures) == pause_s


@pytest.mark.parametrize(("jitter", "pause_s"), [(0.0, 1.0), (0.5, 1.5), (1.0, 2.0)])
def test_jitter_shortens_a_pause_by_half_at_most(jitter: float, pause_s: float) -> None:
    """Clients that failed together do not come back together."""
    assert RETRY.pause_s(2, jitter) == pause_s
