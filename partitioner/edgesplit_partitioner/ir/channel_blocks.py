"""How numbers of channels fill the blocks in which kernels compute: sizes of convolutions on which run times depend
beside the channels themselves."""

from __future__ import annotations

from typing import Final

BLOCK_CHANNELS, QUAD_CHANNELS = 16, 4
"""Channels of a block, which is one vector register's (16 floats of AVX-512, 16 bytes of SSE and NEON), and of the
least group that blocked kernels accept."""
BLOCK_SIZES: Final = ("out_fill", "in_fill", "out_split", "in_split")
"""Names of `block_sizes(out, in)`."""


def block_sizes(*channels: int) -> tuple[float, ...]:
    """For each number of channels how many times more whole blocks hold; then for each whether it is whole blocks (1),
    whole groups of four (2) or neither (4).

    Kernels compute padded blocks (oneDNN's nChw16c, onnxruntime's NCHWc, XNNPACK's tiles), or the rest one by one, or
    are not used for such numbers of channels at all (onnxruntime's `nchwc_transformer`).
    """
    counts = [max(count, 1) for count in channels]
    fills = [-(-count // BLOCK_CHANNELS) * BLOCK_CHANNELS / count for count in counts]
    return (*fills, *(1.0 if not count % BLOCK_CHANNELS else 4.0 if count % QUAD_CHANNELS else 2.0 for count in counts))
