"""One simulated device: its engine, runtime, disks and sensors, and the agent that runs on them. Imports `edgesplit`,
`edgesplit_agent`, and from this room `invariants` and `releases`.
"""
