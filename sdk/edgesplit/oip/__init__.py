"""The Open Inference Protocol v2: bodies and tensors, data types, request options, and the agent's report. No sockets.

May import `release` (tensor specifications) and the modules at the root of the SDK.
"""
