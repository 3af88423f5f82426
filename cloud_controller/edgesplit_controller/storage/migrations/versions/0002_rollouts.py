"""Rollouts: what was asked, stages, and where each device stands."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the three tables. What was deployed before has no rollout: it is where it is."""
    op.create_table(
        "rollouts",
        sa.Column("id", BIG, sa.ForeignKey("deployments.id"), primary_key=True, autoincrement=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("release", sa.String(), sa.ForeignKey("releases.digest"), nullable=False),
        sa.Column("terms", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("stage", BIG, nullable=False),
        sa.Column("approved", BIG, nullable=False),
        sa.Column("excused", BIG, nullable=False),
        sa.Column("why", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("following", sa.Boolean(), nullable=False),
        sa.Column("superseded_by", BIG, nullable=False),
        sa.Column("pace", sa.JSON(), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("began", sa.Double(), nullable=False),
        sa.Column("ended", sa.Double(), nullable=False),
        sa.Column("changed", sa.Double(), nullable=False),
    )
    op.create_index("rollouts_by_state", "rollouts", ["state"])
    op.create_table(
        "rollout_stages",
        sa.Column("rollout", BIG, sa.ForeignKey("rollouts.id"), primary_key=True, autoincrement=False),
        sa.Column("number", BIG, primary_key=True, autoincrement=False),
        sa.Column("asked", sa.String(), nullable=False),
        sa.Column("began", sa.Double(), nullable=False),
    )
    op.create_table(
        "rollout_devices",
        sa.Column("rollout", BIG, sa.ForeignKey("rollouts.id"), primary_key=True, autoincrement=False),
        sa.Column("device", sa.String(), sa.ForeignKey("devices.name"), primary_key=True),
        sa.Column("stage", BIG, nullable=False),
        sa.Column("position", BIG, nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("previous", sa.String(), nullable=False),
        sa.Column("cause", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("counter", BIG, nullable=False),
        sa.Column("told_at", sa.Double(), nullable=False),
        sa.Column("ran_at", sa.Double(), nullable=False),
        sa.Column("goes_back", sa.Boolean(), nullable=False),
        sa.Column("sent_back", sa.Boolean(), nullable=False),
        sa.Column("counts", sa.Boolean(), nullable=False),
        sa.Column("unjudged", sa.Boolean(), nullable=False),
    )
    op.create_index("rollout_devices_by_state", "rollout_devices", ["rollout", "state"])
    op.create_index("rollout_devices_by_device", "rollout_devices", ["device"])
