"""Notification of the service manager by systemd's protocol (sd_notify(3)): one datagram per change, to a socket named
in the environment. Without such a socket every call does nothing."""

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
MAX_STATUS_LENGTH = 200
"""Maximum length of a status text."""


class ServiceManager:
    """The service manager: systemd, or `edgesplit-agent supervise`."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = watchdog_s
        """Watchdog timeout in seconds: without a notification for longer the service is restarted; 0: none."""

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> ServiceManager:
        """The service manager named in the environment; its variables are removed, so that no child process notifies
        for us."""
        address = environment.pop(SOCKET, "")
        watchdog_us, pid = environment.pop(WATCHDOG_US, ""), environment.pop(WATCHDOG_PID, "")
        ours = pid in ("", str(os.getpid())) and watchdog_us.isdigit()
        return cls(address, int(watchdog_us) / 1e6 if ours else 0.0)

    @property
    def is_present(self) -> bool:
        """Whether there is a service manager."""
        return bool(self._address)

    def ready(self, status: str) -> None:
        """Report that start-up is complete; the watchdog runs from now on."""
        self._send("READY=1", f"STATUS={status[:MAX_STATUS_LENGTH]}")

    def alive(self) -> None:
        """Send a watchdog notification."""
        self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """Report what the service is doing, for operators."""
        self._send(f"STATUS={text[:MAX_STATUS_LENGTH]}")

    def stopping(self) -> None:
        """Report an orderly stop."""
        self._send("STOPPING=1")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        message = "\n".join(line.replace("\n", " ") for line in lines)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
                sock.sendto(message.encode(), self._address)
        except OSError as error:
            log.debug("cannot notify the service manager: %s", error)
