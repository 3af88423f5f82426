"""The controller's tables, and transactions over them. What a table holds is said at its class; no SQL beyond it.

SQLite (WAL, every commit synced) by default, PostgreSQL by URL; nothing here is one's own (`engines` opens them).
Times are Unix seconds. A write transaction takes the write lock when it begins, so that what it read is still true
when it commits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Engine,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    UniqueConstraint,
    select,
)
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, defer, mapped_column, sessionmaker
from sqlalchemy.orm.util import identity_key

from edgesplit.errors import UsageError
from edgesplit_controller.caller import OWNER, who_asks
from edgesplit_controller.storage.engines import POSTGRESQL, in_our_words, open_engine, shown
from edgesplit_controller.storage.schema import bring_up_to_date

Json = dict[str, Any]


class Table(DeclarativeBase):
    """All our tables. A change of one needs a step in `migrations/versions` besides (docs/operations.md)."""

    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own idiom
        Json: JSON,
        list[Any]: JSON,
        bytes: LargeBinary,
        # A counter follows the Unix time and a model may have 16 GB: 32 bits are too few.
        int: BigInteger().with_variant(Integer, "sqlite"),
    }


class Model(Table):
    """A model as it was pushed: `name@version`, immutable."""

    __tablename__ = "models"
    __table_args__ = (UniqueConstraint("name", "version"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    version: Mapped[int]
    sha256: Mapped[str]
    """Blob: the file as it came."""
    optimised_sha256: Mapped[str]
    """Blob: what is cut."""
    bytes: Mapped[int]
    input_text: Mapped[str]
    """The input spec as it was given; empty for none."""
    bindings: Mapped[Json]
    """Sizes given to the dimensions that the file leaves open."""
    shown: Mapped[Json]
    """Inputs, outputs and layers, for people."""
    created: Mapped[float]

    @property
    def ref(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"


class Sample(Table):
    """An input to measure and to test with: a frame, or named tensors (.npz)."""

    __tablename__ = "samples"
    __table_args__ = (UniqueConstraint("model_id", "sha256"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    sha256: Mapped[str]
    kind: Mapped[str]
    """`frame` or `tensors`."""


class Measurement(Table):
    """What was measured of one model: per-layer seconds somewhere, or what its tensors cost to send."""

    __tablename__ = "measurements"
    __table_args__ = (UniqueConstraint("model_id", "kind", "place"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    kind: Mapped[str]
    """`layers`, `tensors` or `codecs`; or `labels`, which operators give."""
    place: Mapped[str]
    """Tier or device on which it was measured."""
    content: Mapped[Json]
    taken: Mapped[float]


class ClaimRow(Table):
    """A one-time right to enrol as one device. The token itself is nowhere."""

    __tablename__ = "claims"

    token_sha256: Mapped[str] = mapped_column(primary_key=True)
    device: Mapped[str]
    device_class: Mapped[str]
    group: Mapped[str]
    labels: Mapped[Json]
    link: Mapped[str]
    expires: Mapped[float]
    used: Mapped[float | None]
    public_key_sha256: Mapped[str | None]
    """Of the key that used it: the same key may ask again while the claim lasts, if the answer was lost."""


class Device(Table):
    """A device that enrolled once, what it was told and what it said last."""

    __tablename__ = "devices"

    name: Mapped[str] = mapped_column(primary_key=True)
    device_class: Mapped[str]
    group: Mapped[str]
    labels: Mapped[Json]
    link: Mapped[str]
    certificate_serial: Mapped[str]
    public_key_sha256: Mapped[str]
    encryption_key: Mapped[bytes] = mapped_column(default=b"")
    """Its X25519 key, raw: what content keys are wrapped to. Empty: it enrolled without one."""
    enrolled: Mapped[float]
    revoked: Mapped[float | None]
    counter: Mapped[int] = mapped_column(default=0)
    """Of the newest statement; never falls, not even when the device is claimed again."""
    statement: Mapped[bytes | None]
    """Encoded `release.Signed`: what is retained on its `desired` topic."""
    statement_expires: Mapped[float] = mapped_column(default=0.0)
    stated: Mapped[int] = mapped_column(default=0, server_default="0")
    """Counter of the statement that the broker has acknowledged; -1 where it was told to forget a revoked device."""
    restored: Mapped[float | None]
    """When this row was restored from a backup. Until the device has said what it was told last it may have been told
    something newer, and only an operator replaces that."""
    session: Mapped[int] = mapped_column(default=0)
    alive: Mapped[bool] = mapped_column(default=False)
    """The newest session was born and has not died."""
    last_seen: Mapped[float | None]
    """When something that the broker cannot repeat by itself came from it."""
    birth: Mapped[Json | None]
    reported: Mapped[Json | None]
    telemetry: Mapped[Json | None]
    changed: Mapped[float] = mapped_column(default=time.time, onupdate=time.time, server_default="0", index=True)
    """When the row was last written, by the clock of whoever wrote it: what pages that are open go by."""


class CertificateRow(Table):
    """A certificate that was issued to a device. None is ever forgotten."""

    __tablename__ = "certificates"
    __table_args__ = (Index("certificates_of_device", "device"),)

    serial: Mapped[str] = mapped_column(primary_key=True)
    """Decimal."""
    device: Mapped[str]
    public_key_sha256: Mapped[str]
    issued: Mapped[float]
    expires: Mapped[float]
    revoked: Mapped[float | None]
    reason: Mapped[str] = mapped_column(default="")
    """Why it was revoked: `operator`, `replaced` (by other hardware), `renewed` (its successor was seen)."""


class Starts(Table):
    """The newest starts of one device's agent, by their marks: one that comes back after another is a second card."""

    __tablename__ = "starts"

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    marks: Mapped[list[Any]]
    """`Birth.start`, newest last."""
    copied: Mapped[float | None]
    """When two agents were last seen to share the identity."""


class Flood(Table):
    """When a device last sent more than any correct agent does. While it is held off, its certificates are listed as
    revoked, and they are good again afterwards."""

    __tablename__ = "floods"

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    at: Mapped[float]
    times: Mapped[int]
    """In a row, each within a day of the one before: the hold grows with them."""
    dropped: Mapped[int]
    """Messages that were not taken in, since the controller started."""
    held_until: Mapped[float]
    listed: Mapped[bool]
    """The revocation list that was published last has it."""


class Release(Table):
    """A signed release; its manifest is a blob whose SHA-256 is the digest."""

    __tablename__ = "releases"

    digest: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    created: Mapped[float]
    options: Mapped[Json]


class Deployment(Table):
    """A release on its way to chosen devices."""

    __tablename__ = "deployments"

    id: Mapped[int] = mapped_column(primary_key=True)
    release: Mapped[str] = mapped_column(ForeignKey("releases.digest"))
    model: Mapped[str]
    """`name@version`."""
    targets: Mapped[list[Any]]
    """As the operator gave them."""
    devices: Mapped[list[Any]]
    """Whom they meant then."""
    options: Mapped[Json]
    created: Mapped[float]


class Desired(Table):
    """The release that one device shall serve one model from."""

    __tablename__ = "desired"

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    """The model's name without its version."""
    release: Mapped[str] = mapped_column(ForeignKey("releases.digest"))
    deployment: Mapped[int] = mapped_column(ForeignKey("deployments.id"))


class GatewayRow(Table):
    """A device, enrolled or still to come, that finishes inferences for others."""

    __tablename__ = "gateways"

    device: Mapped[str] = mapped_column(primary_key=True)
    address: Mapped[str]
    """HOST:PORT, as devices reach it."""


class Behind(Table):
    """A device that offloads through a gateway, or once did."""

    __tablename__ = "behind"

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    gateway: Mapped[str | None] = mapped_column(ForeignKey("gateways.device"))
    """None: to the cloud again, which it may have to be told yet."""


class TelemetryRow(Table):
    """One telemetry message, once; the newest few thousand of each device are kept."""

    __tablename__ = "telemetry"
    __table_args__ = (
        Index("telemetry_of_device", "device", "at"),
        Index("telemetry_once", "device", "session", "sequence", unique=True),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    device: Mapped[str]
    at: Mapped[float]
    """When it was measured, as far as that is known (`dated`)."""
    stored: Mapped[float]
    session: Mapped[int]
    sequence: Mapped[int]
    late: Mapped[bool] = mapped_column(default=False)
    """It could not be sent when it was measured."""
    dated: Mapped[str] = mapped_column(default="now")
    """`truth.Dated`."""
    content: Mapped[Json]


class Event(Table):
    """Who did what to what, and when. Only ever added to."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    who: Mapped[str]
    what: Mapped[str]
    subject: Mapped[str]
    detail: Mapped[Json]


_UNREAD = tuple(defer(column) for column in (Device.birth, Device.reported, Device.telemetry, Device.labels))


class Database:
    """Transactions: `with database.write() as session`, `with database.read() as session`.

    A trouble of the database is told as `Unavailable` or `Busy`, and then nothing was changed.
    """

    def __init__(self, url: str) -> None:
        """`sqlite:///FILE`, or `postgresql://USER:PASSWORD@HOST/NAME`."""
        self._engine = open_engine(url)
        try:
            bring_up_to_date(self._engine)
        except SQLAlchemyError as error:
            why = str(error.__cause__ or error).strip().partition("\n")[0]
            raise UsageError(f"cannot open the database {shown(self._engine)}: {why}") from error
        isolation = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True} if self.shared else {}
        self._writers = self._sessions(edgesplit="write")
        self._hearers = self._sessions(edgesplit="hear")
        self._readers = self._sessions(edgesplit="read", **isolation)

    @property
    def engine(self) -> Engine:
        """For who watches it."""
        return self._engine

    @property
    def shared(self) -> bool:
        """Can controllers on other machines use it too?"""
        return self._engine.dialect.name == POSTGRESQL

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that commits when the block ends well, and never happened otherwise.

        Writers come one at a time, so that what one has read is still true when it commits. Of a device that is true
        besides what it says of itself (`hear`), unless the writer holds it (`held`).
        """
        with self._translated(), self._writers.begin() as session:
            yield session

    @contextmanager
    def hear(self, devices: Iterable[str] = ()) -> Iterator[Session]:
        """A write transaction for what comes all the time: it waits for no other one, but where that changes one of
        these devices, which it holds from the beginning. On SQLite it is a writer like any other. What the devices said
        last is not read, unless it is asked for."""
        with self._translated(), self._hearers.begin() as session:
            names = sorted(set(devices))
            held = select(Device).options(*_UNREAD).where(Device.name.in_(names)).order_by(Device.name)
            # All in one query: while the list lives, the session finds each of them without another one.
            rows = session.scalars(held.with_for_update(key_share=True)).all() if names else []
            yield session
            del rows

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent view; rows stay readable after the block."""
        with self._translated(), self._readers() as session:
            yield session

    def close(self) -> None:
        """Let go of every connection."""
        self._engine.dispose()

    def _sessions(self, **options: Any) -> sessionmaker[Session]:
        return sessionmaker(self._engine.execution_options(**options), expire_on_commit=False)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            told = in_our_words(error, self._engine)
            if told is None:
                raise
            raise told from error


def held_of(session: Session, devices: Iterable[str]) -> dict[str, Device]:
    """Of these devices those that the transaction holds since it began (`Database.hear`)."""
    found = {name: session.identity_map.get(identity_key(Device, name)) for name in devices}
    return {name: device for name, device in found.items() if device is not None}


def held(session: Session, device: str) -> Device | None:
    """The device as it is now, which nobody else changes, nor hears, before this transaction ends."""
    return session.get(Device, device, with_for_update={"key_share": True})


def record(session: Session, at: float, who: str, what: str, subject: str, /, **detail: Any) -> None:
    """Add one event to the trail, in the caller's transaction. `operator` stands for whoever asks for it now."""
    session.add(Event(at=at, who=who_asks() if who == OWNER else who, what=what, subject=subject, detail=detail))
