"""For `alembic revision --autogenerate`, which makes a further step: compares the tables with a database in memory that
has taken every step so far. Controllers take the steps by `edgesplit_controller.storage.schema`.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine

from edgesplit_controller.storage.schema import bring_up_to_date, known_tables

engine = create_engine("sqlite://")
bring_up_to_date(engine)
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=known_tables())
    context.run_migrations()
