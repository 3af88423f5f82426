"""Models and releases can be removed. Deployments and rollouts keep the digest of a release that is gone."""

from __future__ import annotations

import re

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
HISTORY = ("deployments", "rollouts")
REFERENCE = re.compile(r",\s*FOREIGN KEY\s*\(release\) REFERENCES releases \(digest\)")


def upgrade() -> None:
    """Create the tables of removed models and of holds; drop the references of the history to releases."""
    op.create_table(
        "removed_models",
        sa.Column("name", sa.String(), primary_key=True),
        sa.Column("version", BIG, nullable=False),
    )
    op.create_table(
        "holds",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
    )
    connection = op.get_bind()
    for table in HISTORY:
        if connection.dialect.name == "sqlite":
            _drop_reference_in_schema(connection, table)
        else:
            op.drop_constraint(f"{table}_release_fkey", table, type_="foreignkey")


def _drop_reference_in_schema(connection: sa.Connection, table: str) -> None:
    """Remove the constraint from the stored schema, as SQLite documents it for constraints ("Making Other Kinds Of
    Table Schema Changes"): copying the table would break the references to it within this transaction."""
    query = sa.text("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = :name")
    schema = str(connection.execute(query, {"name": table}).scalar_one())
    version = int(connection.exec_driver_sql("PRAGMA schema_version").scalar_one())
    connection.exec_driver_sql("PRAGMA writable_schema = ON")
    change = sa.text("UPDATE sqlite_master SET sql = :sql WHERE type = 'table' AND name = :name")
    connection.execute(change, {"sql": REFERENCE.sub("", schema), "name": table})
    connection.exec_driver_sql(f"PRAGMA schema_version = {version + 1}")
    connection.exec_driver_sql("PRAGMA writable_schema = OFF")
