"""Model file and costs in, plan and slices out."""

from edgesplit_partitioner.candidates import Candidate, candidates
from edgesplit_partitioner.costs import Costs, load_costs
from edgesplit_partitioner.description import describe
from edgesplit_partitioner.planner import Certificate, Plan, plan
from edgesplit_partitioner.side_limits import Limits

__all__ = ["Candidate", "Certificate", "Costs", "Limits", "Plan", "candidates", "describe", "load_costs", "plan"]
