"""Authentication and audit: operators, tokens, browser sessions, TLS peers, rate limits, the audit log.

Imports `pki` and `storage`; independent of FastAPI.
"""
