"""What is to be planned: tiers and links, limits, objectives, and the costs of a layer graph as arrays and as a cut.

May import algorithms and costs.
"""
