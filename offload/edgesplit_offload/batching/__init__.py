"""Batching across serving processes: the batcher that runs requests of its peers, the route to it, and their messages.

May import `frontend`, `models` and `scheduling`; of the SDK `oip`, `runtime` and root modules.
"""
