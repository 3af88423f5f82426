"""What devices said: each telemetry message once and when it was measured, what is wrong, roll-ups, bundles."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0007"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """New tables; what was stored of telemetry keeps its row's number for a sequence."""
    _telemetry()
    op.create_table(
        "heard",
        sa.Column("device", sa.String(), sa.ForeignKey("devices.name"), primary_key=True),
        *(sa.Column(name, BIG, nullable=False) for name in ("session", "sequence", "report", "missing", "again")),
        *(sa.Column(name, BIG, nullable=False) for name in ("earlier", "older")),
        *(sa.Column(name, sa.Double(), nullable=True) for name in ("born_at", "died_at", "reported_at")),
        *(sa.Column(name, sa.Double(), nullable=True) for name in ("telemetry_at", "deaf_since", "clock_off_s")),
        sa.Column("agent", sa.String(), nullable=False),
        sa.Column("emulated", sa.Boolean(), nullable=False),
        sa.Column("simulated", sa.Boolean(), nullable=False),
        sa.Column("late", BIG, nullable=False),
        sa.Column("refused", BIG, nullable=False),
    )
    op.create_table(
        "running",
        sa.Column("device", sa.String(), sa.ForeignKey("devices.name"), primary_key=True),
        sa.Column("model", sa.String(), primary_key=True),
        *(sa.Column(name, sa.String(), nullable=False) for name in ("release", "wanted", "state", "cause", "detail")),
        sa.Column("cut", sa.String(), nullable=False),
        sa.Column("health", sa.JSON(), nullable=True),
        sa.Column("health_at", sa.Double(), nullable=True),
    )
    op.create_index("running_by_model", "running", ["model", "release"])
    op.create_table(
        "conditions",
        sa.Column("device", sa.String(), sa.ForeignKey("devices.name"), primary_key=True),
        sa.Column("kind", sa.String(), primary_key=True),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
    )
    op.create_index("conditions_by_kind", "conditions", ["kind"])
    op.create_table(
        "telemetry_rolled",
        sa.Column("device", sa.String(), sa.ForeignKey("devices.name"), primary_key=True),
        sa.Column("model", sa.String(), primary_key=True),
        sa.Column("span_s", BIG, primary_key=True),
        sa.Column("begins", sa.Double(), primary_key=True),
        sa.Column("content", sa.JSON(), nullable=False),
    )
    op.create_index("telemetry_rolled_by_age", "telemetry_rolled", ["span_s", "begins"])
    op.create_table(
        "marks",
        sa.Column("name", sa.String(), primary_key=True),
        sa.Column("value", BIG, nullable=False),
    )
    _bundles()


def _telemetry() -> None:
    with op.batch_alter_table("telemetry") as table:
        table.add_column(sa.Column("stored", sa.Double(), nullable=False, server_default="0"))
        table.add_column(sa.Column("session", BIG, nullable=False, server_default="0"))
        table.add_column(sa.Column("sequence", BIG, nullable=False, server_default="0"))
        table.add_column(sa.Column("late", sa.Boolean(), nullable=False, server_default=sa.false()))
        table.add_column(sa.Column("dated", sa.String(), nullable=False, server_default="now"))
        table.drop_index("telemetry_of_device")
    op.execute("UPDATE telemetry SET sequence = id, stored = at")
    with op.batch_alter_table("telemetry") as table:
        for name in ("stored", "session", "sequence", "late", "dated"):
            table.alter_column(name, server_default=None)
    op.create_index("telemetry_of_device", "telemetry", ["device", "at"])
    op.create_index("telemetry_once", "telemetry", ["device", "session", "sequence"], unique=True)


def _bundles() -> None:
    op.create_table(
        "bundles",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("device", sa.String(), sa.ForeignKey("devices.name"), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("asked", sa.Double(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("why", sa.String(), nullable=False),
        sa.Column("total", BIG, nullable=False),
        sa.Column("received", BIG, nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=True),
    )
    op.create_index("bundles_of_device", "bundles", ["device", "asked"])
    op.create_table(
        "bundle_pieces",
        sa.Column("bundle", sa.String(), sa.ForeignKey("bundles.id"), primary_key=True),
        sa.Column("offset", BIG, primary_key=True),
        sa.Column("data", sa.LargeBinary(), nullable=False),
    )
