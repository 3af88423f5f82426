"""What several threads make of an operator's time, found from whole networks.

A pool whose idle threads spin disturbs every session beside it, so single operators cannot be timed with it, many
sessions in turns. Networks can, one at a time. An operator's seconds are therefore those on one thread, of which the
threads share a part, and the seconds of handing out the work and waiting for its last part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import linprog

from edgesplit.errors import UsageError
from edgesplit_partitioner.ir.graph import OperatorClass, OperatorWork

SHARED: Final[frozenset[OperatorClass]] = frozenset({"conv", "depthwise", "gemm"})
"""Classes of operators that engines divide best; the others share a part of their own."""
LEAST_PART: Final = 0.8
"""Least part of the time that remains, over the number of threads: each thread brings its cache, so that two may be
more than twice as fast."""
MOST_SYNC_S: Final = 100e-6
"""Most seconds of an operator's start and end on several threads."""


@dataclass(frozen=True, slots=True)
class NetworkSharing:
    """A network's times on one and on several threads, without those of an empty run."""

    operators: Sequence[tuple[OperatorWork, float]]
    """Its operators, with their predicted seconds on one thread."""
    one_s: float
    """Measured seconds on one thread."""
    several_s: float
    """Measured seconds on several."""


@dataclass(frozen=True, slots=True)
class ThreadSharing:
    """Seconds of an operator on several threads: `sync_s` + its part x seconds on one thread."""

    sync_s: float
    shared_part: float
    """Part of the time of convolutions and matrix products that remains."""
    other_part: float
    """Part of the time of all other operators that remains."""

    def seconds(self, work: OperatorWork, one_s: float) -> float:
        """Seconds on several threads of an operator that takes `one_s` on one."""
        if not (work.flops or work.bytes_moved):
            return one_s
        return self.sync_s + (self.shared_part if work.operator in SHARED else self.other_part) * one_s


def fit_sharing(networks: Sequence[NetworkSharing], threads: int) -> ThreadSharing:
    """The sharing with the least sum of absolute relative errors over the networks, which a few disturbed ones do not
    move."""
    rows = np.array([_row(network) for network in networks])
    count, columns = rows.shape
    # Least absolute deviations as a linear programme (Charnes, Cooper, Ferguson, Management Science 1, 1955): the least
    # sum of e_i, with -e_i <= (rows x)_i - 1 <= e_i.
    slack = -np.eye(count)
    solution = linprog(
        np.concatenate([np.zeros(columns), np.ones(count)]),
        A_ub=np.block([[rows, slack], [-rows, slack]]),
        b_ub=np.concatenate([np.ones(count), -np.ones(count)]),
        bounds=[(0.0, MOST_SYNC_S / 1e-6), *[(LEAST_PART / threads, 1.0)] * 2, *[(0.0, None)] * count],
    )
    if solution.x is None:  # bounded, and any values within the bounds are feasible
        raise UsageError(f"calibration: {solution.message}: calibrate again when the machine is quiet")
    sync_us, shared, other = map(float, solution.x[:columns])
    return ThreadSharing(sync_us * 1e-6, shared, other)


def _row(network: NetworkSharing) -> tuple[float, float, float]:
    """Coefficients of a microsecond of `sync_s`, of `shared_part` and of `other_part` in the network's predicted over
    its measured time. Predicted seconds are scaled to those measured on one thread, so that only what threads change is
    fitted."""
    predicted_s = sum(one_s for _, one_s in network.operators)
    scale = network.one_s / max(predicted_s, 1e-12) / network.several_s
    working = [(work, one_s) for work, one_s in network.operators if work.flops or work.bytes_moved]
    shared_s = sum(one_s for work, one_s in working if work.operator in SHARED)
    return len(working) * 1e-6 / network.several_s, shared_s * scale, (predicted_s - shared_s) * scale
