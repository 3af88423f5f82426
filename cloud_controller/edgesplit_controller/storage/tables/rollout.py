"""Tables of rollouts: their terms and state, their stages, and the state of each device."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from edgesplit_controller.storage.tables.base import Json, Table


class RolloutRow(Table):
    """A rollout (`rollout.states.Rollout`); its id is that of its deployment."""

    __tablename__ = "rollouts"
    __table_args__ = (Index("rollouts_by_state", "state"),)

    id: Mapped[int] = mapped_column(ForeignKey("deployments.id"), primary_key=True, autoincrement=False)
    model: Mapped[str]
    """The model's name without a version. A newer rollout of the model supersedes this one on devices that both
    contain."""
    release: Mapped[str]
    """As in its deployment."""
    terms: Mapped[Json]
    state: Mapped[str]
    stage: Mapped[int]
    """The stage that was begun last, counted from 0; -1: none was."""
    approved: Mapped[int]
    excused: Mapped[int]
    reason: Mapped[str]
    outcome: Mapped[str]
    following: Mapped[bool]
    superseded_by: Mapped[int]
    """The newest rollout that took devices over from this one; 0: none did."""
    rate_state: Mapped[Json]
    who: Mapped[str]
    created: Mapped[float]
    began: Mapped[float]
    ended: Mapped[float]
    changed: Mapped[float]
    """When the rollout or one of its devices was last written."""


class RolloutStageRow(Table):
    """One stage of a rollout."""

    __tablename__ = "rollout_stages"

    rollout: Mapped[int] = mapped_column(ForeignKey("rollouts.id"), primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Counted from 0."""
    size: Mapped[str]
    """The stage's size as the operator wrote it, such as `10%`."""
    began: Mapped[float]


class RolloutDeviceRow(Table):
    """A device of a rollout (`rollout.states.Member`)."""

    __tablename__ = "rollout_devices"
    __table_args__ = (
        Index("rollout_devices_by_state", "rollout", "state"),
        Index("rollout_devices_by_device", "device"),
    )

    rollout: Mapped[int] = mapped_column(ForeignKey("rollouts.id"), primary_key=True, autoincrement=False)
    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    stage: Mapped[int]
    position: Mapped[int]
    state: Mapped[str]
    previous: Mapped[str]
    cause: Mapped[str]
    kind: Mapped[str]
    counter: Mapped[int]
    assigned_at: Mapped[float]
    ran_at: Mapped[float]
    rolls_back: Mapped[bool]
    sent_back: Mapped[bool]
    counts: Mapped[bool]
    unjudged: Mapped[bool]
