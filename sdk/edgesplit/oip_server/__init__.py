"""What servers of the Open Inference Protocol share beside inference: Triton's extensions and statistics.

May import `http1`, `shared_memory` and the modules at the root of the SDK.
"""
