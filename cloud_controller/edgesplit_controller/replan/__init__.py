"""Replanning: compares plans in use with what devices measured, and proposes or rolls out another table where it pays.
`evidence`, `pricing` and `decide` are pure; `replanner` acts. May import `releases`, `rollout`, `planning`,
`model_registry`, `fleet`, `storage`, `caller`, `errors`, `edgesplit_partitioner` and `edgesplit`."""
