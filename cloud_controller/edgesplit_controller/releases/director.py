"""Desired state of devices: deployments, desired releases, and the signed statements that command them.

A statement's counter is at least the Unix time and never falls, so a restored backup cannot command a device back to an
older state. Desired release, counter and statement change in one transaction: what an operator was answered survives a
power cut, and delivery only has to repeat what is stored. Statements are renewed at half their life. The statement of a
device restored from a backup is left alone until the device has shown that it has nothing newer, or an operator decides
(decision 28).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from edgesplit.errors import EdgeError
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.release.manifest import DesiredRelease, Signed, Statement
from edgesplit_controller.errors import Conflict
from edgesplit_controller.fleet.gateways import Gateways
from edgesplit_controller.storage.database import Database, batched
from edgesplit_controller.storage.tables.core import Deployment, Desired, Device, ReleaseRow, RemovedDeviceRow
from edgesplit_controller.tuf.repository_signer import is_ahead, next_version

Sign = Callable[[Statement], bytes]
WrapKeys = Callable[[Device, str], bytes]
"""Returns the content keys that a device needs for a release, wrapped to it; empty where there are none."""

log = logging.getLogger(__name__)

COMMANDED = (Device.statement.is_not(None), Device.revoked.is_(None), Device.restored.is_(None))
"""Conditions for devices that have a statement which may be replaced."""


def no_keys(_device: Device, _release: str) -> bytes:
    """`WrapKeys` for installations where nothing is encrypted."""
    return b""


class Director:
    """Issues the statements of one installation; `sign` signs with the director key."""

    def __init__(
        self, database: Database, sign: Sign, *, statement_s: int, now: Callable[[], float], wrap: WrapKeys = no_keys,
        wrap_for_gateway: WrapKeys = no_keys, gateways: Gateways | None = None,
    ) -> None:  # fmt: skip
        """`wrap_for_gateway` wraps the keys of what a gateway runs of a release. `statement_s` is the life of a
        statement in seconds."""
        self._wrap_for_gateway = wrap_for_gateway
        self._gateways = gateways or Gateways(database, now=now, model_if_split=lambda release: "")
        self._database = database
        self._sign = sign
        self._wrap = wrap
        self._statement_s = statement_s
        self._now = now

    def assign(self, session: Session, device: str, model: str, release: str, deployment: int) -> int:
        """Set the release from which a device runs `model` (its name), in the caller's transaction; return the counter
        of the new statement. Called by rollouts only. Conflict if the device was revoked or serves too many models, or
        the release was removed."""
        device_row = _enrolled_device(session, device)
        if session.get(ReleaseRow, release) is None:
            raise Conflict(f"release {release[:12]} was removed: deploy the model again")
        others = select(func.count()).where(Desired.device == device, Desired.model != model)
        if (session.scalar(others) or 0) >= LIMITS.models_per_device:
            raise Conflict(
                f"{device} serves {LIMITS.models_per_device} models already, the most that a device can: deploy newer"
                " versions of these, or use another device"
            )
        session.merge(Desired(device=device, model=model, release=release, deployment=deployment))
        self._sign_statement(session, device_row, self._now())
        return device_row.counter

    def withdraw(self, session: Session, device: str, model: str) -> int:
        """Remove `model` (its name) from what a device runs, in the caller's transaction; return the counter of the new
        statement, which no longer names the model. Called by rollouts only. Conflict if the device was revoked."""
        device_row = _enrolled_device(session, device)
        session.execute(delete(Desired).where(Desired.device == device, Desired.model == model))
        self._sign_statement(session, device_row, self._now())
        return device_row.counter

    def statements(self, devices: Collection[str] | None) -> dict[str, bytes]:
        """Stored statement of each of these devices (None: of all) that was not restored from a backup; empty bytes for
        revoked devices, and for removed ones whose topics were not cleared yet."""
        columns = select(Device.name, Device.revoked, Device.statement).where(Device.restored.is_(None))
        columns = columns.order_by(Device.name)
        with self._database.read() as session:
            removed = set(session.scalars(select(RemovedDeviceRow.device).where(~RemovedDeviceRow.cleared)))
            if devices is None:
                rows = list(session.execute(columns))
            else:
                queries = (columns.where(Device.name.in_(batch)) for batch in batched(devices))
                rows = [row for query in queries for row in session.execute(query)]
                removed &= set(devices)
        statements = {name: b"" if revoked else statement for name, revoked, statement in rows}
        statements.update(dict.fromkeys(sorted(removed), b""))
        return {name: statement for name, statement in statements.items() if statement is not None}

    def renew(self) -> list[str]:
        """Sign new statements for devices whose statement is past half its life; return the devices."""
        with self._database.write() as session:
            now = self._now()
            due = select(Device).where(*COMMANDED, Device.statement_expires < now + self._statement_s / 2)
            devices = session.scalars(due.order_by(Device.name)).all()
            for device in devices:
                self._sign_statement(session, device, now, self._wrap_if_possible)
            return [device.name for device in devices]

    def rewrap_keys(self, name: str) -> bool:
        """Sign a new statement if the device's releases need content keys, because it may have enrolled again with
        another key to wrap them to; return whether it was signed."""
        with self._database.write() as session:
            device = session.get(Device, name)
            if device is None or device.revoked or device.statement is None or device.restored is not None:
                return False
            wanted = session.scalars(select(Desired).where(Desired.device == name)).all()
            stored_for_others = self._gateways.releases_kept_by(session, device)
            keys = [self._wrap_if_possible(device, row.release) for row in wanted]
            keys += [_wrap_or_log(self._wrap_for_gateway, device, release) for _, release in stored_for_others]
            if not any(keys):
                return False
            self._sign_statement(session, device, self._now(), self._wrap_if_possible)
            return True

    def _wrap_if_possible(self, device: Device, release: str) -> bytes:
        """Wrapped keys, or empty if they cannot be derived: the device may still have them, and a failure for one
        device must not stop the others."""
        return _wrap_or_log(self._wrap, device, release)

    def refresh_gateway_statements(self) -> list[str]:
        """Sign new statements where the releases stored on gateways, or the gateway of a device, have changed; return
        the devices, gateways first."""
        with self._database.write() as session:
            due = []
            for device in self._gateways.affected_devices(session):
                reached = self._gateways.gateway_of(session, device)
                stored_for_others = self._gateways.releases_kept_by(session, device)
                current = _decode_statement(device.statement)
                if (current is None and not stored_for_others) or device.restored is not None:
                    continue
                if (
                    current is None
                    or current.gateway != reached
                    or [(wanted.model, wanted.release) for wanted in current.gateway_releases] != stored_for_others
                ):
                    self._sign_statement(session, device, self._now(), self._wrap_if_possible)
                    due.append((not stored_for_others, device.name))
            return [name for _, name in sorted(due)]

    def with_gateways(self, devices: Collection[str]) -> list[str]:
        """Gateways and devices whose gateway statement changed, then these devices: a gateway must know a release
        before its devices offload it."""
        return [*self.refresh_gateway_statements(), *devices]

    def resign_all(self, *, signed_by: Collection[str] | None = None) -> list[str]:
        """Sign a new statement for every device after the keys changed; return the devices.

        With `signed_by`, only statements that none of these keys signed.
        """
        with self._database.write() as session:
            query = select(Device).where(*COMMANDED)
            devices = [
                device
                for device in session.scalars(query.order_by(Device.name))
                if device.statement and (signed_by is None or not _signers(device.statement) & set(signed_by))
            ]
            for device in devices:
                self._sign_statement(session, device, self._now(), self._wrap_if_possible)
            return [device.name for device in devices]

    def overtake_reported_counters(self) -> list[str]:
        """Sign new statements for devices that report a newer counter than is stored here, because an older copy of the
        database was restored; return the devices. One too far ahead of the clock is ignored."""
        with self._database.write() as session:
            now = self._now()
            acted_upon = Device.reported["statement_counter"].as_integer()
            ahead = select(Device).where(*COMMANDED, acted_upon > Device.counter)
            concerned = []
            for device in session.scalars(ahead.order_by(Device.name).with_for_update(key_share=True)).all():
                counter = int((device.reported or {})["statement_counter"])
                # A device that lies must not be able to push its counter so far that no later statement overtakes it.
                if not is_ahead(counter, now):
                    device.counter = counter
                    self._sign_statement(session, device, now, self._wrap_if_possible)
                    concerned.append(device.name)
            return concerned

    def deployments(self) -> Sequence[Deployment]:
        """Every deployment, oldest first."""
        with self._database.read() as session:
            return session.scalars(select(Deployment).order_by(Deployment.id)).all()

    def _sign_statement(self, session: Session, device: Device, now: float, wrap: WrapKeys | None = None) -> None:
        """Sign the device's desired rows as a statement with a higher counter. Conflict if the statement is too
        large."""
        wrap = wrap or self._wrap
        session.flush()  # the caller's changes of desired rows must be visible to the query
        rows = session.scalars(select(Desired).where(Desired.device == device.name).order_by(Desired.model)).all()
        stored_for_others = self._gateways.releases_kept_by(session, device)
        if len(stored_for_others) > LIMITS.gateway_releases:
            raise Conflict(
                f"the gateway {device.name} would store {len(stored_for_others)} releases, at most"
                f" {LIMITS.gateway_releases}: put some of its devices behind another gateway"
            )
        device.counter, device.restored = next_version(device.counter, now), None
        device.statement_expires = now + self._statement_s
        statement = Statement(
            device=device.name,
            releases=tuple(
                DesiredRelease(
                    row.model, row.release, fetch_now=_is_urgent(session, row), keys=wrap(device, row.release)
                )
                for row in rows
            ),
            counter=device.counter,
            expires=int(device.statement_expires),
            gateway=self._gateways.gateway_of(session, device),
            gateway_releases=tuple(
                DesiredRelease(
                    model, release, fetch_now=True, keys=_wrap_or_log(self._wrap_for_gateway, device, release)
                )
                for model, release in stored_for_others
            ),
        )
        signed = device.statement = self._sign(statement)
        if len(signed) > LIMITS.message_bytes:
            raise Conflict(
                f"what {device.name} shall run needs a statement of {len(signed)} bytes, at most"
                f" {LIMITS.message_bytes}: too many content keys; deploy fewer encrypted models to it, or fewer cuts"
            )


def _wrap_or_log(wrap: WrapKeys, device: Device, release: str) -> bytes:
    try:
        return wrap(device, release)
    except EdgeError as error:
        log.error("%s gets no content keys of release %s: %s", device.name, release[:12], error)
        return b""


def _decode_statement(statement: bytes | None) -> Statement | None:
    """The statement's content; None if there is no statement."""
    if not statement:
        return None
    return messages.decode(messages.decode(statement, Signed).payload, Statement)


def _signers(statement: bytes) -> set[str]:
    """Ids of the keys that signed it."""
    return {signature.keyid for signature in messages.decode(statement, Signed).signatures}


def _is_urgent(session: Session, row: Desired) -> bool:
    """Whether the deployment tells devices not to wait for their download window."""
    deployment = session.get(Deployment, row.deployment)
    return deployment is not None and bool(deployment.options.get("now"))


def _enrolled_device(session: Session, name: str) -> Device:
    device = session.get(Device, name)
    if device is None or device.revoked:
        raise Conflict(f"device {name!r} was revoked meanwhile")
    return device
