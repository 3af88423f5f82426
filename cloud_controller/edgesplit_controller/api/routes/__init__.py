"""The routes of the HTTP API, one module per topic: each parses a request and calls `controller` or `access`.

May import what `api` may.
"""
