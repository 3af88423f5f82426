"""When a device's row was last written: what pages that are open go by."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0005"


def upgrade() -> None:
    """What was there has not changed for anybody who looks from now on."""
    op.add_column("devices", sa.Column("changed", sa.Double(), nullable=False, server_default="0"))
    op.create_index("ix_devices_changed", "devices", ["changed"])
