"""Applies release bundles (`edgesplit.release.bundle_format`, docs/decisions/0037): releases that come on a USB stick
or in a file instead of over the network. `reader` reads a bundle safely, `fetcher` replaces the uplink, `importer`
fetches and stages what a bundle's statement wants, `request` is the file by which a running agent is asked, and
`command` is `edgesplit-agent bundle`. May import from the agent `control`, `releases`, `self_update`, `state` and
`updates`, and from the SDK `release` and `trust`.
"""
