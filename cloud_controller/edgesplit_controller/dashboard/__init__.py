"""The dashboard: its built files, and the data of its pages, read only. Imports `controller`, `fleet`,
`model_registry`, `planning`, `storage` and `edgesplit_partitioner`.
"""
