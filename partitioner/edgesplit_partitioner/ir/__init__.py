"""The intermediate representation of a model: layer graph, tensor types, `PreparedModel` interface, chunks of slices.

May import the SDK only.
"""
