"""Table of the state of an installation's components, as each controller process sees them."""

from __future__ import annotations

from sqlalchemy.orm import Mapped, mapped_column

from edgesplit_controller.storage.tables.base import Table


class ComponentStateRow(Table):
    """State of one component as reported by one process. A report that is not refreshed expires."""

    __tablename__ = "parts"

    process: Mapped[int] = mapped_column(primary_key=True)
    """Number of the process (`app.processes`)."""
    name: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    """`good`, `bad`, or `restarting`."""
    text: Mapped[str]
    since: Mapped[float]
    """When it entered this state."""
    at: Mapped[float]
    """When this was last reported."""
