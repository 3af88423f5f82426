"""Client of the next tier's offload server, for agents and gateways: pooled connections and a circuit breaker.

May import `http1`, `observability`, `oip`, `release`, `runtime` and the modules at the root of the SDK.
"""
