"""What an answer is: when two answers differ, how sure one is, and a test of the share that differs.

Reading outputs only: who answers is decided by the agent, limits are fixed by the partitioner (`bounds`). May import
`release` (tensor specifications) and the modules at the root of the SDK.
"""
