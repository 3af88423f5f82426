"""What is kept about plans that grow old: what the controller may do by itself, and what it proposed or did."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from edgesplit_controller.storage.database import Json, Table


class PolicyRow(Table):
    """What may become of a model's plans on a group's devices; empty for every model, for every group."""

    __tablename__ = "replan_policies"

    model: Mapped[str] = mapped_column(primary_key=True)
    """Its name, without a version."""
    group: Mapped[str] = mapped_column(primary_key=True)
    mode: Mapped[str]
    doubt: Mapped[Json]
    """`verdict.Doubt`."""
    changed: Mapped[float]


class ProposalRow(Table):
    """Another table for some devices: what it would bring, why, and what became of it."""

    __tablename__ = "replan_proposals"
    __table_args__ = (Index("replan_proposals_by_release", "release", "device_class"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    model: Mapped[str]
    """`name@version`."""
    release: Mapped[str] = mapped_column(ForeignKey("releases.digest"))
    """Whose table grew old."""
    device_class: Mapped[str]
    group: Mapped[str]
    """Of the policy under which it was made; empty: of every group."""
    devices: Mapped[list[Any]]
    state: Mapped[str]
    """`open`, `applied`, `dismissed`, `withdrawn` (what was measured asks for it no more), `superseded` (the devices
    have another release by now) or `failed`."""
    told: Mapped[Json]
    """What it predicts, for people: gain, reason, rows; and why it failed."""
    measured: Mapped[Json]
    """`measured_costs.Measured`: what it was planned with, and is planned with again when it is accepted."""
    created: Mapped[float]
    decided: Mapped[float | None]
    who: Mapped[str] = mapped_column(default="")
    """Who decided: an operator, or `replan` for the controller itself."""
    result: Mapped[str] = mapped_column(default="")
    """The release that went out."""
