"""Serving: answers inference requests of local applications, from the HTTP endpoint through admission, row selection
and local execution to the race against the offload target.

May import `offload`, `policy`, `power`, `releases`, `telemetry` and `worker` of the agent, and the SDK; never `control`
or `updates`.
"""
