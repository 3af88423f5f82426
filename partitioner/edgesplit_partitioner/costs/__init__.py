"""Costs of a model on its tiers, the planner's input: file format, prediction from profiles, correction by telemetry.

May import the SDK, ir, onnx_format (features of operators) and the module `edgetpu`.
"""
