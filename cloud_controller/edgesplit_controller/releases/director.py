"""What each device shall run: deployments, desired releases, and the signed statements that say so.

A statement's counter is at least the Unix time and never falls, so that a restored backup commands nobody back. Desired
release, counter and statement change in one transaction: what was answered to an operator survives a power cut, and
delivery only has to repeat what is stored. Statements are renewed at half their life; that of a device which came from
a backup is left alone until the device has shown that it knows nothing newer, or an operator decides (decision 28).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgesplit.errors import EdgeError
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.release.manifest import Signed, Statement, Wanted
from edgesplit_controller.errors import Conflict
from edgesplit_controller.fleet.gateways import NoGateways, Tiers
from edgesplit_controller.storage.database import Database, Deployment, Desired, Device

Sign = Callable[[Statement], bytes]
Wrap = Callable[[Device, str], bytes]
"""The content keys that a device needs for a release, wrapped to it; empty where there are none."""

log = logging.getLogger(__name__)

AT_ONCE = 500
"""Names in one query: databases bound the number of parameters."""
FUTURE_S = 86_400.0
"""A counter is about the Unix time: one that is further ahead was never ours."""


def no_keys(_device: Device, _release: str) -> bytes:
    """Where nothing is encrypted."""
    return b""


class Director:
    """The director of one installation; `sign` is its key's."""

    def __init__(
        self,
        database: Database,
        sign: Sign,
        *,
        statement_s: int,
        now: Callable[[], float],
        wrap: Wrap = no_keys,
        wrap_far: Wrap = no_keys,
        tiers: Tiers | None = None,
    ) -> None:
        """`wrap_far`: as `wrap`, for what a gateway runs of a release."""
        self._wrap_far = wrap_far
        self._tiers = tiers or NoGateways()
        self._database = database
        self._sign = sign
        self._wrap = wrap
        self._statement_s = statement_s
        self._now = now

    def assign(self, session: Session, device: str, model: str, release: str, deployment: int) -> int:
        """Make `release` what this device runs `model` (its name) from, in the caller's transaction; the counter of the
        statement that says so. Rollouts alone call this."""
        session.merge(Desired(device=device, model=model, release=release, deployment=deployment))
        there = _living(session, device)
        self._state(session, there, self._now())
        return there.counter

    def statements(self, devices: Collection[str] | None) -> dict[str, bytes]:
        """The stored statement of each device named (None: of all) that is not from a backup; empty bytes for revoked
        ones."""
        kept = select(Device.name, Device.revoked, Device.statement).where(Device.restored.is_(None))
        columns = kept.order_by(Device.name)
        with self._database.read() as session:
            if devices is None:
                rows = list(session.execute(columns))
            else:
                parts = batched(sorted(devices), AT_ONCE)
                rows = [row for some in parts for row in session.execute(columns.where(Device.name.in_(some)))]
        told = {name: b"" if revoked else statement for name, revoked, statement in rows}
        return {name: statement for name, statement in told.items() if statement is not None}

    def renew(self) -> list[str]:
        """State anew what is past half its life; the devices concerned."""
        with self._database.write() as session:
            now = self._now()
            due = select(Device).where(
                Device.statement.is_not(None),
                Device.revoked.is_(None),
                Device.restored.is_(None),
                Device.statement_expires < now + self._statement_s / 2,
            )
            devices = session.scalars(due.order_by(Device.name)).all()
            for device in devices:
                self._state(session, device, now, self._wrap_if_possible)
            return [device.name for device in devices]

    def wrap_anew(self, name: str) -> bool:
        """State anew what a device shall run if that takes content keys: it may have come with another key of its own
        to wrap them to. Was that so?"""
        with self._database.write() as session:
            device = session.get(Device, name)
            if device is None or device.revoked or device.statement is None or device.restored is not None:
                return False
            wanted = session.scalars(select(Desired).where(Desired.device == name)).all()
            kept = self._tiers.kept_by(session, device)
            keys = [self._wrap_if_possible(device, row.release) for row in wanted]
            if not any([*keys, *(self._wrap_far_if_possible(device, release) for _, release in kept)]):
                return False
            self._state(session, device, self._now(), self._wrap_if_possible)
            return True

    def _wrap_if_possible(self, device: Device, release: str) -> bytes:
        """Empty where the keys cannot be had: the device may still have them, and one device's trouble is not all's."""
        return _if_possible(self._wrap, device, release)

    def _wrap_far_if_possible(self, device: Device, release: str) -> bytes:
        return _if_possible(self._wrap_far, device, release)

    def settle(self) -> list[str]:
        """State anew what gateways keep, and who offloads to whom, where that has changed; the devices concerned,
        gateways first."""
        with self._database.write() as session:
            due = []
            for device in self._tiers.concerned(session):
                reached, kept = self._tiers.reached_by(session, device), self._tiers.kept_by(session, device)
                told = _told(device.statement)
                if (told is None and not kept) or device.restored is not None:
                    continue
                if told is None or told.gateway != reached or [(one.model, one.release) for one in told.keeps] != kept:
                    self._state(session, device, self._now(), self._wrap_if_possible)
                    due.append((not kept, device.name))
            return [name for _, name in sorted(due)]

    def restate(self, *, signed_by: Collection[str] | None = None) -> list[str]:
        """State anew what every device was told, after the keys changed; the devices concerned.

        With `signed_by`, only what none of these keys signed.
        """
        with self._database.write() as session:
            told = select(Device).where(
                Device.statement.is_not(None), Device.revoked.is_(None), Device.restored.is_(None)
            )
            devices = [
                device
                for device in session.scalars(told.order_by(Device.name))
                if device.statement and (signed_by is None or not _signers(device.statement) & set(signed_by))
            ]
            for device in devices:
                self._state(session, device, self._now(), self._wrap_if_possible)
            return [device.name for device in devices]

    def catch_up(self) -> list[str]:
        """State anew what devices were told that know a newer statement than is kept here: an older copy of the
        database was put in its place. The devices concerned. One that claims to know the future is not believed."""
        with self._database.write() as session:
            now = self._now()
            acted_upon = Device.reported["counter"].as_integer()
            ahead = select(Device).where(
                Device.statement.is_not(None),
                Device.revoked.is_(None),
                Device.restored.is_(None),
                acted_upon > Device.counter,
            )
            concerned = []
            for device in session.scalars(ahead.order_by(Device.name).with_for_update(key_share=True)).all():
                counter = int((device.reported or {})["counter"])
                if counter <= now + FUTURE_S:
                    device.counter = counter
                    self._state(session, device, now, self._wrap_if_possible)
                    concerned.append(device.name)
            return concerned

    def deployments(self) -> Sequence[Deployment]:
        """Every deployment, oldest first."""
        with self._database.read() as session:
            return session.scalars(select(Deployment).order_by(Deployment.id)).all()

    def desired(self) -> dict[str, list[Desired]]:
        """What each device shall run, by device."""
        with self._database.read() as session:
            by_device: dict[str, list[Desired]] = {}
            for row in session.scalars(select(Desired).order_by(Desired.device, Desired.model)):
                by_device.setdefault(row.device, []).append(row)
            return by_device

    def _state(self, session: Session, device: Device, now: float, wrap: Wrap | None = None) -> None:
        """Sign what the device's desired rows say now, under a higher counter."""
        wrap = wrap or self._wrap
        session.flush()
        rows = session.scalars(select(Desired).where(Desired.device == device.name).order_by(Desired.model)).all()
        device.counter, device.restored = next_counter(device.counter, now), None
        device.statement_expires = now + self._statement_s
        statement = Statement(
            device=device.name,
            releases=tuple(
                Wanted(row.model, row.release, now=_is_urgent(session, row), keys=wrap(device, row.release))
                for row in rows
            ),
            counter=device.counter,
            expires=int(device.statement_expires),
            gateway=self._tiers.reached_by(session, device),
            keeps=tuple(
                Wanted(model, release, now=True, keys=self._wrap_far_if_possible(device, release))
                for model, release in self._tiers.kept_by(session, device)
            ),
        )
        signed = device.statement = self._sign(statement)
        if len(signed) > LIMITS.message_bytes:
            raise Conflict(
                f"what {device.name} shall run takes a statement of {len(signed)} bytes, at most"
                f" {LIMITS.message_bytes}: too many content keys; deploy fewer encrypted models to it, or fewer cuts"
            )


def _if_possible(wrap: Wrap, device: Device, release: str) -> bytes:
    try:
        return wrap(device, release)
    except EdgeError as error:
        log.error("%s gets no content keys of release %s: %s", device.name, release[:12], error)
        return b""


def _told(statement: bytes | None) -> Statement | None:
    """What a device was told last; None where that is nothing."""
    if not statement:
        return None
    return messages.decode(messages.decode(statement, Signed).payload, Statement)


def _signers(statement: bytes) -> set[str]:
    """Ids of the keys that signed it."""
    return {one.keyid for one in messages.decode(statement, Signed).signatures}


def batched(names: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    """The names in parts of at most so many."""
    return (names[at : at + most] for at in range(0, len(names), most))


def next_counter(stored: int, now: float) -> int:
    """Higher than what is stored, and at least the Unix time."""
    return max(stored + 1, int(now))


def _is_urgent(session: Session, row: Desired) -> bool:
    """Whether the deployment said that devices shall not wait for their hours to fetch it."""
    deployment = session.get(Deployment, row.deployment)
    return deployment is not None and bool(deployment.options.get("now"))


def _living(session: Session, name: str) -> Device:
    device = session.get(Device, name)
    if device is None or device.revoked:
        raise Conflict(f"device {name!r} was revoked meanwhile")
    return device
