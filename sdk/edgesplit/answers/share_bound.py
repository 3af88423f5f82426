"""Whether draws show that a share is kept: the exact binomial test, in plain Python, for devices without scipy.

Equal to asking whether the upper bound of Clopper and Pearson (Biometrika 1934) is at most the limit, because that
bound is the share at which the test just rejects; `edgesplit_partitioner.bounds.binomial` computes the bound itself.
"""

from __future__ import annotations

import math


def share_is_kept(errors: int, draws: int, allowed: float, delta: float) -> bool:
    """Whether so few errors in independent draws have a probability of at most `delta` where the share exceeds
    `allowed`.

    ValueError unless 0 <= errors <= draws, and `allowed` and `delta` lie between 0 and 1.
    """
    if not (0 <= errors <= draws and 0.0 < allowed < 1.0 and 0.0 < delta < 1.0):
        raise ValueError(f"{errors} errors in {draws} draws, {allowed} allowed, delta {delta}")
    log_of, log_not = math.log(allowed), math.log1p(-allowed)
    log_draws = math.lgamma(draws + 1)
    total = 0.0
    for count in range(errors + 1):
        log_ways = log_draws - math.lgamma(count + 1) - math.lgamma(draws - count + 1)
        total += math.exp(log_ways + count * log_of + (draws - count) * log_not)
        if total > delta:
            return False
    return True


def draws_needed(allowed: float, delta: float) -> int:
    """The least number of draws that can show a share of at most `allowed`, if none is an error: 230 for 1 %, 90 %
    sure."""
    near = max(1, math.ceil(math.log(delta) / math.log1p(-allowed)) - 1)
    return next(draws for draws in (near, near + 1, near + 2) if share_is_kept(0, draws, allowed, delta))
