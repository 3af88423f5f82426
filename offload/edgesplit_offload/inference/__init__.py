"""Inference requests from decoding to answer, the gateway's offload to the next tier, and the operators' API.

May import every other package of this room; of the SDK `http1`, `observability`, `offload_client`, `oip`, `oip_server`,
`plan`, `release`, `runtime` and root modules.
"""
