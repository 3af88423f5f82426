"""Ranges cover what the samples held; percentiles leave lone outliers out."""

from __future__ import annotations

import numpy as np

from edgesplit_partitioner.compression.ranges import RangeCollector


def test_extremes_are_those_of_all_samples() -> None:
    """The least and the largest value may come from different samples."""
    collector = RangeCollector()
    collector.add("x", np.array([-1.0, 2.0], np.float32))
    collector.add("x", np.array([[0.0], [5.0]], np.float32))
    assert collector.extremes() == {"x": (-1.0, 5.0)}


def test_percentiles_leave_an_outlier_out() -> None:
    """One value in 100,000 does not set the range."""
    values = np.linspace(-1.0, 1.0, 4000, dtype=np.float32)
    values[1234] = 1000.0
    collector = RangeCollector()
    for _ in range(25):
        collector.add("x", np.zeros(1, np.float32) if _ else values)
    for _ in range(25):
        collector.add("x", np.linspace(-1.0, 1.0, 4000, dtype=np.float32))
    low, high = collector.percentiles()["x"]
    assert -1.0 <= low < -0.99 and 0.99 < high <= 1.0
    assert collector.extremes()["x"][1] == 1000.0


def test_what_has_no_range_is_left_out() -> None:
    """Integers, empty tensors and values that are not finite."""
    collector = RangeCollector()
    collector.add("count", np.array([1, 2]))
    collector.add("empty", np.zeros(0, np.float32))
    collector.add("broken", np.array([1.0, np.nan], np.float32))
    assert collector.extremes() == {}
