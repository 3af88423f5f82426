"""Operating system processes: lifetime bound to the parent, signals, and supervised child processes with restarts.

May import only the modules at the root of the SDK.
"""
