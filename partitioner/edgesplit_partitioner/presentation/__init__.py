"""A plan for people and scripts: as one JSON value, as a picture, and with the reasons behind it.

May import costs, formulation and planner.
"""
