"""Encryption of models: slices encrypted under content keys, content keys wrapped for one device, and their key files.

May import the SDK's root modules, `edgesplit.release` and `edgesplit.trust` (for private key files).
"""
