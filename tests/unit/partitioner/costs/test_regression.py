"""Fits in log space: they reproduce their points, and extrapolate sensibly."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from edgesplit.device_profile import OperatorFit
from edgesplit.errors import UsageError
from edgesplit_partitioner.costs.regression import FamilyPredictor, fit_family, fit_plane, residual_interval
from edgesplit_partitioner.onnx_format.operator_features import FEATURES

NAMES = FEATURES["gemm"]


def law(rows: float, inner: float, columns: float) -> float:
    """Seconds with an overhead, arithmetic and weights: smooth, and no plane in the logarithms."""
    return 2e-6 + 2 * rows * inner * columns / 5e10 + 4 * inner * columns / 1e10


def points(count: int, seed: int = 1) -> list[tuple[float, float, float]]:
    """Sizes evenly in the logarithm."""
    rng = random.Random(seed)
    return [tuple(round(math.exp(rng.uniform(0, math.log(1000)))) for _ in range(3)) for _ in range(count)]  # type: ignore[misc]


@pytest.fixture(scope="module")
def fit() -> OperatorFit:
    """Of 80 points of the law."""
    sizes = points(80)
    return fit_family("gemm", sizes, [law(*point) for point in sizes])


def test_a_fit_predicts_unseen_points(fit: OperatorFit) -> None:
    """The median of points drawn anew is off by less than a tenth, the worst of 100 by less than half."""
    fitted = FamilyPredictor(fit, NAMES)
    errors = sorted(abs(fitted.seconds(point) / law(*point) - 1) for point in points(100, seed=2))

    assert errors[50] < 0.1 and errors[94] < 0.5


def test_the_interval_covers_left_out_points(fit: OperatorFit) -> None:
    """Some nine in ten points drawn anew lie inside."""
    fitted = FamilyPredictor(fit, NAMES)
    inside = [fit.low <= law(*point) / fitted.seconds(point) <= fit.high for point in points(200, seed=3)]

    assert 0.75 < sum(inside) / len(inside) <= 1.0 and fit.low < 1 < fit.high


def test_a_fit_is_deterministic(fit: OperatorFit) -> None:
    """Nothing in a fit is random."""
    sizes = points(80)

    assert fit_family("gemm", sizes, [law(*point) for point in sizes]) == fit


def test_a_stored_fit_predicts_the_same(fit: OperatorFit) -> None:
    """Through JSON and back, digit by digit."""
    stored = msgspec.json.decode(msgspec.json.encode(fit), type=OperatorFit)

    assert FamilyPredictor(stored, NAMES).seconds((7, 700, 70)) == FamilyPredictor(fit, NAMES).seconds((7, 700, 70))


def test_extrapolation_grows_with_the_work(fit: OperatorFit) -> None:
    """Twice the work beyond the largest size measured is twice the time; below the smallest one it falls no further."""
    fitted = FamilyPredictor(fit, NAMES)
    _, inner, columns = fit.highest

    assert fitted.seconds((500, 4 * inner, columns)) == pytest.approx(4 * fitted.seconds((500, inner, columns)))
    assert fitted.seconds((0, 0, 0)) == fitted.seconds(fit.lowest)


def test_a_plane_without_points_keeps_the_trend() -> None:
    """Operators without a family are predicted by the trend alone."""
    sizes = [(10.0**power, 1.0) for power in range(2, 9)]
    fit = fit_plane("class:conv", sizes, [1e-9 * flops for flops, _ in sizes])

    assert not fit.points and not fit.bends
    assert FamilyPredictor(fit, ("elements", "elements")).seconds((1e6, 1)) == pytest.approx(1e-3, rel=0.02)


def test_a_family_without_sizes_is_its_median() -> None:
    """Operators that only pass a buffer on cost one time, whatever its size."""
    fit = fit_family("free", [(), (), ()], [1e-7, 2e-7, 9e-7])

    assert FamilyPredictor(fit, ()).seconds(()) == pytest.approx(2e-7)


def test_too_few_points_and_wrong_sizes_are_refused(fit: OperatorFit) -> None:
    """A fit of three sizes needs five points, and takes three sizes."""
    with pytest.raises(UsageError, match="too few"):
        fit_family("gemm", points(4), [1e-6] * 4)
    with pytest.raises(UsageError, match="3 sizes"):
        FamilyPredictor(fit, NAMES).seconds((1, 2))


def test_an_interval_always_holds_the_prediction() -> None:
    """Even where all residuals lie on one side."""
    assert residual_interval([0.1, 0.2, 0.3])[0] == 1.0 and residual_interval([-0.1, -0.2])[1] == 1.0


@pytest.mark.parametrize("trend", [(900.0,), (-900.0,), (1e308, 1e308)])
def test_an_absurd_fit_overflowed(trend: tuple[float, ...]) -> None:
    """Seconds of a forged file are absurd, but positive finite numbers."""
    sizes = (1.0,) * (len(trend) - 1)
    made = OperatorFit(
        family="x", centre=sizes, scale=sizes, lowest=sizes, highest=sizes, trend=trend, low=0.5, high=2.0
    )

    assert 0 < FamilyPredictor(made, ["elements"] * len(sizes)).seconds([7.0] * len(sizes)) < 1e9


def test_a_column_that_says_nothing_is_left_out() -> None:
    """A step in the last column is learned; noise there costs nothing, and the fit then takes the other columns."""
    rng = random.Random(11)
    sizes = points(60)
    steps = [float(rng.choice((1, 4))) for _ in sizes]
    wide = [(*point, step) for point, step in zip(sizes, steps, strict=True)]
    noise = fit_family("gemm", wide, [law(*point) for point in sizes], needed=(3,))
    stepped = fit_family("gemm", wide, [law(*point) * step for point, step in zip(sizes, steps, strict=True)], (3,))

    assert len(noise.centre) == 3 and len(stepped.centre) == 4
    plain = FamilyPredictor(noise, NAMES)
    assert plain.seconds((8, 64, 64, 4)) == plain.seconds((8, 64, 64))
    learned = FamilyPredictor(stepped, (*NAMES, "out_split"))
    assert learned.seconds((8, 64, 64, 4)) / learned.seconds((8, 64, 64, 1)) == pytest.approx(4.0, rel=0.3)


def test_calibrate_wrote_a_profile_that_no_command_read() -> None:
    """Of few points that lie far apart, the low factor was rounded to zero, which every reader of a profile refuses."""
    wild = fit_family("free", [()] * 6, [1e-12, 1e3, 1e-12, 1e3, 1e-12, 1e3])
    assert 0.0 < wild.low < 1e-5 and math.isfinite(wild.high)
    assert msgspec.convert(msgspec.to_builtins(wild), OperatorFit) == wild
    low, high = residual_interval([-20.0, 20.0, -900.0, 900.0])
    assert 0.0 < low < 1e-5 and 1e5 < high < math.inf
