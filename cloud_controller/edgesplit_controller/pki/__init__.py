"""Public key infrastructure of an installation: the certificate authority, its keys, the revocation list, and its
delivery to brokers. May import `edgesplit` only."""
