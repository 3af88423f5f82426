"""One-sided bounds of a share from independent draws (Clopper and Pearson, Biometrika 1934), and how many it takes.

Each bound alone holds with probability at least 1 - delta, whatever the share: for both sides at once give each half.
"""

from __future__ import annotations

import math

from edgesplit.errors import UsageError
from edgesplit.lazy_import import lazy_import

special = lazy_import("scipy.special")


def upper_share(errors: int, trials: int, delta: float) -> float:
    """The greatest share that `errors` of `trials` do not exclude: below it the true share lies with probability at
    least 1 - delta. 1 where nothing was drawn."""
    _check_counts(errors, trials, delta)
    if errors == trials:
        return 1.0
    if errors == 0:
        return -math.expm1(math.log(delta) / trials)
    return float(special.betaincinv(errors + 1, trials - errors, 1.0 - delta))


def lower_share(errors: int, trials: int, delta: float) -> float:
    """The least share that `errors` of `trials` do not exclude: above it the true share lies with probability at least
    1 - delta. 0 where nothing was drawn."""
    _check_counts(errors, trials, delta)
    if errors == 0:
        return 0.0
    return float(special.betaincinv(errors, trials - errors + 1, delta)) if errors < trials else delta ** (1.0 / trials)


def trials_needed(allowed: float, delta: float) -> int:
    """The least number of draws whose upper bound can be at most `allowed`: that of draws without a single error, about
    ln(1/delta)/allowed. 230 for 1 % and 114 for 2 %, 90 % sure."""
    check_promise(allowed, delta)
    near = math.ceil(math.log(delta) / math.log1p(-allowed))
    return next(trials for trials in (near - 1, near, near + 1) if trials > 0 and keeps(0, trials, allowed, delta))


def most_errors(trials: int, allowed: float, delta: float) -> int:
    """The greatest number of errors in so many draws whose upper bound is at most `allowed`; -1 where none is."""
    check_promise(allowed, delta)
    if trials < 1 or not keeps(0, trials, allowed, delta):
        return -1
    below, above = 0, trials
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if keeps(middle, trials, allowed, delta) else (below, middle)
    return below


def keeps(errors: int, trials: int, allowed: float, delta: float) -> bool:
    """Whether the upper bound of the share is at most `allowed`."""
    return upper_share(errors, trials, delta) <= allowed


def check_promise(allowed: float, delta: float) -> None:
    """UsageError where no bound can say "at most `allowed`, 1 - delta sure"."""
    if not 0.0 < allowed < 1.0:
        raise UsageError(f"an allowed share of {allowed:g} is not between 0 and 1: give one as in 1% or 0.02")
    if not 0.0 < delta < 1.0:
        raise UsageError(f"samples cannot give a certainty of {100 * (1 - delta):g} %: ask for one as in 90%")


def _check_counts(errors: int, trials: int, delta: float) -> None:
    if not 0 <= errors <= trials:
        raise UsageError(f"{errors} errors in {trials} draws cannot be")
    check_promise(0.5, delta)
