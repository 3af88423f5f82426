"""Direct lanes: a client's channel straight to the worker process of one model, granted and closed by the agent.

Part of `edgesplit.client`. May import `client`, `http1`, `oip`, `release`, `shared_memory` and the modules at the root
of the SDK.
"""
