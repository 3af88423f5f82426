"""Trust: device identities and TLS contexts, certificate revocation lists, and the TUF-based trust store of a device.

May import the SDK's root modules, `edgesplit.release` and `edgesplit.mqtt` (whose codec decodes signed statements).
"""
