"""Trust: device identities and TLS contexts, certificate revocation lists, and a device's TUF-based trust store, whose
rules (`verification`, `metadata_set`) are apart from its files (`store`).

May import the SDK's root modules, `edgesplit.crypto` (for private key files), `edgesplit.release` and `edgesplit.mqtt`
(whose codec decodes signed statements).
"""

from edgesplit.lazy_import import defer_import

# securesystemslib imports it wherever it is installed, for keys in AWS KMS alone: 9 MB and a tenth of a start.
defer_import("boto3")
