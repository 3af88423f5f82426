"""Waits for flashed devices until each is online at the controller, or a timeout has passed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from edgesplit.errors import LinkError, UsageError

POLL_S = 2.0
"""Seconds between two requests for a device's state."""


class StateSource(Protocol):
    """The part of the controller's API that is used here."""

    def get(self, path: str, **query: Any) -> Any:
        """GET a JSON document."""
        ...


@dataclass(frozen=True, slots=True)
class WaitProgress:
    """States of the awaited devices, and how long they were waited for."""

    states: dict[str, str]
    seconds: float

    @property
    def online(self) -> list[str]:
        """Names of the devices that are online."""
        return [name for name, state in self.states.items() if state == "online"]


def wait_online(
    api: StateSource, devices: Collection[str], timeout_s: float, on_progress: Callable[[WaitProgress], None],
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
) -> WaitProgress:  # fmt: skip
    """Poll until all devices are online. LinkError after `timeout_s` names those that are not; errors of the connection
    to the controller are retried."""
    started_at = clock()
    progress = WaitProgress(dict.fromkeys(devices, "claimed"), 0.0)
    while True:
        progress = WaitProgress(
            {name: _state(api, name, state) for name, state in progress.states.items()}, clock() - started_at
        )
        on_progress(progress)
        if len(progress.online) == len(progress.states):
            return progress
        if progress.seconds >= timeout_s:
            raise LinkError(_timeout_text(progress))
        sleep(POLL_S)


def _state(api: StateSource, name: str, previous: str) -> str:
    """State of a device; one that was online once is not polled again."""
    if previous == "online":
        return previous
    try:
        answer = api.get(f"/v1/devices/{quote(name, safe='')}")
    except UsageError:
        raise
    except LinkError:
        return previous
    if answer["state"] == "revoked":
        raise UsageError(f"{name} was revoked meanwhile")
    return str(answer["state"])


def _timeout_text(progress: WaitProgress) -> str:
    missing = [name for name, state in progress.states.items() if state != "online"]
    listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return (
        f"not online within {progress.seconds:.0f} s: {listed}. Has it power and a network, and does it reach the"
        " controller? Put its card into a reader: edgesplit/first-boot.log says what failed, if anything did"
    )
