"""Statistics of tensors over samples: ranges, from which quantisers compute scales (the extremes, or percentiles
without the outermost values), and means of channels, by which biases are corrected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from edgesplit.runtime import Tensor

VALUES_PER_SAMPLE: Final = 4096
"""Values of a tensor that a sample contributes to the percentiles, evenly spaced over it."""
OUTSIDE: Final = 1e-4
"""Share of the values that lies outside of a percentile range, on each side."""


class RangeCollector:
    """Collects the range of each float tensor, sample by sample, and the means of its channels where `channel_axis`
    has the axis that counts them."""

    def __init__(self, channel_axis: Mapping[str, int] | None = None) -> None:
        self._axis_of = dict(channel_axis or {})
        self._means: dict[str, list[Tensor]] = {}
        self._least: dict[str, float] = {}
        self._largest: dict[str, float] = {}
        self._values: dict[str, list[Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one sample's tensor into account; tensors that are not float32, empty or not finite are left out."""
        if tensor.dtype != np.float32 or not tensor.size:
            return
        least, largest = float(tensor.min()), float(tensor.max())
        if not (np.isfinite(least) and np.isfinite(largest)):
            return
        self._least[name] = min(least, self._least.get(name, least))
        self._largest[name] = max(largest, self._largest.get(name, largest))
        if name in self._axis_of:
            by_channel = np.moveaxis(tensor, self._axis_of[name], 0)
            self._means.setdefault(name, []).append(
                by_channel.reshape(len(by_channel), -1).mean(axis=1, dtype=np.float64)
            )
        flat = tensor.reshape(-1)
        self._values.setdefault(name, []).append(flat[:: -(-flat.size // VALUES_PER_SAMPLE)].copy())

    def extremes(self) -> dict[str, tuple[float, float]]:
        """The least and the largest value of each tensor."""
        return {name: (least, self._largest[name]) for name, least in self._least.items()}

    def percentiles(self) -> dict[str, tuple[float, float]]:
        """For each tensor the range that leaves `OUTSIDE` of its values out, on each side."""
        ranges = {}
        for name, values in self._values.items():
            low, high = np.quantile(np.concatenate(values), (OUTSIDE, 1.0 - OUTSIDE))
            ranges[name] = (float(low), float(high))
        return ranges

    def channel_means(self) -> dict[str, Tensor]:
        """The mean [channels] of each channel, of the tensors with a channel axis."""
        return {name: np.mean(means, axis=0) for name, means in self._means.items()}
