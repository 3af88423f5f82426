"""Versions that stand in for another have a lineage; the sets of samples by which they were compared are kept."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Versions from before have no lineage."""
    op.add_column("models", sa.Column("lineage", sa.JSON(), nullable=True))
    op.create_table(
        "sample_sets",
        sa.Column("model_id", BIG, sa.ForeignKey("models.id"), primary_key=True),
        sa.Column("sha256", sa.String(), primary_key=True),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
    )
