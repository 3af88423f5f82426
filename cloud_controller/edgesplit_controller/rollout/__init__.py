"""Rollouts: staged assignment of a release to devices, with gates, thresholds and rollback. Pure decisions (`terms`,
`gates`, `device_step`, `decide`, `commands`) are carried out by one loop (`engine`) in transactions shared with the
director. May import `releases`, `fleet`, `storage`, `errors` and `edgesplit`."""
