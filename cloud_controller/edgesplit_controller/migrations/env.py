"""What alembic runs: our steps over the connection that `schema` gives it.

Without one, as under `alembic revision --autogenerate`, it compares the tables with a fresh database in memory that
has taken every step so far.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine

from edgesplit_controller.schema import bring_up_to_date, known_tables

given = context.config.attributes.get("connection")
if given is None:
    engine = create_engine("sqlite://")
    bring_up_to_date(engine)
    given = engine.connect()
context.configure(connection=given, target_metadata=known_tables(), compare_server_default=True)
context.run_migrations()
