"""Persistence: the database with its tables and migrations, its engines (SQLite or PostgreSQL), leases, and the blob
store. May import `caller` and `edgesplit`; the packages above it import this one."""
