"""Plans that no minimum cut can make, as mixed integer programs for HiGHS: limits on sums, memory, a stream's rate.

May import algorithms, costs and formulation.
"""
