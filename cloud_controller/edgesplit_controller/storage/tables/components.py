"""How the parts of an installation are, as each controller process sees them."""

from __future__ import annotations

from sqlalchemy.orm import Mapped, mapped_column

from edgesplit_controller.storage.database import Table


class PartRow(Table):
    """One part, by the word of one process; what was not said again for a while is no longer known."""

    __tablename__ = "parts"

    process: Mapped[int] = mapped_column(primary_key=True)
    """Its number (`processes.Place`)."""
    name: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    """`good`, `bad`, or `restarting`."""
    text: Mapped[str]
    since: Mapped[float]
    """That it is in this state."""
    at: Mapped[float]
    """When that was said."""
