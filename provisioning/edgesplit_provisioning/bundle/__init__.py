"""`edgectl bundle`: what devices without a network shall run, in a folder or a tar file
(`edgesplit.release.bundle_format`).

`writing` puts files there, `making` asks the controller for them.
"""
