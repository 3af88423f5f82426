"""Regression of operator seconds over operator sizes: fitted to measured points, evaluated from the numbers that a
device profile stores.

The model is a plane through the logarithms plus a correction towards the points by a Matern 3/2 kernel: universal
kriging (Cressie, Statistics for Spatial Data, 1993, section 3.4). Kernel width and noise are chosen from a few
candidates by leave-one-out error, in closed form (Dubrule, Mathematical Geology 15, 1983). Deterministic; numpy only;
reads no clock and no file.
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

KERNEL_WIDTHS: Final = (3.0, 5.0, 8.0, 12.0)
"""Candidates of the kernel's width, in standard deviations of the logarithms of sizes."""
NOISE_VARIANCES: Final = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1)
"""Candidates of a measured point's noise variance, relative to the variance of the kernel's correction."""
RIDGE: Final = 1e-4
"""Ridge penalty of the trend's coefficients, so that columns which do not vary cause no singular matrix."""
MAX_LOG_RESIDUAL: Final = 0.7
"""Leave-one-out residuals (logarithms) are clipped to this when candidates are compared: beyond it, a measurement was
disturbed."""
COVERAGE: Final = 0.9
"""Fraction of the residuals that an interval contains."""
SIGNIFICANT_DIGITS: Final = 9
"""Significant digits of the numbers that a profile stores."""
MAX_LOG_RATIO = 30.0
"""Largest logarithm of measured over predicted seconds that a fit states."""
LOG_SECONDS_RANGE: Final = (-45.0, 20.0)
"""Range of predicted logarithms of seconds; values are clipped to it. No operator takes a time outside it, but a
hand-written profile may predict one."""
PROPORTIONAL_SIZES: Final = frozenset(
    {"out_channels", "in_channels", "channels", "pixels", "taps", "groups", "out_each", "in_each", "rows", "inner"}
    | {"columns", "count", "steps", "inputs", "hidden", "elements", "bytes", "results"}
)
"""Names of sizes beyond whose measured range the time is extrapolated in proportion; for other sizes it stays as at the
end of the range."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Fit with one kernel width and noise."""

    error: float
    """Mean squared leave-one-out residual, outliers clipped."""
    width: float
    trend: Matrix
    """Coefficients of the plane: constant first, then one per column."""
    kernel_weights: Matrix
    """Weight of each point's kernel."""
    residuals: Matrix
    """Leave-one-out residuals: logarithm of measured over predicted seconds per point."""


def fit_family(
    family: str, sizes: Sequence[Sequence[float]], seconds: Sequence[float], needed: Sequence[int] = ()
) -> OperatorFit:
    """The fit of one operator family; UsageError with fewer points than its columns need.

    `needed`: numbers of first columns to try beside all of them, of which the one with the least leave-one-out error
    is kept: columns after these say something about some machines and kernels only.
    """
    every = np.log(np.maximum(np.array(sizes, dtype=np.float64).reshape(len(seconds), -1), 1.0))
    times = np.log(np.array(seconds, dtype=np.float64))
    counts = [count for count in sorted({*needed, every.shape[1]}) if len(times) >= max(3, count + 2)]
    if not every.shape[1]:
        return _fit_constant(family, times)
    if not counts:
        raise UsageError(f"calibration: {len(times)} points are too few for {family!r}: give it more minutes")
    fits = [(_best_candidate(every[:, :count], times), every[:, :count]) for count in counts]
    best, logs = min(fits, key=lambda fit: fit[0].error)
    return _to_operator_fit(family, logs, best)


def fit_plane(family: str, sizes: Sequence[Sequence[float]], seconds: Sequence[float]) -> OperatorFit:
    """The fit of a plane alone, without the kernel's correction: for operator classes, which mix families, so that
    single points say little."""
    logs = np.log(np.maximum(np.array(sizes, dtype=np.float64), 1.0))
    times = np.log(np.array(seconds, dtype=np.float64))
    centre, scale = logs.mean(axis=0), logs.std(axis=0) + 1e-9
    basis = _basis((logs - centre) / scale)
    ridged = basis.T @ basis + RIDGE * np.eye(basis.shape[1])
    # Ridge regression (Hoerl and Kennard, Technometrics 12, 1970): (B' B + ridge)^-1 B' y.
    trend: Matrix = np.linalg.solve(ridged, basis.T @ times).astype(np.float64)
    return _to_operator_fit(family, logs, _Candidate(0.0, 1.0, trend, np.zeros(0), times - basis @ trend))


class FamilyPredictor:
    """Predictor of one family's seconds, with the fit's numbers unpacked into arrays once."""

    def __init__(self, fit: OperatorFit, names: Sequence[str]) -> None:
        self.low, self.high = fit.low, fit.high
        columns = len(fit.centre)
        self._is_proportional = np.array([name in PROPORTIONAL_SIZES for name in names[:columns]], dtype=bool)
        self._centre, self._scale = np.array(fit.centre), np.array(fit.scale)
        self._lowest, self._highest = np.array(fit.lowest), np.array(fit.highest)
        self._trend, self._width, self._kernel_weights = np.array(fit.trend), fit.width, np.array(fit.bends)
        points = (
            np.log(np.array(fit.points).reshape(len(fit.bends), len(fit.centre))) if fit.points else np.zeros((0, 1))
        )
        self._points = (points - self._centre) / self._scale if fit.points else points

    def seconds(self, sizes: Sequence[float]) -> float:
        """Seconds of one operator with these sizes, of which a fit may know the first ones only; UsageError where it
        knows more."""
        columns = len(self._centre)
        if len(sizes) < columns:
            raise UsageError(f"the fit takes {columns} sizes, not {len(sizes)}")
        if not columns:
            return _clipped_exp(float(self._trend[0]))
        clipped = np.maximum(np.array(sizes[:columns], dtype=np.float64), 1.0)
        inside = np.minimum(np.maximum(clipped, self._lowest), self._highest)
        extrapolation = np.prod(np.maximum(clipped / inside, 1.0)[self._is_proportional])
        # The universal kriging predictor (Cressie 1993, section 3.4): trend at the point, plus the kernel between the
        # point and each measured point times that point's weight. Sizes outside the measured range are clipped to it,
        # and the time is scaled by the product of the excess ratios of sizes that it is proportional to.
        z = ((np.log(inside) - self._centre) / self._scale)[None, :]
        log_s = float((_basis(z) @ self._trend)[0])
        if len(self._kernel_weights):
            log_s += float((_kernel(z, self._points, self._width) @ self._kernel_weights)[0])
        return _clipped_exp(log_s) * float(extrapolation)


def predictors_by_family(fits: Sequence[OperatorFit], names: Mapping[str, Sequence[str]]) -> dict[str, FamilyPredictor]:
    """Predictors of all fits of a profile, by family. `names` is each family's columns, whatever the datatype after a
    slash; a family that is missing there has only columns named `elements`."""
    return {
        fit.family: FamilyPredictor(fit, names.get(fit.family.partition("/")[0], ("elements",) * len(fit.centre)))
        for fit in fits
    }


def residual_interval(residuals: Sequence[float]) -> tuple[float, float]:
    """Factors (low, high) between which `COVERAGE` of measured / predicted lie, from the logarithms of these ratios; 1
    is always within."""
    low, high = _quantiles(np.array(residuals, dtype=np.float64))
    return min(low, 1.0), max(high, 1.0)


def _to_operator_fit(family: str, logs: Matrix, candidate: _Candidate) -> OperatorFit:
    """The fit as a profile stores it; points are stored only where the kernel's correction needs them."""
    low, high = _quantiles(candidate.residuals)
    return OperatorFit(
        family=family,
        centre=_rounded(logs.mean(axis=0)),
        scale=_rounded(logs.std(axis=0) + 1e-9),
        lowest=_rounded(np.exp(logs.min(axis=0))),
        highest=_rounded(np.exp(logs.max(axis=0))),
        trend=_rounded(candidate.trend),
        width=candidate.width,
        points=tuple(_rounded(row) for row in np.exp(logs)) if len(candidate.kernel_weights) else (),
        bends=_rounded(candidate.kernel_weights),
        low=low,
        high=high,
    )


def _fit_constant(family: str, times: Matrix) -> OperatorFit:
    """The fit of a family without sizes: the median."""
    middle = float(np.median(times))
    low, high = _quantiles(times - middle)
    return OperatorFit(family=family, centre=(), scale=(), lowest=(), highest=(), trend=(middle,), low=low, high=high)


def _best_candidate(logs: Matrix, times: Matrix) -> _Candidate:
    """The kernel width and noise with the least leave-one-out error."""
    z = (logs - logs.mean(axis=0)) / (logs.std(axis=0) + 1e-9)
    return min(
        (_krige(z, times, width, noise) for width in KERNEL_WIDTHS for noise in NOISE_VARIANCES),
        key=lambda candidate: candidate.error,
    )


def _krige(z: Matrix, times: Matrix, width: float, noise: float) -> _Candidate:
    """Universal kriging with one kernel width and noise."""
    # K: covariance of the points with their noise, B: the trend's basis, y: logarithms of seconds.
    # Trend (generalised least squares, Cressie 1993, section 3.4): (B' K^-1 B + ridge)^-1 B' K^-1 y.
    inverse = np.linalg.inv(_kernel(z, z, width) + noise * np.eye(len(z)))
    basis = _basis(z)
    weighted_basis = inverse @ basis
    normal = basis.T @ weighted_basis + RIDGE * np.eye(basis.shape[1])
    trend: Matrix = np.linalg.solve(normal, weighted_basis.T @ times).astype(np.float64)
    # Q = K^-1 - K^-1 B (B' K^-1 B + ridge)^-1 B' K^-1. The kernel weights are Q y, and the residual of point i, were it
    # left out of the fit, is (Q y)_i / Q_ii (Dubrule 1983): no refit per point is needed.
    projection = inverse - weighted_basis @ np.linalg.solve(normal, weighted_basis.T)
    bends = projection @ times
    residuals = bends / np.maximum(np.diag(projection), 1e-12)
    error = float(np.mean(np.clip(residuals, -MAX_LOG_RESIDUAL, MAX_LOG_RESIDUAL) ** 2))
    return _Candidate(error, width, trend, bends, residuals)


def _clipped_exp(log_s: float) -> float:
    """Seconds from a predicted logarithm, clipped to `LOG_SECONDS_RANGE`; not-a-number gives the upper end."""
    return (
        math.exp(min(max(log_s, LOG_SECONDS_RANGE[0]), LOG_SECONDS_RANGE[1]))
        if log_s == log_s
        else math.exp(LOG_SECONDS_RANGE[1])
    )


def _basis(z: Matrix) -> Matrix:
    return np.hstack([np.ones((len(z), 1)), z])


def _kernel(first: Matrix, second: Matrix, width: float) -> Matrix:
    """Matern 3/2 correlation of every pair of points, 1 at distance 0."""
    difference = first[:, None, :] - second[None, :, :]
    # Matern covariance with nu = 3/2: (1 + sqrt(3) r / l) exp(-sqrt(3) r / l), with distance r and width l (Rasmussen
    # and Williams, Gaussian Processes for Machine Learning, 2006, equation 4.17).
    distance = np.sqrt((difference**2).sum(axis=-1)) * (math.sqrt(3.0) / width)
    return np.asarray((1.0 + distance) * np.exp(-distance))


def _quantiles(logs: Matrix) -> tuple[float, float]:
    """Factors below and above which half of `1 - COVERAGE` of the values each lies; both above zero, however far apart
    few points are, because a profile's readers refuse anything else."""
    outside = (1.0 - COVERAGE) / 2
    low, high = np.exp(np.clip(np.quantile(logs, (outside, 1.0 - outside)), -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return float(f"{low:.5g}"), float(f"{high:.5g}")


def _rounded(values: Matrix) -> tuple[float, ...]:
    """The values rounded to `SIGNIFICANT_DIGITS`, as a profile stores them."""
    return tuple(float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in values)
