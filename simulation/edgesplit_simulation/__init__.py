"""Simulated fleets: many agents in one process, each the real one but for its runtime, its requests and its time."""
