"""Accuracy loss of a boundary codec: of one sample's outputs, and aggregated over half of the samples.

Loss is measured end to end, at the model's outputs. It is the larger of two figures: the output error (largest
difference relative to the output's largest value, mean over the samples), and, where the output names a class, how
often that class changes (or, where labels are known, the accuracy lost). A codec is chosen on one half of the samples
and confirmed on the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from edgesplit.runtime import Tensor

SPLIT_SEED = 1
"""Seed of the random division into halves: samples may be sorted by class, or alternate between classes."""
_QUANTITY_TYPES = (np.floating, np.uint8, np.int8, np.uint16, np.int16)


class SampleLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of one codec on one tensor on the outputs for one sample."""

    error: float
    """0: the outputs are equal; 1: the difference is as large as the output's largest value, or the result is not a
    number."""
    changed: bool = False
    """Whether the predicted class differs."""
    right: bool | None = None
    """Whether the predicted class is the label; None without a label."""


class CodecLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of one codec on one tensor on the outputs, over half of the samples."""

    error: float
    """Mean output error."""
    changed: float
    """Fraction of the samples whose predicted class differs."""
    accuracy: float | None = None
    """Accuracy with this codec; None unless every sample has a label."""
    accuracy_raw: float | None = None
    """Accuracy without it."""

    @property
    def loss(self) -> float:
        """The figure that plans minimise and that `allow_loss` bounds."""
        if self.accuracy is None or self.accuracy_raw is None:
            return max(self.error, self.changed)
        return max(self.error, self.accuracy_raw - self.accuracy)


def split_halves(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of the samples to choose by, and of those to confirm by; the same at every call."""
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(count)
    middle = (count + 1) // 2
    return tuple(sorted(map(int, shuffled[:middle]))), tuple(sorted(map(int, shuffled[middle:])))


def sample_loss(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], label: int | None = None) -> SampleLoss:
    """Loss of one sample: its outputs with a codec (`got`) compared with those without (`wanted`)."""
    error = max((_output_error(got[name], is_right) for name, is_right in wanted.items()), default=0.0)
    class_before, class_after = predicted_class(wanted), predicted_class(got)
    is_right = None if label is None or class_before is None else class_after == label
    return SampleLoss(error=error, changed=class_before != class_after, right=is_right)


def predicted_class(outputs: Mapping[str, Tensor]) -> int | None:
    """The class that the outputs of a model name: with a single output, the position of the largest in a row of scores,
    or the value of a single integer. None for any other output."""
    if len(outputs) != 1:
        return None
    output = next(iter(outputs.values()))
    if output.size == 1 and np.issubdtype(output.dtype, np.integer):
        return int(output.reshape(-1)[0])
    is_score_row = output.size >= 2 and max(output.shape) == output.size
    return int(np.argmax(output)) if is_score_row and _is_quantity(output) else None


def aggregate_loss(
    samples: Sequence[SampleLoss], whole: Sequence[SampleLoss], positions: Sequence[int]
) -> CodecLoss | None:
    """Loss over the samples at `positions`; None if there are none. `whole` is the model's own samples without a codec,
    for its own accuracy."""
    chosen = [samples[position] for position in positions]
    if not chosen:
        return None
    labelled = all(sample.right is not None for sample in chosen)
    return CodecLoss(
        error=float(np.mean([sample.error for sample in chosen])),
        changed=float(np.mean([sample.changed for sample in chosen])),
        accuracy=float(np.mean([bool(sample.right) for sample in chosen])) if labelled else None,
        accuracy_raw=float(np.mean([bool(whole[position].right) for position in positions])) if labelled else None,
    )


def _is_quantity(output: Tensor) -> bool:
    """Whether the values are quantities, whose differences mean something, and not class numbers."""
    return any(np.issubdtype(output.dtype, kind) for kind in _QUANTITY_TYPES)


def _output_error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest value, at most 1; for outputs that are class numbers, the fraction
    that differs."""
    if got.shape != wanted.shape or not wanted.size:
        return float(got.shape != wanted.shape)
    if not _is_quantity(wanted):
        return float(np.mean(got != wanted))
    got_values, wanted_values = got.astype(np.float64), wanted.astype(np.float64)
    # Equal infinities and not-a-numbers are no difference; unequal ones are an error of 1, by the test at the end.
    is_equal = (got_values == wanted_values) | (np.isnan(got_values) & np.isnan(wanted_values))
    if is_equal.all():
        return 0.0
    largest = float(np.max(np.abs(wanted_values), initial=0.0, where=np.isfinite(wanted_values)))
    with np.errstate(invalid="ignore"):
        difference = float(np.max(np.abs(got_values - wanted_values), where=~is_equal, initial=0.0))
    return min(difference / largest, 1.0) if largest and np.isfinite(difference) else 1.0
