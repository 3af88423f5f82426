"""The planner: costs, links, limits and an objective in, the best cut and the switching table out.

May import algorithms, costs, formulation and milp.
"""
