"""Tables of rollouts: what was asked, how each stage goes, where each device stands."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from edgesplit_controller.storage.database import Json, Table


class RolloutRow(Table):
    """A deployment on its way (`rollout.states.Rollout`); its number is the deployment's."""

    __tablename__ = "rollouts"
    __table_args__ = (Index("rollouts_by_state", "state"),)

    id: Mapped[int] = mapped_column(ForeignKey("deployments.id"), primary_key=True, autoincrement=False)
    model: Mapped[str]
    """Its name without a version: a newer rollout of it counts for the devices that both name."""
    release: Mapped[str] = mapped_column(ForeignKey("releases.digest"))
    terms: Mapped[Json]
    state: Mapped[str]
    stage: Mapped[int]
    """The one that was begun last, from 0; -1: none was."""
    approved: Mapped[int]
    excused: Mapped[int]
    why: Mapped[str]
    outcome: Mapped[str]
    following: Mapped[bool]
    superseded_by: Mapped[int]
    """The newest rollout that took devices over from it; 0: none did."""
    pace: Mapped[Json]
    who: Mapped[str]
    created: Mapped[float]
    began: Mapped[float]
    ended: Mapped[float]
    changed: Mapped[float]
    """When anything of it was written last, its devices included."""


class RolloutStageRow(Table):
    """A stage of a rollout."""

    __tablename__ = "rollout_stages"

    rollout: Mapped[int] = mapped_column(ForeignKey("rollouts.id"), primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """From 0."""
    asked: Mapped[str]
    """As in `10%`."""
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
    told_at: Mapped[float]
    ran_at: Mapped[float]
    goes_back: Mapped[bool]
    sent_back: Mapped[bool]
    counts: Mapped[bool]
    unjudged: Mapped[bool]
