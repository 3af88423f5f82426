"""Calibration: microbenchmarks of operators and small networks on this machine, fitted to a device profile.

May import the SDK, ir, costs, profiling, onnx_format and sandbox.
"""
