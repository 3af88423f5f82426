"""The devices: claims, enrolment, certificates, ingestion of their messages, reported against desired state, gateways,
lists and counts, log bundles, live events. Imports `history`, `planning` and `storage`.
"""
