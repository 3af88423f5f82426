"""Releases on the device: storing and reusing chunks, disk quota and eviction, content keys, loading a release,
checking it by golden inputs, measuring its drift, and tuning its engine options. May import the agent's packages
`state` and `worker`, and the SDK.
"""
