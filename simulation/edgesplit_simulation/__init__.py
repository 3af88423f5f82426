"""Simulated fleets: many agents in one process. Each agent is the real one except for its runtime, its requests and its
clock; the controller and the broker are simulated in virtual time or real ones. Imports the SDK (`edgesplit`),
`edgesplit_agent` and `edgesplit_controller`, never `edgesplit_cli`.
"""
