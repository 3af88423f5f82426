"""Which devices may use the remote half of an encrypted release: those that the controller listed beside it, because
they were given content keys of it.

A release without such a list may be used by every device of the installation: one that is not encrypted, whose chunks
each of them may read anyway, and any release on a gateway. To a device that may not use it, a release is not here.
"""

from __future__ import annotations

import logging
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from edgesplit import identifiers
from edgesplit.crypto.permitted_devices import PERMITTED_FILE, read_permitted
from edgesplit.errors import MalformedMessage, NotFound
from edgesplit.oip import protocol as oip

log = logging.getLogger(__name__)

OPERATOR = "operator"
"""Common name in the certificate of a client that may change something: issued by the controller, and impossible for a
device."""
LOOK_EVERY_S = 0.5
"""Least interval between two checks of one file."""


class _List(NamedTuple):
    """What was read last of one release's list."""

    checked_at: float
    version: tuple[int, int, int] | None
    """Which file it was; None: there is none."""
    devices: frozenset[str] | None
    """None: every device may use the release."""


class ReleasePermissions:
    """The lists beside the releases in `folder`, read again when they change. Thread-safe."""

    def __init__(self, folder: Path, *, look_every_s: float = LOOK_EVERY_S) -> None:
        self._folder = folder
        self._look_every_s = look_every_s
        self._known: dict[str, _List] = {}

    def check(self, digest: str, client: str | None) -> None:
        """Raise NotFound if the client with this certificate name (None: a server without certificates) may not use the
        release."""
        if not self.allows(digest, client):
            log.info("%s may not use release %s", client, digest[:12])
            raise NotFound(f"release {digest[:12]} is not here")

    def check_model(self, name: str, client: str | None) -> None:
        """Raise NotFound if the client may not use the release of the model with this name. A name that is no model's
        passes: the caller finds no such model."""
        if (digest := _digest_of(name)) is not None:
            self.check(digest, client)

    def allows_model(self, name: str, client: str | None) -> bool:
        """Whether the client may use that model; a name that is no model's is the operator's to see."""
        digest = _digest_of(name)
        return _is_exempt(client) if digest is None else self.allows(digest, client)

    def allows(self, digest: str, client: str | None) -> bool:
        """Whether the client may use the release."""
        if _is_exempt(client):
            return True
        known = self._known.get(digest)
        if known is None or monotonic() - known.checked_at >= self._look_every_s:
            known = self._read(digest, known)
            if (self._folder / digest).is_dir():  # clients can invent any number of others
                self._known[digest] = known
        return known.devices is None or client in known.devices

    def _read(self, digest: str, known: _List | None) -> _List:
        now = monotonic()
        try:
            status = (self._folder / digest / PERMITTED_FILE).stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if known is not None and known.version == version:
                return _List(now, version, known.devices)
            return _List(now, version, read_permitted(self._folder / digest))
        except FileNotFoundError:
            return _List(now, None, None)
        except OSError as error:
            log.error("the devices of release %s cannot be read: %s", digest[:12], error.strerror)
            return _List(now, None, frozenset())


def _is_exempt(client: str | None) -> bool:
    return client is None or client == OPERATOR


def _digest_of(name: str) -> str | None:
    """The release of the model with this name; None if the name is no model's."""
    try:
        return identifiers.sha256_hex(oip.parse_remote_name(name)[0])
    except MalformedMessage:
        return None
