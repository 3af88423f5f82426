"""Telemetry: statistics of requests in telemetry windows, health per release, and the outbox that keeps them on disk
until the controller has acknowledged them.

May import `host` and `releases` of the agent, and `mqtt`, `observability`, `oip` and the plan of the SDK.
"""
