"""Measurement on this machine: seconds of layers and slices, sizes and codec costs of tensors, accuracy loss of codecs.

Models run in child processes. May import the SDK, ir, costs, onnx_format, tflite_format, sandbox, and the modules
`model_loader` and `slicing`.
"""
