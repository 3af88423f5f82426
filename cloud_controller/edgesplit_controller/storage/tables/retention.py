"""Tables of removal and garbage collection: what must outlive a removed model, and what is being stored now."""

from __future__ import annotations

from sqlalchemy.orm import Mapped, mapped_column

from edgesplit_controller.storage.tables.base import Table


class RemovedModelRow(Table):
    """A model of which versions were removed. Versions continue from here, so that `name@version` never names another
    model than before."""

    __tablename__ = "removed_models"

    name: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int]
    """The highest version that was removed."""


class HoldRow(Table):
    """A job in progress that stores blobs before the rows that refer to them: blobs stored since it began are not
    collected."""

    __tablename__ = "holds"

    id: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str]
    """Holder of the lease that the job's process keeps; the hold is void once that lease has expired."""
    since: Mapped[float]
