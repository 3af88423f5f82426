"""What an offload server reports to the controller: devices that flood it, the expiry of its revocation list, and how
far it is confined.

The server names a device as long as it keeps refusing it (`edgesplit.http1.admission`); the device is recorded, the
first report is an event, and the fleet's pages show it. Whether the server can be reached is another probe's
finding.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from edgesplit.errors import EdgeError, LinkError
from edgesplit.identifiers import device_name
from edgesplit_controller.components.probes import ProbeResult, get
from edgesplit_controller.pki.revocation_hook import RevocationCommand

log = logging.getLogger(__name__)

STATUS_PATH = "/v2/edgesplit/status"
"""Path of the offload server's status, for the operator's certificate."""
MAX_STATUS_BYTES = 256 * 1024
LISTS = "revocation list"
"""Name of the component that the revocation lists are."""
SERVING = "serving processes"
"""Name of the component that says how far the offload server's processes are confined."""
OnFlood = Callable[[str, int, str], None]
"""Called with a device that floods an offload server, the number of its refusals, and their reasons."""


class RefusedClient(msgspec.Struct, frozen=True):
    """A device that the server keeps refusing."""

    device: Annotated[str, Meta(max_length=63)]
    refused: Annotated[int, Meta(ge=0, lt=2**53)]
    reasons: Annotated[str, Meta(max_length=200)]


class OffloadStatus(msgspec.Struct, frozen=True):
    """An offload server's answer."""

    refused_clients: Annotated[tuple[RefusedClient, ...], Meta(max_length=2048)]
    revocation_list_expires: float | None
    keeps_network: Annotated[str, Meta(max_length=200)]
    """Why its serving processes can open connections; empty if they cannot."""


class OffloadStatusProbes:
    """Asks an offload server for its status, reports the floods in it, and has a probe for each component that it is
    about. `lists` asks, and comes first."""

    def __init__(
        self, url: str, tls: ssl.SSLContext, on_flood: OnFlood, *, now: Callable[[], float],
        delivery: RevocationCommand | None = None,
    ) -> None:  # fmt: skip
        """`tls` has the operator's certificate. `delivery` brings the list to an external broker, if there is one."""
        self._url = url
        self._tls = tls
        self._on_flood = on_flood
        self._now = now
        self._delivery = delivery
        self._status: OffloadStatus | None = None

    def lists(self) -> ProbeResult | None:
        """State of the revocation lists; None while the offload server's is unknown and nothing else is wrong."""
        self._status = self._fetch()
        for client in self._status.refused_clients if self._status is not None else ():
            try:
                self._on_flood(device_name(client.device), client.refused, client.reasons)
            except EdgeError as error:  # the next device must be recorded, too
                log.warning("a flood of %.63s at %s was not recorded: %s", client.device, self._url, error)
        if self._delivery is not None and self._delivery.problem:
            return _bad(f"the broker may use an old list, --on-revocation failed: {self._delivery.problem}")
        if self._status is None:
            return None
        expires = self._status.revocation_list_expires
        if expires is not None and expires <= self._now():
            return _bad(f"{self._url} has an expired list: it stays in force, later revocations may be missing there")
        return ProbeResult(LISTS, "good", "delivered and valid")

    def confinement(self) -> ProbeResult | None:
        """Whether the serving processes are confined; None while that is unknown."""
        if self._status is None:
            return None
        if reason := self._status.keeps_network:
            return ProbeResult(SERVING, "unknown", f"they can open connections: {reason}")
        return ProbeResult(SERVING, "good", "confined: they open no connections and gain no privileges")

    def _fetch(self) -> OffloadStatus | None:
        try:
            code, body, _ = get(self._url, STATUS_PATH, self._tls, MAX_STATUS_BYTES)
            return msgspec.json.decode(body, type=OffloadStatus) if code == 200 else None
        except (LinkError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.debug("no status of the offload server %s: %s", self._url, error)
            return None


def _bad(text: str) -> ProbeResult:
    return ProbeResult(LISTS, "bad", text, event="revocations.outdated")
