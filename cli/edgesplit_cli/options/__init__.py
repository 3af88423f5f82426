"""Options that several commands share, with their parsers. Imports `edgesplit`, `edgesplit_provisioning`, and from this
room `types` and `settings`.
"""
