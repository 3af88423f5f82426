"""Shared memory on the serving side: sealed segments passed over a Unix socket, and POSIX regions that clients
register.

May import `http1` (the peer of a connection), `oip` (references to tensors) and the modules at the root of the SDK.
"""
