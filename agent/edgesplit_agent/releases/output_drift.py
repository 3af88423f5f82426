"""How far a new release's answers lie from those of the release before it, on the same golden inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgesplit.lazy_import import later
from edgesplit.runtime import Tensor

if TYPE_CHECKING:
    import numpy as np
else:
    np = later("numpy")

MOST = 1e15
"""An answer that became NaN or infinite has drifted so far."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Of two releases of one model on one device."""

    largest: float
    """The largest difference of any output, relative to the largest value of that output before."""
    top_agrees: bool | None
    """The largest element stands at the same place in both; None where no output has elements to rank."""


def drift_of(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Drift | None:
    """Of one input's outputs; None where they cannot be compared: other names, shapes or types."""
    if not before or before.keys() != after.keys():
        return None
    pairs = [(before[name], after[name]) for name in sorted(before)]
    if any(old.shape != new.shape or old.dtype != new.dtype or not _is_number(old) for old, new in pairs):
        return None
    tops = [_top_agrees(old, new) for old, new in pairs if old.ndim and old.shape[-1] > 1]
    return Drift(max(_relative(old, new) for old, new in pairs), all(tops) if tops else None)


def worst(drifts: Iterable[Drift]) -> Drift | None:
    """Of several inputs together."""
    seen = list(drifts)
    if not seen:
        return None
    tops = [one.top_agrees for one in seen if one.top_agrees is not None]
    return Drift(max(one.largest for one in seen), all(tops) if tops else None)


def _is_number(tensor: Tensor) -> bool:
    return bool(np.issubdtype(tensor.dtype, np.number) or tensor.dtype == np.bool_)


def _relative(old: Tensor, new: Tensor) -> float:
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
    return float(min(relative, MOST)) if np.isfinite(relative) else MOST


def _top_agrees(old: Tensor, new: Tensor) -> bool:
    if not old.size:
        return True
    return bool(np.array_equal(np.argmax(old, axis=-1), np.argmax(new, axis=-1)))
