"""What a plan minimises: latency, its p95, device energy, throughput, or a weighted sum.

All but throughput add up over an assignment (`cost_terms`). The p95 of latency is latency at the p95 of a link's
seconds per byte: exact where one link varies, since latency grows with it; `planner.tail_latency` has the other case.
Throughput is the slowest stage of a stream, not a sum, and is left to the MILP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgesplit.errors import UsageError
from edgesplit_partitioner.costs.model import to_python_types

LATENCY, LATENCY_P95, ENERGY, THROUGHPUT = "latency", "latency_p95", "energy", "throughput"
OBJECTIVES = (LATENCY, LATENCY_P95, ENERGY, THROUGHPUT)
MAX_WEIGHT = 1e100
"""Weights are below it: larger ones would overflow when costs are multiplied by them."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Weights: per second of mean latency, per second of its p95, per joule of the device, per second of a stream's
    slowest stage."""

    latency: float = 0.0
    latency_p95: float = 0.0
    energy: float = 0.0
    throughput: float = 0.0
    name: str = LATENCY
    """As the caller spelt it; a weighted sum as in `2*latency + 0.1*energy`."""

    @property
    def weights(self) -> dict[str, float]:
        """The weights above 0, by name of the objective."""
        every = {name: float(getattr(self, name)) for name in OBJECTIVES}
        return {name: weight for name, weight in every.items() if weight}

    @property
    def row_weights(self) -> dict[str, float]:
        """The weights as a switching table contains them; empty where latency alone counts.

        At run time the link's rate is known, so the weight of the p95 is added to that of latency.
        """
        if not self.energy and not self.throughput:
            return {}
        summed = {LATENCY: self.latency + self.latency_p95, ENERGY: self.energy, THROUGHPUT: self.throughput}
        return {name: weight for name, weight in summed.items() if weight}


def parse_objective(given: str | Mapping[str, float]) -> Objective:
    """The objective that a caller gave by name or by weights; UsageError names the supported ones."""
    if not isinstance(given, str | Mapping):
        raise UsageError(f"objective: give one of {', '.join(OBJECTIVES)}, or a mapping of weights, not {given!r}")
    weights = {given: 1.0} if isinstance(given, str) else to_python_types(given)
    spelt = {str(name).replace("-", "_"): weight for name, weight in weights.items()}
    unknown = [name for name in spelt if name not in OBJECTIVES]
    if unknown:
        raise UsageError(f"objective {unknown[0]!r} is not supported; supported: {', '.join(OBJECTIVES)}")
    if not all(isinstance(weight, int | float) and 0 <= weight < MAX_WEIGHT for weight in spelt.values()):
        raise UsageError(f"objective: weights must be numbers of at least 0 and below {MAX_WEIGHT:g}, not {weights}")
    if not any(spelt.values()):
        raise UsageError("objective: at least one weight must be above 0")
    if spelt.get(THROUGHPUT) and len([weight for weight in spelt.values() if weight]) > 1:
        raise UsageError("objective: throughput is not a sum, so it cannot be weighed against others")
    name = (
        next(iter(spelt))
        if isinstance(given, str)
        else " + ".join(f"{weight:g}*{name}" for name, weight in spelt.items())
    )
    return Objective(**spelt, name=name)
