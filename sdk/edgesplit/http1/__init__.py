"""HTTP/1.1 for both sides: the protocol of a server's connection without I/O, a threaded server on it, and a client's
connection; content codings, listeners, addresses.

Independent of inference. May import only the modules at the root of the SDK.
"""
