"""What a service tells whoever started it, by systemd's protocol (sd_notify(3)): a datagram per change, to a socket
named in the environment. Where there is none, nothing is told and nothing fails.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping
from typing import Final

log = logging.getLogger(__name__)

SOCKET: Final = "NOTIFY_SOCKET"
WATCHDOG_US: Final = "WATCHDOG_USEC"
WATCHDOG_PID: Final = "WATCHDOG_PID"
LONGEST_STATUS = 200


class Manager:
    """systemd, or `edgesplit-agent supervise`."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = watchdog_s
        """It waits no longer than this for a sign of life; 0: it does not wait for any."""

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Manager:
        """The one that the environment names; taken out of it, so that no child speaks for us."""
        address = environment.pop(SOCKET, "")
        watchdog_us, pid = environment.pop(WATCHDOG_US, ""), environment.pop(WATCHDOG_PID, "")
        ours = pid in ("", str(os.getpid())) and watchdog_us.isdigit()
        return cls(address, int(watchdog_us) / 1e6 if ours else 0.0)

    @property
    def listens(self) -> bool:
        """Whether there is one."""
        return bool(self._address)

    def ready(self, status: str) -> None:
        """From now on it may expect signs of life."""
        self._tell("READY=1", f"STATUS={status[:LONGEST_STATUS]}")

    def alive(self) -> None:
        """A sign of life."""
        self._tell("WATCHDOG=1")

    def status(self, text: str) -> None:
        """What goes on, for people."""
        self._tell(f"STATUS={text[:LONGEST_STATUS]}")

    def stopping(self) -> None:
        """We end because we were told to."""
        self._tell("STOPPING=1")

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        said = "\n".join(line.replace("\n", " ") for line in lines)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as ours:
                ours.sendto(said.encode(), self._address)
        except OSError as error:
            log.debug("the service manager does not listen: %s", error)
