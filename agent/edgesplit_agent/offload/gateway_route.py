"""Offload route of this device: directly to the cloud's server of its enrolment, or through a gateway.

Only a signed statement can name a gateway, and the gateway's certificate must carry its name, whatever address it is
reached at. Neither the broker nor the network can redirect a device to another server.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from edgesplit.errors import UsageError
from edgesplit.identifiers import gateway_host
from edgesplit.links import parse_host_and_port, parse_link
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.release.manifest import Gateway

if TYPE_CHECKING:
    from edgesplit.link_emulation import ShapedLink

log = logging.getLogger(__name__)


class GatewayRoute:
    """Directs one `OffloadClient` to the gateway of the statement, or back to its home address."""

    def __init__(
        self, remote: OffloadClient | None, home: tuple[str, int] | None, *, link: str = "", is_fixed: bool = False
    ):
        """Start at `home`.

        - `home`: (host, port) to connect to instead of the client's URL, or None.
        - `link`: emulated link, applied to a gateway too; empty for none.
        - `is_fixed`: the device's operator fixed the offload target (--offload), so statements do not change it.
        """
        self._remote = remote
        self._home = (remote.url, home) if remote is not None else ("", None)
        self._link = link
        self._is_fixed = is_fixed
        self._lock = threading.Lock()
        self._gateway: Gateway | None = None
        self._shaped: ShapedLink | None = None

    @property
    def gateway(self) -> str:
        """Name of the gateway; empty where this device offloads to the cloud directly."""
        return self._gateway.device if self._gateway else ""

    def use(self, gateway: Gateway | None) -> None:
        """Offload through `gateway` from now on, or directly to the cloud with None. An unusable gateway is logged and
        ignored."""
        with self._lock:
            if self._remote is None or gateway == self._gateway:
                return
            if self._is_fixed:
                log.warning("the statement's gateway is ignored, because --offload is given")
                return
            try:
                self._switch(self._remote, gateway)
            except UsageError as error:
                log.error("the statement's gateway cannot be used: %s", error)

    def stop(self) -> None:
        """Stop the emulated link to a gateway."""
        with self._lock:
            if self._shaped is not None:
                self._shaped.stop()

    def _switch(self, remote: OffloadClient, gateway: Gateway | None) -> None:
        old = self._shaped  # stopped last, when nothing connects through it any more
        if gateway is None:
            self._shaped = None
            remote.retarget(*self._home)
        else:
            via = parse_host_and_port(gateway.address, "gateway")
            url = f"https://{gateway_host(gateway.device)}"
            self._shaped = self._emulate_link(via)
            remote.retarget(url, ("127.0.0.1", self._shaped.port) if self._shaped else via)
        self._gateway = gateway
        log.info("offloading through %s", gateway.device if gateway else "no gateway")
        if old is not None:
            old.stop()

    def _emulate_link(self, target: tuple[str, int]) -> ShapedLink | None:
        if not self._link:
            return None
        from edgesplit.link_emulation import ShapedLink

        shaped = ShapedLink(*target, parse_link(self._link))
        shaped.start()
        return shaped
