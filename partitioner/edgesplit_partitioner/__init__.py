"""The partitioner: a model file and its costs in, a plan and the model's slices out. Imports the SDK and nothing else.

Models: `ir` (layer graphs), `onnx_format`, `tflite_format`, `sandbox` (child processes with limits), `split_check`.
Costs: `costs`, `profiling`, `calibration`. Planning, each package importing only those before it: `algorithms`,
`costs`, `formulation`, `milp`, `planner`, `presentation`. The modules of this folder, which several packages share:
`arrays`, `model_loader`, `slicing`, `edgetpu`.

A name imported from here is loaded on its first use: a child process that tries a model needs no solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgesplit_partitioner.costs.model import Costs, load_costs
    from edgesplit_partitioner.formulation.constraints import Limits
    from edgesplit_partitioner.planner.alternatives import Candidate, candidates
    from edgesplit_partitioner.planner.planner import Certificate, PlanResult, plan
    from edgesplit_partitioner.presentation.plan_json import describe

__all__ = ["Candidate", "Certificate", "Costs", "Limits", "PlanResult", "candidates", "describe", "load_costs", "plan"]

_MODULES = {
    "Candidate": "planner.alternatives", "candidates": "planner.alternatives", "Costs": "costs.model",
    "load_costs": "costs.model", "describe": "presentation.plan_json", "Certificate": "planner.planner",
    "PlanResult": "planner.planner", "plan": "planner.planner", "Limits": "formulation.constraints",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    loaded: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return loaded
