"""Every table as it was before there were migrations. A database from before then is adopted: what is there stays."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""SQLite's integers have 64 bits anyway, and its primary keys count up only under this name."""


def upgrade() -> None:
    """Make what is not there yet."""
    op.create_table(
        "certificates",
        sa.Column("serial", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("public_key_sha256", sa.String(), nullable=False),
        sa.Column("issued", sa.Double(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.Column("revoked", sa.Double(), nullable=True),
        sa.Column("reason", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("serial"),
        if_not_exists=True,
    )
    op.create_index("certificates_of_device", "certificates", ["device"], if_not_exists=True)
    op.create_table(
        "claims",
        sa.Column("token_sha256", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("device_class", sa.String(), nullable=False),
        sa.Column("group", sa.String(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("link", sa.String(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.Column("used", sa.Double(), nullable=True),
        sa.Column("public_key_sha256", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("token_sha256"),
        if_not_exists=True,
    )
    op.create_table(
        "devices",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("device_class", sa.String(), nullable=False),
        sa.Column("group", sa.String(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("link", sa.String(), nullable=False),
        sa.Column("certificate_serial", sa.String(), nullable=False),
        sa.Column("public_key_sha256", sa.String(), nullable=False),
        sa.Column("encryption_key", sa.LargeBinary(), nullable=False),
        sa.Column("enrolled", sa.Double(), nullable=False),
        sa.Column("revoked", sa.Double(), nullable=True),
        sa.Column("counter", BIG, nullable=False),
        sa.Column("statement", sa.LargeBinary(), nullable=True),
        sa.Column("statement_expires", sa.Double(), nullable=False),
        sa.Column("session", BIG, nullable=False),
        sa.Column("alive", sa.Boolean(), nullable=False),
        sa.Column("last_seen", sa.Double(), nullable=True),
        sa.Column("birth", sa.JSON(), nullable=True),
        sa.Column("reported", sa.JSON(), nullable=True),
        sa.Column("telemetry", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("name"),
        if_not_exists=True,
    )
    op.create_table(
        "events",
        sa.Column("id", BIG, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("what", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        if_not_exists=True,
    )
    op.create_table(
        "gateways",
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("device"),
        if_not_exists=True,
    )
    op.create_table(
        "models",
        sa.Column("id", BIG, nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("version", BIG, nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("optimised_sha256", sa.String(), nullable=False),
        sa.Column("bytes", BIG, nullable=False),
        sa.Column("input_text", sa.String(), nullable=False),
        sa.Column("bindings", sa.JSON(), nullable=False),
        sa.Column("shown", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name", "version"),
        if_not_exists=True,
    )
    op.create_table(
        "telemetry",
        sa.Column("id", BIG, nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        if_not_exists=True,
    )
    op.create_index("telemetry_of_device", "telemetry", ["device", "id"], if_not_exists=True)
    op.create_table(
        "behind",
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("gateway", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["device"],
            ["devices.name"],
        ),
        sa.ForeignKeyConstraint(
            ["gateway"],
            ["gateways.device"],
        ),
        sa.PrimaryKeyConstraint("device"),
        if_not_exists=True,
    )
    op.create_table(
        "floods",
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("times", BIG, nullable=False),
        sa.Column("dropped", BIG, nullable=False),
        sa.Column("held_until", sa.Double(), nullable=False),
        sa.Column("listed", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["device"],
            ["devices.name"],
        ),
        sa.PrimaryKeyConstraint("device"),
        if_not_exists=True,
    )
    op.create_table(
        "measurements",
        sa.Column("id", BIG, nullable=False),
        sa.Column("model_id", BIG, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("place", sa.String(), nullable=False),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.Column("taken", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"],
            ["models.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("model_id", "kind", "place"),
        if_not_exists=True,
    )
    op.create_table(
        "releases",
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("model_id", BIG, nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"],
            ["models.id"],
        ),
        sa.PrimaryKeyConstraint("digest"),
        if_not_exists=True,
    )
    op.create_table(
        "samples",
        sa.Column("id", BIG, nullable=False),
        sa.Column("model_id", BIG, nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"],
            ["models.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("model_id", "sha256"),
        if_not_exists=True,
    )
    op.create_table(
        "starts",
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("marks", sa.JSON(), nullable=False),
        sa.Column("copied", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["device"],
            ["devices.name"],
        ),
        sa.PrimaryKeyConstraint("device"),
        if_not_exists=True,
    )
    op.create_table(
        "deployments",
        sa.Column("id", BIG, nullable=False),
        sa.Column("release", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("targets", sa.JSON(), nullable=False),
        sa.Column("devices", sa.JSON(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["release"],
            ["releases.digest"],
        ),
        sa.PrimaryKeyConstraint("id"),
        if_not_exists=True,
    )
    op.create_table(
        "desired",
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("release", sa.String(), nullable=False),
        sa.Column("deployment", BIG, nullable=False),
        sa.ForeignKeyConstraint(
            ["deployment"],
            ["deployments.id"],
        ),
        sa.ForeignKeyConstraint(
            ["device"],
            ["devices.name"],
        ),
        sa.ForeignKeyConstraint(
            ["release"],
            ["releases.digest"],
        ),
        sa.PrimaryKeyConstraint("device", "model"),
        if_not_exists=True,
    )
