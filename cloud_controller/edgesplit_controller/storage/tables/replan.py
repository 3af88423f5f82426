"""Tables of replanning: policies, and proposals with their outcome."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from edgesplit_controller.storage.tables.base import Json, Table


class PolicyRow(Table):
    """Replanning policy of a model on a group's devices; empty for every model, or every group."""

    __tablename__ = "replan_policies"

    model: Mapped[str] = mapped_column(primary_key=True)
    """The model's name, without a version."""
    group: Mapped[str] = mapped_column(primary_key=True)
    mode: Mapped[str]
    doubt: Mapped[Json]
    """`replan.decide.ConfidencePolicy`."""
    changed: Mapped[float]


class ProposalRow(Table):
    """Another plan table proposed for some devices: its effect, the reason, and the outcome."""

    __tablename__ = "replan_proposals"
    __table_args__ = (Index("replan_proposals_by_release", "release", "device_class"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    model: Mapped[str]
    """`name@version`."""
    release: Mapped[str] = mapped_column(ForeignKey("releases.digest"))
    """The release whose table no longer fits."""
    device_class: Mapped[str]
    group: Mapped[str]
    """Group of the policy under which it was made; empty: every group."""
    devices: Mapped[list[Any]]
    state: Mapped[str]
    """`open`, `applied`, `dismissed`, `withdrawn` (measurements no longer warrant it), `superseded` (the devices run
    another release by now) or `failed`."""
    summary: Mapped[Json]
    """Predictions for people: gain, reason, rows; and why it failed."""
    measured: Mapped[Json]
    """`costs.from_telemetry.Measured`: the measurements it was planned with, and is planned with again when it is
    accepted."""
    created: Mapped[float]
    decided: Mapped[float | None]
    who: Mapped[str] = mapped_column(default="")
    """The decider: an operator, or `replan` for the controller itself."""
    result: Mapped[str] = mapped_column(default="")
    """Digest of the release that was rolled out."""
