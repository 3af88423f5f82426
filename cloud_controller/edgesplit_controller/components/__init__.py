"""Health of an installation's components: broker, offload server, database, disk, controller processes, gateways.

Imports `fleet` and `storage`.
"""
