"""Encryption of models: slices encrypted under content keys, content keys wrapped for one device, and key files.

May import the SDK's root modules and `edgesplit.release`.
"""
