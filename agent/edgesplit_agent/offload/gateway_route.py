"""To whom this device offloads: the cloud's server that it enrolled with, or the gateway that its statement names.

Only a signed statement leads elsewhere, and the gateway's certificate must carry its name, wherever it is reached; so
neither the broker nor the network sends a device to a server of their own.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from edgesplit.errors import UsageError
from edgesplit.identifiers import gateway_host
from edgesplit.links import host_and_port, parse_link
from edgesplit.offload_client.pool import Remote
from edgesplit.release.manifest import Gateway

if TYPE_CHECKING:
    from edgesplit.link_emulation import ShapedLink

log = logging.getLogger(__name__)


class Way:
    """Leads one `Remote`, which begins at `home`: HOST:PORT to connect to instead, or None."""

    def __init__(self, remote: Remote | None, home: tuple[str, int] | None, *, link: str = "", stays: bool = False):
        """`link`: emulated, to a gateway too. `stays`: an operator of this device has said where to offload."""
        self._remote = remote
        self._home = (remote.url, home) if remote is not None else ("", None)
        self._link = link
        self._stays = stays
        self._lock = threading.Lock()
        self._gateway: Gateway | None = None
        self._shaped: ShapedLink | None = None

    @property
    def gateway(self) -> str:
        """The gateway's name; empty where this device offloads to the cloud."""
        return self._gateway.device if self._gateway else ""

    def lead(self, gateway: Gateway | None) -> None:
        """Offload through that gateway from now on, or with None to the cloud."""
        with self._lock:
            if self._remote is None or gateway == self._gateway:
                return
            if self._stays:
                log.warning("the statement names a gateway, and --offload says otherwise: that stays")
                return
            try:
                self._go(self._remote, gateway)
            except UsageError as error:
                log.error("the statement's gateway cannot be used: %s", error)

    def stop(self) -> None:
        """End the emulated link to a gateway."""
        with self._lock:
            if self._shaped is not None:
                self._shaped.stop()

    def _go(self, remote: Remote, gateway: Gateway | None) -> None:
        old = self._shaped
        if gateway is None:
            self._shaped = None
            remote.lead_to(*self._home)
        else:
            via = host_and_port(gateway.address, "gateway")
            url = f"https://{gateway_host(gateway.device)}"
            self._shaped = self._emulated(via)
            remote.lead_to(url, ("127.0.0.1", self._shaped.port) if self._shaped else via)
        self._gateway = gateway
        log.info("offloading through %s", gateway.device if gateway else "no gateway")
        if old is not None:
            old.stop()

    def _emulated(self, target: tuple[str, int]) -> ShapedLink | None:
        if not self._link:
            return None
        from edgesplit.link_emulation import ShapedLink

        shaped = ShapedLink(*target, parse_link(self._link))
        shaped.start()
        return shaped
