"""Leases, what of a device's statements was published, and which devices come from a backup."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0003"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Every statement counts as unpublished: it is published once more."""
    op.create_table(
        "leases",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("token", BIG, nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.add_column("devices", sa.Column("restored", sa.Double(), nullable=True))
    op.add_column("devices", sa.Column("stated", BIG, nullable=False, server_default="0"))
