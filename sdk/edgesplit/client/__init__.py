"""The inference clients `Client` (threads) and `AsyncClient` (asyncio) for any server of the Open Inference Protocol.

Covers connections, retries, streams and shared memory; `edgesplit.client.direct` adds direct lanes to a model's worker
process. May import `http1`, `oip`, `observability`, `shared_memory`, `release` and the modules at the root of the SDK.
"""
