"""Updates of models and of the agent itself: `reconciler` compares the desired state (the director's signed
statement) with the actual one and decides the next step, `actions` carries the steps out, `download_window` holds the
hours in which downloads are permitted, and `bundle` applies releases from a local medium. May import the agent's
packages `control`, `releases`, `self_update`, `state` and `worker`, and the SDK; only the agent's assembly (`agent`,
`main`) imports it.
"""
