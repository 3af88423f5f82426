"""Who does what only one controller process may do."""

from __future__ import annotations

from sqlalchemy.orm import Mapped, mapped_column

from edgesplit_controller.storage.database import Table


class LeaseRow(Table):
    """A right that one process has at a time, until it lets go or was silent for too long."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str]
    """Of one process in one life; empty: nobody."""
    token: Mapped[int]
    """Grows each time that the right changes hands: what an older holder still does is known by it."""
    expires: Mapped[float]
    """By the database's clock."""
