"""What each device shall run: deployments, desired releases, and the signed statements that say so.

A statement's counter is at least the Unix time and never falls, so that a restored backup commands nobody back. Desired
release, counter and statement change in one transaction: what was answered to an operator survives a power cut, and
delivery only has to repeat what is stored. Statements are renewed at half their life.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgesplit.release import Statement, Wanted
from edgesplit_controller.database import Database, Deployment, Desired, Device, record
from edgesplit_controller.refusals import Conflict

Sign = Callable[[Statement], bytes]


class Director:
    """The director of one installation; `sign` is its key's."""

    def __init__(self, database: Database, sign: Sign, *, statement_s: int, now: Callable[[], float]) -> None:
        self._database = database
        self._sign = sign
        self._statement_s = statement_s
        self._now = now

    def deploy(
        self, release: str, model: str, devices: Collection[str], *, targets: Sequence[str], options: Mapping[str, Any]
    ) -> int:
        """Make `release` what these devices run `model` (`name@version`) from; the deployment's number."""
        with self._database.write() as session:
            now = self._now()
            made = Deployment(
                release=release, model=model, targets=list(targets), devices=sorted(devices), options=dict(options),
                created=now,
            )  # fmt: skip
            session.add(made)
            session.flush()
            for name in sorted(devices):
                wanted = Desired(device=name, model=model.partition("@")[0], release=release, deployment=made.id)
                session.merge(wanted)
                self._state(session, _living(session, name), now)
            record(session, now, "operator", "deployment.made", str(made.id), release=release, model=model)
            return made.id

    def statements(self, devices: Collection[str] | None) -> dict[str, bytes]:
        """The stored statement of each device named (None: of all); empty bytes for revoked ones."""
        with self._database.read() as session:
            rows: Iterable[Device] = session.scalars(select(Device).order_by(Device.name))
            chosen = [row for row in rows if devices is None or row.name in devices]
            told = {row.name: b"" if row.revoked else row.statement for row in chosen}
            return {name: statement for name, statement in told.items() if statement is not None}

    def renew(self) -> list[str]:
        """State anew what is past half its life; the devices concerned."""
        with self._database.write() as session:
            now = self._now()
            due = select(Device).where(
                Device.statement.is_not(None),
                Device.revoked.is_(None),
                Device.statement_expires < now + self._statement_s / 2,
            )
            devices = session.scalars(due).all()
            for device in devices:
                self._state(session, device, now)
            return [device.name for device in devices]

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

    def _state(self, session: Session, device: Device, now: float) -> None:
        """Sign what the device's desired rows say now, under a higher counter."""
        session.flush()
        rows = session.scalars(select(Desired).where(Desired.device == device.name).order_by(Desired.model)).all()
        device.counter = next_counter(device.counter, now)
        device.statement_expires = now + self._statement_s
        statement = Statement(
            device=device.name,
            releases=tuple(Wanted(row.model, row.release, _is_urgent(session, row)) for row in rows),
            counter=device.counter,
            expires=int(device.statement_expires),
        )
        device.statement = self._sign(statement)


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
