"""The agent's own versions on this device: which one starts, how the next is installed, and the way back.

`slots` decides, `launch` starts, `install` unpacks wheels, `trial` judges, `own_version` is what the update loop calls.
"""
