"""Devices that flood an offload server."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the table of devices that flood an offload server."""
    op.create_table(
        "offload_floods",
        sa.Column("device", sa.String(), sa.ForeignKey("devices.name"), primary_key=True),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("refused", BIG, nullable=False),
        sa.Column("reasons", sa.String(), nullable=False),
    )
