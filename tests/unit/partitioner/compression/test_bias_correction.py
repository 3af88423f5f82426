"""The correction is the mean that rounding the weights adds to the output."""

from __future__ import annotations

import numpy as np

from edgesplit_partitioner.compression.bias_correction import output_shift, rounding_error


def test_the_shift_is_that_of_the_mean_output() -> None:
    """For a product it is exact: rounded weights times the inputs, less float weights times the inputs, on average."""
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((5, 12)).astype(np.float32)
    inputs = rng.standard_normal((1000, 12)) + 2.0
    shift = output_shift(weights, inputs.mean(axis=0))
    assert shift is not None
    seen = (inputs @ (weights + rounding_error(weights)).T - inputs @ weights.T).mean(axis=0)
    np.testing.assert_allclose(shift, seen, atol=1e-9)


def test_each_group_reads_its_own_channels() -> None:
    """In a depthwise convolution an output depends on its channel alone."""
    weights = np.array([[[[0.5, 1.0]]], [[[0.3, 1.0]]]])
    error = rounding_error(weights).sum(axis=(1, 2, 3))
    shift = output_shift(weights, np.array([10.0, 0.0]), groups=2)
    assert shift is not None
    np.testing.assert_allclose(shift, [10.0 * error[0], 0.0])


def test_means_that_do_not_fit_give_no_shift() -> None:
    """The operator's bias then stays as it is."""
    assert output_shift(np.zeros((4, 3, 1, 1)), np.zeros(5)) is None
