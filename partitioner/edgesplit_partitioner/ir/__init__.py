"""The intermediate representation of a model: layer graph, tensor types, `PreparedModel` interface, chunks of slices.

May import the SDK only; of the partitioner's other packages just a type of `onnx_format`.
"""
