"""The clip of int4, found on samples."""

from __future__ import annotations

import numpy as np

from edgesplit.release import boundary_codecs
from edgesplit_partitioner.profiling.clip_range import CLIPS, choose_clip

RNG = np.random.default_rng(5)


def squared_error(tensor: np.ndarray, clip: float) -> float:
    sent = boundary_codecs.encode("t", tensor, "int4", clip)
    return float(np.mean((boundary_codecs.decode_like("t", sent, tensor, "int4") - tensor) ** 2))


def test_a_tensor_with_few_large_values_is_clipped_where_the_error_is_least() -> None:
    """A Laplace tensor wastes levels on its tail; an even one has no tail to give up."""
    peaked = [RNG.laplace(size=(1, 8, 40, 40)).astype(np.float32) for _ in range(4)]
    even = [RNG.uniform(-1, 1, (1, 8, 40, 40)).astype(np.float32) for _ in range(4)]

    errors = [sum(squared_error(tensor, clip) for tensor in peaked) for clip in CLIPS]
    assert choose_clip(peaked) == CLIPS[int(np.argmin(errors))] < 1
    assert choose_clip(even) == 1


def test_large_tensors_keep_their_range_and_what_is_not_finite_does_not_count() -> None:
    """Only some values of a large tensor are compared, its extremes among them; NaN, constants and nothing give 1."""
    large = RNG.laplace(size=400_001).astype(np.float32)
    large[1] = 50.0

    assert choose_clip([large]) < 0.5
    for tensor in (np.array([np.nan, 1], np.float32), np.full(9, 2, np.float16), np.zeros(4), np.zeros((0, 2))):
        assert choose_clip([tensor]) == 1
    assert choose_clip([]) == 1
