"""`edgectl demo`: emulated devices, the events that happen to them, a live display, and the summary. Imports
`edgesplit`, `edgesplit_partitioner`, and from this room `output` and `settings`.
"""
