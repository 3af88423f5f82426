"""Table of leases: rights that one controller process holds at a time."""

from __future__ import annotations

from sqlalchemy.orm import Mapped, mapped_column

from edgesplit_controller.storage.tables.base import Table


class LeaseRow(Table):
    """A right that one process holds at a time, until it releases it or does not renew it in time."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str]
    """Unique id of one run of a process; empty: the lease is free."""
    token: Mapped[int]
    """Fencing token: grows each time the lease changes hands, so that a former holder is recognised."""
    expires: Mapped[float]
    """By the database's clock."""
