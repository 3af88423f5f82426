"""Which devices may use the remote half of an encrypted release: those that were given content keys of it, because a
statement named it. The offload server reads them from a list beside the release."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgesplit.crypto.key_file import CLEAR_KEYS_FILE
from edgesplit.crypto.permitted_devices import PERMITTED_FILE, append_permitted, read_permitted, write_permitted
from edgesplit.mqtt import messages
from edgesplit.release.manifest import Signed, Statement
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Desired, Device, GatewayRow
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow, RolloutRow

log = logging.getLogger(__name__)

LOCK = ".devices.lock"
"""Lock file beside the folder of releases."""


class PermittedDevices:
    """The lists in the offload server's folder of releases, which all controller processes change."""

    def __init__(self, database: Database, offload_releases: Path) -> None:
        self._database = database
        self._folder = offload_releases
        self._read: dict[str, tuple[os.stat_result, set[str]]] = {}
        """What each list contained, and the state of its file then, by release."""

    def add(self, release: str, device: str) -> None:
        """List a device that is given content keys of the release, before it learns of them."""
        self._append(release, {device})

    def complete(self) -> None:
        """Create missing lists, and list every device that belongs in one: after an update from 0.2, a restore, or a
        power cut."""
        with self._database.read() as session:
            permitted = _from_database(session)
        for release in self._encrypted():
            self._append(release, permitted.get(release, set()))

    def forget(self, device: str) -> None:
        """Take a device that was removed out of every list: its name may be claimed again."""
        for release in self._encrypted():
            home = self._folder / release
            with self._locked():
                if device in (listed := self._listed(home)):
                    write_permitted(home, listed - {device})

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other processes and threads from changing a list."""
        with self._folder.with_name(LOCK).open("ab") as file:  # of a kind that locks on network file systems, too
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _encrypted(self) -> list[str]:
        return sorted(keys.parent.name for keys in self._folder.glob(f"*/{CLEAR_KEYS_FILE}"))

    def _append(self, release: str, devices: Collection[str]) -> None:
        home = self._folder / release
        try:
            with self._locked():
                listed = self._listed(home)
                missing = set(devices) - listed
                if missing or not (home / PERMITTED_FILE).exists():
                    append_permitted(home, missing)
                    listed |= missing
                    self._read[release] = (home / PERMITTED_FILE).stat(), listed
        except FileNotFoundError:
            return  # not exported yet: a restored folder is completed when it is
        except OSError as error:
            log.error("release %s cannot be used by %s: %s", release[:12], sorted(devices)[:3], error.strerror)

    def _listed(self, home: Path) -> set[str]:
        """The devices in a list; read only where the file has changed since it was read."""
        try:
            state = (home / PERMITTED_FILE).stat()
            known = self._read.get(home.name)
            if known is None or not os.path.samestat(known[0], state) or known[0].st_size != state.st_size:
                known = self._read[home.name] = state, set(read_permitted(home))
            return known[1]
        except FileNotFoundError:
            return set()


def _from_database(session: Session) -> dict[str, set[str]]:
    """Devices by release: what they shall run, what rollouts brought to them before, what gateways store."""
    desired = select(Desired.release, Desired.device)
    assigned = select(RolloutRow.release, RolloutDeviceRow.device).join(
        RolloutRow, RolloutRow.id == RolloutDeviceRow.rollout
    )
    permitted: dict[str, set[str]] = {}
    for query in (desired, assigned.where(RolloutDeviceRow.counter > 0)):
        for release, device in session.execute(query):
            permitted.setdefault(release, set()).add(device)
    gateways = select(Device).join(GatewayRow, GatewayRow.device == Device.name).where(Device.statement.is_not(None))
    for gateway in session.scalars(gateways):
        statement = messages.decode(messages.decode(gateway.statement or b"", Signed).payload, Statement)
        for stored in statement.gateway_releases:
            permitted.setdefault(stored.release, set()).add(gateway.name)
    return permitted
