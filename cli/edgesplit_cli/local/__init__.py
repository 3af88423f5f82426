"""Models, samples and costs read or measured on this machine, without a controller. Imports `edgesplit`,
`edgesplit_controller`, `edgesplit_partitioner`, and from this room `output` and `settings`.
"""
