"""What devices counted of answers that a cascade or still frames may have changed, by the release that they run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Nothing was counted before."""
    op.add_column("running", sa.Column("audits", sa.JSON(), nullable=True))
