"""The clip of `int4`: which share of a tensor's own range its 16 levels divide best, found on samples.

A few large values stretch the range; saturating them makes the steps of all others finer. Of a few shares the one of
least squared error over the samples is taken. It is a share of each request's own range, not a fixed range: a frame
brighter than all samples stretches the levels, and does not saturate whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from edgesplit.release import boundary_codecs
from edgesplit.runtime import Tensor

CLIPS = (1.0, 0.8, 0.64, 0.5, 0.4, 0.32, 0.25, 0.2)
"""The shares that are tried."""
MOST_VALUES = 65_536
"""Values of one tensor that the error is taken over, evenly spread."""


def choose_clip(tensors: Iterable[Tensor]) -> float:
    """The share of `CLIPS` with the least mean squared error, relative to each tensor's mean square; of equals the
    largest. 1 without a finite tensor."""
    errors = np.zeros(len(CLIPS))
    for tensor in tensors:
        if tensor.size and np.isfinite(tensor).all():
            errors += _relative_errors(tensor)
    return CLIPS[int(errors.argmin())]


def _relative_errors(tensor: Tensor) -> np.ndarray:
    """By share: mean squared error over mean square of some of the tensor's values."""
    flat = tensor.reshape(-1)
    spread = flat[:: -(-flat.size // MOST_VALUES)]
    # with the extremes, which set the range
    values = np.concatenate([spread, [flat.min(), flat.max()]]).astype(tensor.dtype)
    wanted = values.astype(np.float64)
    power = max(float(np.mean(wanted**2)), float(np.finfo(np.float64).tiny))
    errors = []
    for clip in CLIPS:
        sent = boundary_codecs.encode("t", values, boundary_codecs.INT4, clip)
        got = boundary_codecs.decode_like("t", sent, values, boundary_codecs.INT4)
        errors.append(float(np.mean((got.astype(np.float64) - wanted) ** 2)) / power)
    return np.array(errors)
