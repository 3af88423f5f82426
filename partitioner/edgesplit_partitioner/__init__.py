"""Model file and costs in, plan and slices out.

What is imported from here is loaded on its first use: a child process that tries a model needs no solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgesplit_partitioner.costs.model import Costs, load_costs
    from edgesplit_partitioner.formulation.constraints import Limits
    from edgesplit_partitioner.planner.alternatives import Candidate, candidates
    from edgesplit_partitioner.planner.planner import Certificate, Plan, plan
    from edgesplit_partitioner.presentation.plan_json import describe

__all__ = ["Candidate", "Certificate", "Costs", "Limits", "Plan", "candidates", "describe", "load_costs", "plan"]

_HOMES = {
    "Candidate": "planner.alternatives", "candidates": "planner.alternatives", "Costs": "costs.model",
    "load_costs": "costs.model", "describe": "presentation.plan_json", "Certificate": "planner.planner",
    "Plan": "planner.planner", "plan": "planner.planner", "Limits": "formulation.constraints",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found
