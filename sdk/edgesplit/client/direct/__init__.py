"""Direct lanes: a client's channel straight to the worker process of one model, granted and closed by the agent.

A client meets one interface: `sync_channel.Lanes` or `async_channel.AsyncLanes`, whose `infer` answers by a lane or by
the agent, for requests that `request_policy.may_use_lane` allows. `endpoint` is a lane's buffers, `grant` the format.

Part of `edgesplit.client`. May import `client`, `http1`, `oip`, `release`, `shared_memory` and the modules at the root
of the SDK.
"""
