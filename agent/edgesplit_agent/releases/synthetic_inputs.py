"""Synthetic inputs for a release without golden ones (they are left out above 128 KiB): to tune it, not to judge it.

The release is compared with itself: with every setup it must answer as it did with the first. Noise says nothing about
an output's range (a detector's scores stay near 0), so `loaded_release.tolerance_of` has an absolute floor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgesplit.errors import InferenceFailed
from edgesplit.lazy_import import lazy_import
from edgesplit.oip import protocol as oip
from edgesplit.runtime import Tensors
from edgesplit_agent.releases.loaded_release import LoadedRelease, is_close

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy_import("numpy")

SEED = 20_261_121
"""Seed of the random inputs."""


def make_synthetic_inputs(active: LoadedRelease) -> Tensors | None:
    """Random floats, and zeros for integers, of the declared shapes; None where no valid input can be made: free
    dimensions, pictures, text."""
    tensors = {}
    rng = np.random.default_rng(SEED)
    for spec in active.inputs:
        dtype = oip.DTYPES[spec.datatype]
        if dtype.kind == "O" or min(spec.shape, default=1) < 0:
            return None
        tensors[spec.name] = rng.random(spec.shape).astype(dtype) if dtype.kind == "f" else np.zeros(spec.shape, dtype)
    return tensors


def unchanged_answers_check(active: LoadedRelease, inputs: Tensors) -> Callable[[], None]:
    """A check to be called later: InferenceFailed unless the device alone answers these inputs as it does now."""

    local = active.plan.local
    order = [] if local is None else active.order(local.device)
    names = [] if local is None else active.manifest.outputs_of(local.variant)

    def run_alone() -> Tensors:
        outputs = active.run(order, inputs)
        return {name: np.array(outputs[name]) for name in names}

    expected = run_alone()

    def check() -> None:
        actual = run_alone()
        for name, wanted in expected.items():
            if not is_close(actual[name], wanted):
                raise InferenceFailed(f"output {name!r} differs from the first run's")

    return check
