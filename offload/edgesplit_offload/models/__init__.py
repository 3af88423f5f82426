"""Models of the releases at hand: repository, slice cache, remote halves, batching benefit, warm-up.

May import `scheduling`; of the SDK `crypto`, `oip`, `plan`, `release`, `runtime` and root modules.
"""
