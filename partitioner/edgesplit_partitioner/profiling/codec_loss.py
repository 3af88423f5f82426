"""How much a codec spoils answers: what it does to one sample's, and what that says of a half of the samples.

Loss is measured end to end, at the model's outputs. It is the larger of two: the output error (largest difference as a
part of the output's largest value, mean over the samples), and, where the answer names a class, how often it names
another (the accuracy lost, where labels are known). A codec is chosen by one half and confirmed by the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from edgesplit.runtime import Tensor

SEED = 1
"""Of the division into halves: samples may come sorted by class, or class by class in turn."""
_NUMBERS = (np.floating, np.uint8, np.int8, np.uint16, np.int16)


class SampleLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What one codec on one tensor does to the answer for one sample."""

    error: float
    """0 is the same answer, 1 is as far off as the answer is large, or no number at all."""
    changed: bool = False
    """The answer names another class."""
    right: bool | None = None
    """It names the class of the label; None without a label."""


class CodecLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What one codec on one tensor does to the answers for a half of the samples."""

    error: float
    changed: float
    """Part of the samples."""
    accuracy: float | None = None
    """With this codec; None unless every sample has a label."""
    accuracy_raw: float | None = None
    """Without it."""

    @property
    def loss(self) -> float:
        """The one figure that plans count with and that allowances bound."""
        if self.accuracy is None or self.accuracy_raw is None:
            return max(self.error, self.changed)
        return max(self.error, self.accuracy_raw - self.accuracy)


def halves(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of the samples to choose by, and of those to confirm by; the same at every call."""
    shuffled = np.random.default_rng(SEED).permutation(count)
    middle = (count + 1) // 2
    return tuple(sorted(map(int, shuffled[:middle]))), tuple(sorted(map(int, shuffled[middle:])))


def compared(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], label: int | None = None) -> SampleLoss:
    """One sample's answers with a codec beside those without."""
    error = max((_error(got[name], right) for name, right in wanted.items()), default=0.0)
    before, after = named_class(wanted), named_class(got)
    right = None if label is None or before is None else after == label
    return SampleLoss(error=error, changed=before != after, right=right)


def named_class(outputs: Mapping[str, Tensor]) -> int | None:
    """The class that an answer names: of a model with one output, the largest of a row of scores, or the one whole
    number that it is. None where the output is anything else."""
    if len(outputs) != 1:
        return None
    output = next(iter(outputs.values()))
    if output.size == 1 and np.issubdtype(output.dtype, np.integer):
        return int(output.reshape(-1)[0])
    is_row = output.size >= 2 and max(output.shape) == output.size
    return int(np.argmax(output)) if is_row and _is_measure(output) else None


def summed_up(samples: Sequence[SampleLoss], whole: Sequence[SampleLoss], positions: Sequence[int]) -> CodecLoss | None:
    """Over the samples at `positions`; None if there are none. `whole` says how often the model itself is right."""
    chosen = [samples[position] for position in positions]
    if not chosen:
        return None
    labelled = all(one.right is not None for one in chosen)
    return CodecLoss(
        error=float(np.mean([one.error for one in chosen])),
        changed=float(np.mean([one.changed for one in chosen])),
        accuracy=float(np.mean([bool(one.right) for one in chosen])) if labelled else None,
        accuracy_raw=float(np.mean([bool(whole[position].right) for position in positions])) if labelled else None,
    )


def _is_measure(output: Tensor) -> bool:
    """Its values are amounts, not names."""
    return any(np.issubdtype(output.dtype, kind) for kind in _NUMBERS)


def _error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference as a part of the largest value, at most 1; of names, the part that differs."""
    if got.shape != wanted.shape or not wanted.size:
        return float(got.shape != wanted.shape)
    if not _is_measure(wanted):
        return float(np.mean(got != wanted))
    after, before = got.astype(np.float64), wanted.astype(np.float64)
    same = (after == before) | (np.isnan(after) & np.isnan(before))
    if same.all():
        return 0.0
    largest = float(np.max(np.abs(before), initial=0.0, where=np.isfinite(before)))
    with np.errstate(invalid="ignore"):
        difference = float(np.max(np.abs(after - before), where=~same, initial=0.0))
    return min(difference / largest, 1.0) if largest and np.isfinite(difference) else 1.0
