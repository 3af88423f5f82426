"""How the parts of an installation are: broker, offload server, database, disk, controller processes, gateways."""
