"""The invariants that must hold in every simulated fleet, and the checker that records violations. Imports `edgesplit`
and `edgesplit_agent` only.
"""
