"""Metrics, phases, traces and statistics of inference requests.

May import `models`; of the SDK `http1`, `observability`, `oip_server` and root modules.
"""
