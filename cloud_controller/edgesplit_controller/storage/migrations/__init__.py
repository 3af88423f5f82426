"""Database migration steps, oldest first; run by `edgesplit_controller.storage.schema`."""
