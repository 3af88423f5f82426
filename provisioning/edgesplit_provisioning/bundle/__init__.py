"""Release bundles (`edgectl bundle`): the releases that devices without a network shall run, in a folder or a tar file
(format: `edgesplit.release.bundle_format`). `build` downloads them from the controller, `writer` writes them. Imports
`edgesplit` only.
"""
