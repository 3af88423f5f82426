"""Seconds over sizes: fitted to measured points, evaluated from the plain numbers that a profile stores.

A plane through the logarithms, bent towards the points by a Matern 3/2 kernel: universal kriging (Cressie, Statistics
for Spatial Data, 1993, section 3.4). Width and noise are those of a few candidates that predict left-out points best
(in closed form: Dubrule, Mathematical Geology 15, 1983). Deterministic; numpy only; no timing and no file here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from edgesplit.device_profile import OperatorFit
from edgesplit.errors import UsageError

Matrix = npt.NDArray[np.float64]

WIDTHS: Final = (3.0, 5.0, 8.0, 12.0)
"""In standard deviations of the logarithms."""
NOISES: Final = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1)
"""Variance of a measured point relative to the bends'."""
RIDGE: Final = 1e-4
OUTLIER: Final = 0.7
"""Logarithm beyond which a left-out point counts no more when candidates are compared: a disturbed measurement."""
COVERAGE: Final = 0.9
DIGITS: Final = 9
EXPONENTS: Final = (-45.0, 20.0)
"""Logarithms of seconds beyond these are no time that anything takes: a profile written by hand went astray."""
GROWING: Final = frozenset(
    {"out_channels", "in_channels", "channels", "pixels", "taps", "groups", "out_each", "in_each", "rows", "inner"}
    | {"columns", "count", "steps", "inputs", "hidden", "elements", "bytes", "results"}
)
"""Sizes with which, beyond what was measured, time grows in proportion."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One width and noise, with what they give."""

    error: float
    width: float
    trend: Matrix
    bends: Matrix
    residuals: Matrix
    """Logarithm of measured over predicted, each point left out in turn."""


def fit_family(family: str, sizes: Sequence[Sequence[float]], seconds: Sequence[float]) -> OperatorFit:
    """The fit of one family; UsageError with fewer points than it has columns to tell apart."""
    logs = np.log(np.maximum(np.array(sizes, dtype=np.float64).reshape(len(seconds), -1), 1.0))
    times = np.log(np.array(seconds, dtype=np.float64))
    columns = logs.shape[1]
    if len(times) < max(3, columns + 2) and columns:
        raise UsageError(f"calibration: {len(times)} points are too few for {family!r}: give it more minutes")
    centre, scale = (logs.mean(axis=0), logs.std(axis=0) + 1e-9) if columns else (np.zeros(0), np.ones(0))
    if not columns:
        return _constant(family, times)
    z = (logs - centre) / scale
    best = min((_try(z, times, width, noise) for width in WIDTHS for noise in NOISES), key=lambda one: one.error)
    return _stored(family, logs, best)


def fit_plane(family: str, sizes: Sequence[Sequence[float]], seconds: Sequence[float]) -> OperatorFit:
    """The same without bends: for what has no family of its own, where points should not be trusted one by one."""
    logs = np.log(np.maximum(np.array(sizes, dtype=np.float64), 1.0))
    times = np.log(np.array(seconds, dtype=np.float64))
    centre, scale = logs.mean(axis=0), logs.std(axis=0) + 1e-9
    basis = _basis((logs - centre) / scale)
    ridged = basis.T @ basis + RIDGE * np.eye(basis.shape[1])
    trend: Matrix = np.linalg.solve(ridged, basis.T @ times).astype(np.float64)
    return _stored(family, logs, _Candidate(0.0, 1.0, trend, np.zeros(0), times - basis @ trend))


class Fitted:
    """One family's fit, ready to be asked often."""

    def __init__(self, fit: OperatorFit, names: Sequence[str]) -> None:
        self.low, self.high = fit.low, fit.high
        self._growing = np.array([name in GROWING for name in names], dtype=bool)
        self._centre, self._scale = np.array(fit.centre), np.array(fit.scale)
        self._lowest, self._highest = np.array(fit.lowest), np.array(fit.highest)
        self._trend, self._width, self._bends = np.array(fit.trend), fit.width, np.array(fit.bends)
        points = (
            np.log(np.array(fit.points).reshape(len(fit.bends), len(fit.centre))) if fit.points else np.zeros((0, 1))
        )
        self._points = (points - self._centre) / self._scale if fit.points else points

    def seconds(self, sizes: Sequence[float]) -> float:
        """Of one operator of these sizes."""
        if len(sizes) != len(self._centre):
            raise UsageError(f"the fit takes {len(self._centre)} sizes, not {len(sizes)}")
        if not len(sizes):
            return _exp(float(self._trend[0]))
        asked = np.maximum(np.array(sizes, dtype=np.float64), 1.0)
        inside = np.minimum(np.maximum(asked, self._lowest), self._highest)
        beyond = np.prod(np.maximum(asked / inside, 1.0)[self._growing])
        z = ((np.log(inside) - self._centre) / self._scale)[None, :]
        value = float((_basis(z) @ self._trend)[0])
        if len(self._bends):
            value += float((_kernel(z, self._points, self._width) @ self._bends)[0])
        return _exp(value) * float(beyond)


def by_family(fits: Sequence[OperatorFit], names: Mapping[str, Sequence[str]]) -> dict[str, Fitted]:
    """All fits of a profile. `names` gives a family's columns; one that is not there has `elements` alone."""
    return {one.family: Fitted(one, names.get(one.family, ("elements",) * len(one.centre))) for one in fits}


def interval(residuals: Sequence[float]) -> tuple[float, float]:
    """Factors between which `COVERAGE` of measured / predicted lie, from their logarithms; never without 1."""
    low, high = _quantiles(np.array(residuals, dtype=np.float64))
    return min(low, 1.0), max(high, 1.0)


def _stored(family: str, logs: Matrix, found: _Candidate) -> OperatorFit:
    """As a profile keeps it; the points only where there are bends towards them."""
    low, high = _quantiles(found.residuals)
    return OperatorFit(
        family=family,
        centre=_numbers(logs.mean(axis=0)),
        scale=_numbers(logs.std(axis=0) + 1e-9),
        lowest=_numbers(np.exp(logs.min(axis=0))),
        highest=_numbers(np.exp(logs.max(axis=0))),
        trend=_numbers(found.trend),
        width=found.width,
        points=tuple(_numbers(row) for row in np.exp(logs)) if len(found.bends) else (),
        bends=_numbers(found.bends),
        low=low,
        high=high,
    )


def _constant(family: str, times: Matrix) -> OperatorFit:
    middle = float(np.median(times))
    low, high = _quantiles(times - middle)
    return OperatorFit(family=family, centre=(), scale=(), lowest=(), highest=(), trend=(middle,), low=low, high=high)


def _try(z: Matrix, times: Matrix, width: float, noise: float) -> _Candidate:
    """Universal kriging; the residual of a left-out point is its bend over the diagonal of the bends' matrix."""
    inverse = np.linalg.inv(_kernel(z, z, width) + noise * np.eye(len(z)))
    basis = _basis(z)
    seen = inverse @ basis
    normal = basis.T @ seen + RIDGE * np.eye(basis.shape[1])
    trend: Matrix = np.linalg.solve(normal, seen.T @ times).astype(np.float64)
    matrix = inverse - seen @ np.linalg.solve(normal, seen.T)
    bends = matrix @ times
    residuals = bends / np.maximum(np.diag(matrix), 1e-12)
    error = float(np.mean(np.clip(residuals, -OUTLIER, OUTLIER) ** 2))
    return _Candidate(error, width, trend, bends, residuals)


def _exp(value: float) -> float:
    """Seconds of a logarithm that a file may have made up: neither nothing nor for ever."""
    return math.exp(min(max(value, EXPONENTS[0]), EXPONENTS[1])) if value == value else math.exp(EXPONENTS[1])


def _basis(z: Matrix) -> Matrix:
    return np.hstack([np.ones((len(z), 1)), z])


def _kernel(first: Matrix, second: Matrix, width: float) -> Matrix:
    difference = first[:, None, :] - second[None, :, :]
    distance = np.sqrt((difference**2).sum(axis=-1)) * (math.sqrt(3.0) / width)
    return np.asarray((1.0 + distance) * np.exp(-distance))


def _quantiles(logs: Matrix) -> tuple[float, float]:
    """The factors below and above which half of the rest each lies."""
    rest = (1.0 - COVERAGE) / 2
    low, high = np.quantile(logs, (rest, 1.0 - rest))
    return round(math.exp(float(low)), 5), round(math.exp(float(high)), 5)


def _numbers(values: Matrix) -> tuple[float, ...]:
    """As a profile stores them."""
    return tuple(float(f"{value:.{DIGITS}g}") for value in values)
