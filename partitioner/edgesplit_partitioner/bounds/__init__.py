"""Bounds that make a promise: of shares and means from samples, and of the threshold above which a model may answer.

All hold for every finite number of samples, with no distribution assumed beyond independent draws. Imports no other
package of the partitioner.
"""
