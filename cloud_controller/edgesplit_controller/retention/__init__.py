"""Removal of models and releases, and garbage collection under retention rules: what runs, is desired, or may be rolled
back to by a rollout in progress always stays. May import `rollout`, `releases`, `model_registry`, `tuf`, `storage`,
`errors` and `edgesplit`."""
