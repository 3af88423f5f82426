"""Plans that grow old: policies, and what was proposed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0006"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the two tables."""
    op.create_table(
        "replan_policies",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("group", sa.String(), nullable=False),
        sa.Column("mode", sa.String(), nullable=False),
        sa.Column("doubt", sa.JSON(), nullable=False),
        sa.Column("changed", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("model", "group"),
    )
    op.create_table(
        "replan_proposals",
        sa.Column("id", BIG, nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("release", sa.String(), nullable=False),
        sa.Column("device_class", sa.String(), nullable=False),
        sa.Column("group", sa.String(), nullable=False),
        sa.Column("devices", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("told", sa.JSON(), nullable=False),
        sa.Column("measured", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("decided", sa.Double(), nullable=True),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("result", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["release"], ["releases.digest"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("replan_proposals_by_release", "replan_proposals", ["release", "device_class"])
