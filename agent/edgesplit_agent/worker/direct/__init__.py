"""Direct access ("lanes"): channels from applications straight to a worker process, past the agent.

One interface on each side of the worker's socket: `broker.LaneBroker` in the agent's process (one per worker; a release
reaches that of its present worker by `broker.ReleaseLanes`), `child.WorkerLanes` in the worker. `shared_state` is the
memory between them. May import the modules of `worker`'s root that carry messages and limits, and the SDK. The grant's
format is in `edgesplit.client.direct`; who is granted a lane is decided in `serving.direct_access`. See
docs/decisions/0042-lanes.md.
"""
