"""Inputs for a release that brought no golden ones (they are left out above 128 KiB): to tune it by, not to judge it.

What is compared is the release with itself: each setup must give what the first one gave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgesplit.errors import InferenceFailed
from edgesplit.lazy_import import later
from edgesplit.oip import protocol as oip
from edgesplit.runtime import Tensors
from edgesplit_agent.releases.loaded_release import ActiveRelease, close

if TYPE_CHECKING:
    import numpy as np
else:
    np = later("numpy")

SEED = 20_261_121


def made_up_inputs(active: ActiveRelease) -> Tensors | None:
    """Random floats and zeros of the right shapes; None where that is no input: free dimensions, pictures, text."""
    made = {}
    rng = np.random.default_rng(SEED)
    for spec in active.inputs:
        dtype = oip.DTYPES[spec.datatype]
        if dtype.kind == "O" or min(spec.shape, default=1) < 0:
            return None
        made[spec.name] = rng.random(spec.shape).astype(dtype) if dtype.kind == "f" else np.zeros(spec.shape, dtype)
    return made


def like_now(active: ActiveRelease, inputs: Tensors) -> Callable[[], None]:
    """A check for later: InferenceFailed unless the device alone still answers these inputs as it does now."""

    local = active.plan.local
    order = [] if local is None else active.order(local.device)
    names = [] if local is None else [spec.name for spec in active.outputs]

    def answered() -> Tensors:
        live = active.run(order, inputs)
        return {name: np.array(live[name]) for name in names}

    first = answered()

    def check() -> None:
        now = answered()
        for name, want in first.items():
            if not close(now[name], want):
                raise InferenceFailed(f"output {name!r} is not what it was")

    return check
