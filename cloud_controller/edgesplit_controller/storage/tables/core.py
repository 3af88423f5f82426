"""Tables of models, devices, releases, deployments, telemetry and events. Each is documented at its class.

Times are Unix seconds.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import ColumnElement, ForeignKey, Index, UniqueConstraint, and_
from sqlalchemy.orm import Mapped, mapped_column

from edgesplit_controller.storage.tables.base import Json, Table


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
    lineage: Mapped[Json | None]
    """For a version that stands in for another: where it comes from (`edgesplit.release.lineage.Lineage`)."""

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


class SampleSetRow(Table):
    """A set of a model's samples with their labels, by which versions were compared. Never changed."""

    __tablename__ = "sample_sets"

    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"), primary_key=True)
    sha256: Mapped[str] = mapped_column(primary_key=True)
    """Digest of `content` (`model_registry.sample_sets`)."""
    content: Mapped[list[Any]]
    """Digest of each sample with its class, or null; sorted."""
    created: Mapped[float]


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

    @classmethod
    def is_open(cls, now: float) -> ColumnElement[bool]:
        """Condition for claims that are neither used nor expired."""
        return and_(cls.used.is_(None), cls.expires > now)


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
    published: Mapped[int] = mapped_column(default=0, server_default="0")
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


class RemovedDeviceRow(Table):
    """A device that was removed: what must outlive it. Deleted when its name enrols again."""

    __tablename__ = "removed_devices"

    device: Mapped[str] = mapped_column(primary_key=True)
    counter: Mapped[int]
    """Counter of its newest statement; the next device of this name continues from it."""
    removed: Mapped[float]
    cleared: Mapped[bool]
    """The broker has acknowledged that it retains nothing of the device, and none of its messages arrived since."""


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


class OffloadFloodRow(Table):
    """A device that an offload server refuses again and again, as the server reported last."""

    __tablename__ = "offload_floods"

    device: Mapped[str] = mapped_column(ForeignKey("devices.name"), primary_key=True)
    since: Mapped[float]
    at: Mapped[float]
    """When the server last reported it."""
    refused: Mapped[int]
    """Refused connections and requests within the server's last two minutes."""
    reasons: Mapped[str]
    """Why, by `edgesplit.http1.admission.REASONS`, the most frequent first."""


class ReleaseRow(Table):
    """A signed release; its manifest is a blob whose SHA-256 is the digest."""

    __tablename__ = "releases"

    digest: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    created: Mapped[float]
    options: Mapped[Json]


class Deployment(Table):
    """A deployment of a release to selected devices, or the removal of a model from them."""

    __tablename__ = "deployments"

    id: Mapped[int] = mapped_column(primary_key=True)
    release: Mapped[str]
    """Digest of the release, which may have been removed since; `nothing` where the model is undeployed."""
    model: Mapped[str]
    """`name@version`; the name alone where every version is undeployed."""
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
    from_backlog: Mapped[bool] = mapped_column(default=False)
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
