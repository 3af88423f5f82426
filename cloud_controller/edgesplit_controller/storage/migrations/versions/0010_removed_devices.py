"""Devices can be removed; of each one the counter of its statements stays."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the table of removed devices."""
    op.create_table(
        "removed_devices",
        sa.Column("device", sa.String(), primary_key=True),
        sa.Column("counter", BIG, nullable=False),
        sa.Column("removed", sa.Double(), nullable=False),
        sa.Column("cleared", sa.Boolean(), nullable=False),
    )
