"""HTTP/1.1 for both sides: a threaded server, request heads, response parsing, content codings, listeners, addresses.

Independent of inference. May import only the modules at the root of the SDK.
"""
