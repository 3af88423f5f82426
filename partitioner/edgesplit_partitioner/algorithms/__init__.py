"""Algorithms without any notion of models or tiers: minimum cuts of a flow network, lower envelopes of lines.

Imports no other package of the partitioner, only its module `arrays`.
"""
