"""Self-update: which version of the agent starts, how the next one is installed, and how a bad one is rolled back.
`version_slots` holds the state and its transitions, `launcher` starts a version, `install` turns wheels into a virtual
environment, `version_store` checks installed files, `trial` judges a version, and `manager` is what the reconciler
calls. May import the agent's packages `host`, `releases` and `state`, and the SDK.
"""
