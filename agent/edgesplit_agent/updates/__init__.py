"""Updates of models and of the agent itself: `reconciler` compares the desired state (the director's signed
statement) with the actual one and decides the next step, and `actions` carries the steps out by its parts:
`trusted_manifests` verifies, `assignment` holds what the accepted statement means for this device, `release_installer`
fetches and stages, `release_loader` loads and tries, `trial_controller` activates, commits and rolls back, and `bundle`
applies releases from a local medium. `download_window` holds the hours in which downloads are permitted. May import the
agent's packages `control`, `releases`, `self_update`, `state` and `worker`, and the SDK; only the agent's assembly
(`agent`, `main`) imports it.
"""
