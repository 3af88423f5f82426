"""Environment for `alembic revision --autogenerate`, which creates a new migration step: compares the tables with an
in-memory database that has taken every step so far. Controllers run the steps with
`edgesplit_controller.storage.schema`."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine

from edgesplit_controller.storage.schema import known_tables, migrate

engine = create_engine("sqlite://")
migrate(engine)
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=known_tables())
    context.run_migrations()
