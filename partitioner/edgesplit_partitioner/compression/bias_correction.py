"""Bias correction: rounding weights shifts the mean of what an operator writes, and its bias takes the shift back.

The shift is the weights' rounding error times the mean of what the operator reads, measured on the calibration samples
(Nagel, van Baalen, Blankevoort, Welling, "Data-free quantization through weight equalization and bias correction",
1906.04721, section 4.2). It matters most where an output channel has few weights, as in depthwise convolutions.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LARGEST: Final = 127
"""Largest step of a symmetric int8 weight."""


def rounding_error(weights: Array) -> Array:
    """What is added to float weights [out, ...] by rounding them to int8 with a scale for each output channel."""
    flat = weights.astype(np.float64).reshape(len(weights), -1)
    largest = np.abs(flat).max(axis=1, keepdims=True, initial=0.0)
    scale = np.where(largest > 0.0, largest, 1.0) / LARGEST
    error: Array = np.clip(np.rint(flat / scale), -LARGEST, LARGEST) * scale - flat
    return error.reshape(weights.shape)


def output_shift(weights: Array, means: Array, groups: int = 1) -> Array | None:
    """The shift [out] of the mean of each output channel, for weights [out, in / groups, ...] and the means [in] of the
    input's channels; None where they do not fit each other. Padding, which holds zeros, is not considered."""
    if len(means) != groups * weights.shape[1] or len(weights) % groups:
        return None
    error = rounding_error(weights).reshape(*weights.shape[:2], -1).sum(axis=2)
    by_group = means.reshape(groups, -1).repeat(len(weights) // groups, axis=0)
    shift: Array = (error * by_group).sum(axis=1)
    return shift
