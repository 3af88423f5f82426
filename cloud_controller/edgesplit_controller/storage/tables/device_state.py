"""Tables of what devices said: the newest of each, how releases do, what is wrong, and telemetry rolled up."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, LargeBinary
from sqlalchemy.orm import Mapped, mapped_column

from edgesplit_controller.storage.database import Json, Table


class HeardRow(Table):
    """What was heard in a device's newest session (`truth.Heard`), and when."""

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
    deaf_since: Mapped[float | None]
    """Since when it is in a session and does not act upon the newest statement; None: it does."""
    clock_off_s: Mapped[float | None]
    agent: Mapped[str] = mapped_column(default="")
    """Version."""
    emulated: Mapped[bool] = mapped_column(default=False)
    simulated: Mapped[bool] = mapped_column(default=False)
    late: Mapped[int] = mapped_column(default=0)
    """Messages that came late and were stored, in all."""
    refused: Mapped[int] = mapped_column(default=0)
    """Late messages that were not stored: too large, or more than a device may have, in all."""


class RunningRow(Table):
    """One model on one device, as it told it last."""

    __tablename__ = "running"
    __table_args__ = (Index("running_by_model", "model", "release"),)

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    release: Mapped[str] = mapped_column(default="")
    wanted: Mapped[str] = mapped_column(default="")
    state: Mapped[str] = mapped_column(default="")
    cause: Mapped[str] = mapped_column(default="")
    """Of a failure (`causes.cause`): the same for every device that fails alike."""
    detail: Mapped[str] = mapped_column(default="")
    cut: Mapped[str] = mapped_column(default="")
    """Row of the plan in use."""
    health: Mapped[Json | None]
    """`measured.ReleaseHealth` of the release that it names; what gates judge."""
    health_at: Mapped[float | None]


class ConditionRow(Table):
    """Something that is wrong with a device by its own word, since when."""

    __tablename__ = "conditions"
    __table_args__ = (Index("conditions_by_kind", "kind"),)

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    source: Mapped[str]
    """`telemetry` or `report`: the next message of that kind says whether it is over."""
    since: Mapped[float]
    text: Mapped[str]


class RolledRow(Table):
    """What telemetry said of one model on one device in one minute, hour, day or month, added up."""

    __tablename__ = "telemetry_rolled"
    __table_args__ = (Index("telemetry_rolled_by_age", "span_s", "begins"),)

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    """Empty: the device itself."""
    span_s: Mapped[int] = mapped_column(primary_key=True)
    begins: Mapped[float] = mapped_column(primary_key=True)
    content: Mapped[Json]


class ModelRolledRow(Table):
    """The same of one model on all devices of a group, as it was when they measured."""

    __tablename__ = "models_rolled"
    __table_args__ = (Index("models_rolled_by_age", "span_s", "begins"),)

    model: Mapped[str] = mapped_column(primary_key=True)
    group: Mapped[str] = mapped_column(primary_key=True)
    span_s: Mapped[int] = mapped_column(primary_key=True)
    begins: Mapped[float] = mapped_column(primary_key=True)
    content: Mapped[Json]


class MarkRow(Table):
    """How far something that is done over and over has come."""

    __tablename__ = "marks"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int]


class BundleRow(Table):
    """A device's log bundle that was asked for; its pieces lie beside it until it is whole."""

    __tablename__ = "bundles"
    __table_args__ = (Index("bundles_of_device", "device", "asked"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    device: Mapped[str] = mapped_column(ForeignKey("devices.name"))
    who: Mapped[str]
    asked: Mapped[float]
    state: Mapped[str]
    """`asked`, `coming`, `here`, `refused`, `spoilt`."""
    why: Mapped[str] = mapped_column(default="")
    total: Mapped[int] = mapped_column(default=0)
    received: Mapped[int] = mapped_column(default=0)
    sha256: Mapped[str] = mapped_column(default="")
    content: Mapped[bytes | None] = mapped_column(LargeBinary, default=None)
    """Compressed, as it came; None until it is whole."""


class BundlePieceRow(Table):
    """A piece of a bundle that is not whole yet."""

    __tablename__ = "bundle_pieces"

    bundle: Mapped[str] = mapped_column(ForeignKey("bundles.id"), primary_key=True)
    offset: Mapped[int] = mapped_column(primary_key=True)
    data: Mapped[bytes]
