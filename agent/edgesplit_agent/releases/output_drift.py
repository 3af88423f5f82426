"""Measures how far a new release's answers differ from those of the release before it, on the same golden inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgesplit.lazy_import import lazy_import
from edgesplit.runtime import Tensor

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy_import("numpy")

MAX_DRIFT = 1e15
"""Drift of an answer that became NaN or infinite."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Difference between two releases of one model on one device."""

    largest: float
    """The largest difference of any output, relative to the largest absolute value of that output before."""
    top_agrees: bool | None
    """Whether the largest element is at the same index in both; None where no output has elements to rank."""


def drift_of(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Drift | None:
    """The drift of one input's outputs; None where they cannot be compared: different names, shapes or types."""
    if not before or before.keys() != after.keys():
        return None
    pairs = [(before[name], after[name]) for name in sorted(before)]
    if any(old.shape != new.shape or old.dtype != new.dtype or not _is_number(old) for old, new in pairs):
        return None
    agreements = [_top_agrees(old, new) for old, new in pairs if old.ndim and old.shape[-1] > 1]
    return Drift(max(_relative_difference(old, new) for old, new in pairs), all(agreements) if agreements else None)


def worst_drift(drifts: Iterable[Drift]) -> Drift | None:
    """The drift over several inputs: the largest difference, and whether the top element agreed in all. None where
    there is none."""
    known = list(drifts)
    if not known:
        return None
    agreements = [drift.top_agrees for drift in known if drift.top_agrees is not None]
    return Drift(max(drift.largest for drift in known), all(agreements) if agreements else None)


def _is_number(tensor: Tensor) -> bool:
    return bool(np.issubdtype(tensor.dtype, np.number) or tensor.dtype == np.bool_)


def _relative_difference(old: Tensor, new: Tensor) -> float:
    if not old.size:
        return 0.0
    before, after = old.astype(np.float64), new.astype(np.float64)
    with np.errstate(all="ignore"):
        different = before != after
        different &= ~(np.isnan(before) & np.isnan(after))
        if not different.any():
            return 0.0
        gap = float(np.max(np.abs(before - after), where=different, initial=0.0))
        scale = float(np.max(np.abs(before)))
        relative = gap / scale if scale > 0 else np.inf
    return float(min(relative, MAX_DRIFT)) if np.isfinite(relative) else MAX_DRIFT


def _top_agrees(old: Tensor, new: Tensor) -> bool:
    if not old.size:
        return True
    return bool(np.array_equal(np.argmax(old, axis=-1), np.argmax(new, axis=-1)))
