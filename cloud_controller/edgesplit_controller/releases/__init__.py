"""Signed releases: building them from plans, content keys, statements of desired state (the director), release bundles,
export to foreign servers, agent releases, and key management. May import `planning`, `model_registry`, `tuf`, `fleet`,
`messaging`, `storage`, `errors`, `edgesplit_partitioner` and `edgesplit`."""
