"""Model file and costs in, plan and slices out.

What is imported from here is loaded on its first use: a child process that tries a model needs no solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgesplit_partitioner.beside_the_best import Candidate, candidates
    from edgesplit_partitioner.costs import Costs, load_costs
    from edgesplit_partitioner.description import describe
    from edgesplit_partitioner.planner import Certificate, Plan, plan
    from edgesplit_partitioner.side_limits import Limits

__all__ = ["Candidate", "Certificate", "Costs", "Limits", "Plan", "candidates", "describe", "load_costs", "plan"]

_HOMES = {
    "Candidate": "beside_the_best", "candidates": "beside_the_best", "Costs": "costs", "load_costs": "costs",
    "describe": "description", "Certificate": "planner", "Plan": "planner", "plan": "planner", "Limits": "side_limits",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found
