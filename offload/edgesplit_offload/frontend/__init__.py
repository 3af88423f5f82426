"""The HTTP front end: event loop with a rotating leader, non-blocking connections and transports.

May import `scheduling` (return times of connections); of the SDK `http1` and root modules.
"""
