"""Offload targets: connection, link estimate and circuit breaker of each server that finishes inferences for this
device, including foreign servers and the route through a gateway.

May import `policy` and `releases` of the agent, and `offload_client`, `oip`, `release` and the plan of the SDK; never
`serving`, which uses it.
"""
