"""Plans, rollouts and request timelines as text, tables and pictures. Imports `edgesplit`, `edgesplit_partitioner`, and
from this room `options` and `output`.
"""
