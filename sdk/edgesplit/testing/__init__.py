"""Test support for edgesplit and for programs that use it: virtual time, an in-memory MQTT broker, an MQTT reactor.

Link emulation without root is in `edgesplit.link_emulation`. May import the SDK's root modules and `edgesplit.mqtt`.
"""
