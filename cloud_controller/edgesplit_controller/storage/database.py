"""ORM tables and transactions of the controller's database. Each table is documented at its class.

SQLite (WAL, every commit synced) by default, or PostgreSQL by URL; only portable SQL is used (`engines` opens both).
Times are Unix seconds. A write transaction takes the write lock when it begins, so that what it has read is still true
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
from edgesplit_controller.caller import OWNER, current_operator
from edgesplit_controller.storage.engines import POSTGRESQL, display_name, open_engine, translate_error
from edgesplit_controller.storage.schema import migrate

Json = dict[str, Any]


class Table(DeclarativeBase):
    """Base class of all tables. A change of a table also needs a migration step in `migrations/versions`
    (docs/operations.md)."""

    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own idiom
        Json: JSON,
        list[Any]: JSON,
        bytes: LargeBinary,
        # A counter follows the Unix time and a model may have 16 GB: 32 bits are too few.
        int: BigInteger().with_variant(Integer, "sqlite"),
    }


class Model(Table):
    """A pushed model: `name@version`, immutable."""

    __tablename__ = "models"
    __table_args__ = (UniqueConstraint("name", "version"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    version: Mapped[int]
    sha256: Mapped[str]
    """Digest of the model file as it was pushed (blob)."""
    optimised_sha256: Mapped[str]
    """Digest of the optimised model, which is sliced (blob)."""
    bytes: Mapped[int]
    input_text: Mapped[str]
    """The input spec as the operator wrote it; empty for none."""
    bindings: Mapped[Json]
    """Sizes given to the file's open dimensions."""
    shown: Mapped[Json]
    """Inputs, outputs and layers, as the API returns them."""
    created: Mapped[float]

    @property
    def ref(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"


class Sample(Table):
    """A sample input of a model, for measurements and tests: a frame, or named tensors (.npz)."""

    __tablename__ = "samples"
    __table_args__ = (UniqueConstraint("model_id", "sha256"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    sha256: Mapped[str]
    kind: Mapped[str]
    """`frame` or `tensors`."""


class Measurement(Table):
    """A measurement of one model: seconds per layer in some place, or the size of its tensors when sent."""

    __tablename__ = "measurements"
    __table_args__ = (UniqueConstraint("model_id", "kind", "place"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    kind: Mapped[str]
    """`layers`, `slices`, `tensors` or `codecs`; or `labels`, which operators provide."""
    place: Mapped[str]
    """Tier or device on which it was measured."""
    content: Mapped[Json]
    taken: Mapped[float]


class ClaimRow(Table):
    """A one-time right to enrol as one device. The token itself is not stored."""

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
    """Digest of the public key that used it. The same key may repeat the request while the claim is valid, because the
    response may have been lost."""


class Device(Table):
    """A device that enrolled: its last signed statement and its last messages."""

    __tablename__ = "devices"

    name: Mapped[str] = mapped_column(primary_key=True)
    device_class: Mapped[str]
    group: Mapped[str]
    labels: Mapped[Json]
    link: Mapped[str]
    certificate_serial: Mapped[str]
    public_key_sha256: Mapped[str]
    encryption_key: Mapped[bytes] = mapped_column(default=b"")
    """The device's X25519 public key, raw, to which content keys are wrapped. Empty if it enrolled without one."""
    enrolled: Mapped[float]
    revoked: Mapped[float | None]
    counter: Mapped[int] = mapped_column(default=0)
    """Counter of the newest statement; never falls, not even when the device is claimed again."""
    statement: Mapped[bytes | None]
    """Encoded `release.Signed`: the message retained on its `desired` topic."""
    statement_expires: Mapped[float] = mapped_column(default=0.0)
    stated: Mapped[int] = mapped_column(default=0, server_default="0")
    """Counter of the statement that the broker has acknowledged; -1 where the topics of a revoked device were cleared.
    """
    restored: Mapped[float | None]
    """When this row was restored from a backup; None otherwise. Until the device reports the statement it acts on, it
    may have a newer one than is stored here, and only an operator may replace it."""
    session: Mapped[int] = mapped_column(default=0)
    alive: Mapped[bool] = mapped_column(default=False)
    """The newest session sent a birth message and has not ended."""
    last_seen: Mapped[float | None]
    """When the last message arrived that the broker does not repeat by itself."""
    birth: Mapped[Json | None]
    reported: Mapped[Json | None]
    telemetry: Mapped[Json | None]
    changed: Mapped[float] = mapped_column(default=time.time, onupdate=time.time, server_default="0", index=True)
    """When the row was last written, by the clock of the writing process; open dashboard pages poll by it."""


class CertificateRow(Table):
    """A certificate issued to a device. Never deleted."""

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
    """Why it was revoked: `operator`, `replaced` (by other hardware), `renewed` (its successor was used)."""


class AgentStartsRow(Table):
    """The last start marks of a device's agent. A mark that returns after another one means that a second card has the
    same identity."""

    __tablename__ = "starts"

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    marks: Mapped[list[Any]]
    """Values of `Birth.start`, newest last."""
    copied: Mapped[float | None]
    """When two agents were last seen to share the identity."""


class FloodRow(Table):
    """The last flood of a device. While the device is quarantined, its certificates are on the revocation list;
    afterwards they are valid again."""

    __tablename__ = "floods"

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    at: Mapped[float]
    times: Mapped[int]
    """Floods in a row, each within a day of the one before: the quarantine grows with them."""
    dropped: Mapped[int]
    """Messages dropped since the controller started."""
    held_until: Mapped[float]
    listed: Mapped[bool]
    """The revocation list that was published last contains the device."""


class ReleaseRow(Table):
    """A signed release; its manifest is a blob whose SHA-256 is the digest."""

    __tablename__ = "releases"

    digest: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    created: Mapped[float]
    options: Mapped[Json]


class Deployment(Table):
    """A deployment of a release to selected devices."""

    __tablename__ = "deployments"

    id: Mapped[int] = mapped_column(primary_key=True)
    release: Mapped[str] = mapped_column(ForeignKey("releases.digest"))
    model: Mapped[str]
    """`name@version`."""
    targets: Mapped[list[Any]]
    """The selectors as the operator gave them."""
    devices: Mapped[list[Any]]
    """Names of the devices that the selectors matched at that time."""
    options: Mapped[Json]
    created: Mapped[float]


class Desired(Table):
    """The release from which one device shall serve one model (desired state)."""

    __tablename__ = "desired"

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    """The model's name without its version."""
    release: Mapped[str] = mapped_column(ForeignKey("releases.digest"))
    deployment: Mapped[int] = mapped_column(ForeignKey("deployments.id"))


class GatewayRow(Table):
    """A gateway: a device, enrolled or not yet, that runs remote halves for other devices."""

    __tablename__ = "gateways"

    device: Mapped[str] = mapped_column(primary_key=True)
    address: Mapped[str]
    """HOST:PORT under which devices reach it."""


class GatewayRouteRow(Table):
    """A device that offloads through a gateway, or did."""

    __tablename__ = "behind"

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    gateway: Mapped[str | None] = mapped_column(ForeignKey("gateways.device"))
    """None: the device offloads to the cloud again, and may not have a statement that says so yet."""


class TelemetryRow(Table):
    """One telemetry message, stored once; the newest few thousand of each device are kept."""

    __tablename__ = "telemetry"
    __table_args__ = (
        Index("telemetry_of_device", "device", "at"),
        Index("telemetry_once", "device", "session", "sequence", unique=True),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    device: Mapped[str]
    at: Mapped[float]
    """When it was measured, as far as known (`dated`)."""
    stored: Mapped[float]
    session: Mapped[int]
    sequence: Mapped[int]
    late: Mapped[bool] = mapped_column(default=False)
    """It could not be sent when it was measured."""
    dated: Mapped[str] = mapped_column(default="now")
    """How `at` was determined (`fleet.device_state.Dated`)."""
    content: Mapped[Json]


class Event(Table):
    """An entry of the audit trail: actor, action, subject and time. Never changed or deleted."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    who: Mapped[str]
    what: Mapped[str]
    subject: Mapped[str]
    detail: Mapped[Json]


_DEFERRED = tuple(defer(column) for column in (Device.birth, Device.reported, Device.telemetry, Device.labels))
"""Large columns that concurrent write transactions do not load."""


class Database:
    """Transactions over the tables: `with database.write() as session`, `with database.read() as session`.

    Errors of the database are raised as `Unavailable` or `Busy`, and then nothing was changed.
    """

    def __init__(self, url: str) -> None:
        """`url`: `sqlite:///FILE`, or `postgresql://USER:PASSWORD@HOST/NAME`. UsageError if it cannot be opened."""
        self._engine = open_engine(url)
        try:
            migrate(self._engine)
        except SQLAlchemyError as error:
            why = str(error.__cause__ or error).strip().partition("\n")[0]
            raise UsageError(f"cannot open the database {display_name(self._engine)}: {why}") from error
        isolation = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True} if self.shared else {}
        self._writers = self._sessions(edgesplit="write")
        self._concurrent_writers = self._sessions(edgesplit="hear")
        self._readers = self._sessions(edgesplit="read", **isolation)

    @property
    def engine(self) -> Engine:
        """The SQLAlchemy engine, for instrumentation."""
        return self._engine

    @property
    def shared(self) -> bool:
        """Whether controllers on other machines can use the database too."""
        return self._engine.dialect.name == POSTGRESQL

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that commits when the block ends, and is rolled back if it raises.

        Writers are serialised, so what one has read is still true when it commits. Columns of a device that
        `write_concurrent` changes are excepted, unless the writer has locked the device (`lock_device`).
        """
        with self._translated(), self._writers.begin() as session:
            yield session

    @contextmanager
    def write_concurrent(self, devices: Iterable[str] = ()) -> Iterator[Session]:
        """A write transaction for frequent small writes such as ingested messages, not serialised with others. It waits
        only for transactions that changed one of `devices`, which it locks at its begin. On SQLite it is serialised
        like any other writer. The last messages of the devices (large columns) are loaded only on access."""
        with self._translated(), self._concurrent_writers.begin() as session:
            names = sorted(set(devices))
            held = select(Device).options(*_DEFERRED).where(Device.name.in_(names)).order_by(Device.name)
            # Loaded by one query, in the order of names, so that two such transactions cannot deadlock. The session
            # references rows only weakly, so the list keeps them in its identity map.
            rows = session.scalars(held.with_for_update(key_share=True)).all() if names else []
            yield session
            del rows

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent snapshot; rows stay readable after the block."""
        with self._translated(), self._readers() as session:
            yield session

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def _sessions(self, **options: Any) -> sessionmaker[Session]:
        return sessionmaker(self._engine.execution_options(**options), expire_on_commit=False)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            translated = translate_error(error, self._engine)
            if translated is None:
                raise
            raise translated from error


def locked_devices(session: Session, devices: Iterable[str]) -> dict[str, Device]:
    """Those of these devices that the transaction locked at its begin (`Database.write_concurrent`), by name."""
    rows = {name: session.identity_map.get(identity_key(Device, name)) for name in devices}
    return {name: device for name, device in rows.items() if device is not None}


def lock_device(session: Session, device: str) -> Device | None:
    """The current device, locked until this transaction ends; None if there is none."""
    return session.get(Device, device, with_for_update={"key_share": True})


def record_event(session: Session, at: float, who: str, what: str, subject: str, /, **detail: Any) -> None:
    """Add an event to the audit trail, in the caller's transaction. The actor `operator` stands for the authenticated
    caller."""
    session.add(
        Event(at=at, who=current_operator() if who == OWNER else who, what=what, subject=subject, detail=detail)
    )
