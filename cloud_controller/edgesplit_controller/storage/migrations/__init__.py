"""The steps by which a database came to its present tables, oldest first; run by
`edgesplit_controller.storage.schema`."""
