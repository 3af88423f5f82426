"""Releases from a bundle (`edgesplit.release.bundle_format`) in place of the network: `source` reads it, `carrier`
stands in for the
uplink, `wish` is how an agent that runs is asked, `command` is `edgesplit-agent bundle` (docs/decisions/0037)."""
