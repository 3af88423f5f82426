"""The release format: signed manifest, boundary codecs, model fingerprint, recuts, privacy floor, release bundles.

Reading and checking only: signatures are verified in `edgesplit.trust`, files are stored by `edgesplit.release_store`.
May import the SDK's root modules only.
"""
