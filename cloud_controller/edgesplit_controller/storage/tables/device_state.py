"""Tables of reported device state: sequence state, running models, conditions, telemetry roll-ups, and log bundles."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, LargeBinary
from sqlalchemy.orm import Mapped, mapped_column

from edgesplit_controller.storage.tables.base import Json, Table


class DeviceSessionRow(Table):
    """State of a device's newest session (`fleet.device_state.SequenceState`), and when its messages arrived."""

    __tablename__ = "heard"

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    session: Mapped[int] = mapped_column(default=0)
    sequence: Mapped[int] = mapped_column(default=-1)
    report: Mapped[int] = mapped_column(default=0)
    missing: Mapped[int] = mapped_column(default=0)
    again: Mapped[int] = mapped_column(default=0)
    earlier: Mapped[int] = mapped_column(default=0)
    older: Mapped[int] = mapped_column(default=0)
    born_at: Mapped[float | None]
    died_at: Mapped[float | None]
    reported_at: Mapped[float | None]
    telemetry_at: Mapped[float | None]
    unresponsive_since: Mapped[float | None]
    """Since when it has been online without acting on its newest statement; None: it acts on it."""
    clock_off_s: Mapped[float | None]
    agent: Mapped[str] = mapped_column(default="")
    """Version of the agent."""
    emulated: Mapped[bool] = mapped_column(default=False)
    simulated: Mapped[bool] = mapped_column(default=False)
    from_backlog: Mapped[int] = mapped_column(default=0)
    """Number of late messages that were stored."""
    refused: Mapped[int] = mapped_column(default=0)
    """Number of late messages that were not stored: too large, or beyond the device's quota."""


class RunningRow(Table):
    """One model on one device, as last reported."""

    __tablename__ = "running"
    __table_args__ = (Index("running_by_model", "model", "release"),)

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    release: Mapped[str] = mapped_column(default="")
    desired_release: Mapped[str] = mapped_column(default="")
    state: Mapped[str] = mapped_column(default="")
    cause: Mapped[str] = mapped_column(default="")
    """Cause of a failure (`fleet.conditions.cause`), equal for all devices that fail for one reason."""
    detail: Mapped[str] = mapped_column(default="")
    cut: Mapped[str] = mapped_column(default="")
    """Row of the plan in use."""
    health: Mapped[Json | None]
    """`telemetry.ReleaseHealth` of the release it names, by which gates judge."""
    health_at: Mapped[float | None]
    audits: Mapped[Json | None]
    """`fleet.audits.AnswerAudits` by release, of the releases that it runs or shall run."""


class ConditionRow(Table):
    """A problem that a device reports of itself, and since when."""

    __tablename__ = "conditions"
    __table_args__ = (Index("conditions_by_kind", "kind"),)

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    source: Mapped[str]
    """`telemetry` or `report`: the next message of that kind decides whether it has ended."""
    since: Mapped[float]
    text: Mapped[str]


class DeviceBucketRow(Table):
    """Telemetry of one model on one device, summed over one minute, hour, day or month."""

    __tablename__ = "telemetry_rolled"
    __table_args__ = (Index("telemetry_rolled_by_age", "span_s", "begins"),)

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    """Empty for the device itself."""
    span_s: Mapped[int] = mapped_column(primary_key=True)
    begins: Mapped[float] = mapped_column(primary_key=True)
    content: Mapped[Json]


class ModelBucketRow(Table):
    """Telemetry of one model on all devices of a group (as grouped when they measured), summed over one minute, hour,
    day or month."""

    __tablename__ = "models_rolled"
    __table_args__ = (Index("models_rolled_by_age", "span_s", "begins"),)

    model: Mapped[str] = mapped_column(primary_key=True)
    group: Mapped[str] = mapped_column(primary_key=True)
    span_s: Mapped[int] = mapped_column(primary_key=True)
    begins: Mapped[float] = mapped_column(primary_key=True)
    content: Mapped[Json]


class CursorRow(Table):
    """Progress of a repeated job through a sequence of rows."""

    __tablename__ = "marks"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int]


class LogBundleRow(Table):
    """A log bundle requested from a device; its pieces are stored beside it until it is complete."""

    __tablename__ = "bundles"
    __table_args__ = (Index("bundles_of_device", "device", "requested"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    device: Mapped[str] = mapped_column(ForeignKey("devices.name"))
    who: Mapped[str]
    requested: Mapped[float]
    state: Mapped[str]
    """`requested`, `receiving`, `complete`, `refused`, `corrupt`."""
    reason: Mapped[str] = mapped_column(default="")
    total: Mapped[int] = mapped_column(default=0)
    received: Mapped[int] = mapped_column(default=0)
    sha256: Mapped[str] = mapped_column(default="")
    content: Mapped[bytes | None] = mapped_column(LargeBinary, default=None)
    """Compressed, as received; None until it is complete."""


class LogPieceRow(Table):
    """A piece of a log bundle that is not complete yet."""

    __tablename__ = "bundle_pieces"

    bundle: Mapped[str] = mapped_column(ForeignKey("bundles.id"), primary_key=True)
    offset: Mapped[int] = mapped_column(primary_key=True)
    data: Mapped[bytes]
