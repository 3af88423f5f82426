"""Waiting for devices that were flashed: until each is online at the controller, or too long has passed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from edgesplit.errors import LinkError, UsageError

POLL_S = 2.0


class Asked(Protocol):
    """The controller's API."""

    def get(self, path: str, **query: Any) -> Any:
        """GET of JSON."""
        ...


@dataclass(frozen=True, slots=True)
class Seen:
    """How the devices are."""

    states: dict[str, str]
    seconds: float

    @property
    def online(self) -> list[str]:
        """Those that have arrived."""
        return [name for name, state in self.states.items() if state == "online"]


def wait_online(
    api: Asked,
    devices: Collection[str],
    timeout_s: float,
    told: Callable[[Seen], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Seen:
    """Until all are online. LinkError after `timeout_s` names those that are not; a controller that is away is asked
    again."""
    begun = clock()
    seen = Seen(dict.fromkeys(devices, "claimed"), 0.0)
    while True:
        seen = Seen({name: _state(api, name, state) for name, state in seen.states.items()}, clock() - begun)
        told(seen)
        if len(seen.online) == len(seen.states):
            return seen
        if seen.seconds >= timeout_s:
            raise LinkError(_missing(seen))
        sleep(POLL_S)


def _state(api: Asked, name: str, before: str) -> str:
    """What has arrived stays so: it is not waited for again."""
    if before == "online":
        return before
    try:
        found = api.get(f"/v1/devices/{quote(name, safe='')}")
    except UsageError:
        raise
    except LinkError:
        return before
    if found["state"] == "revoked":
        raise UsageError(f"{name} was revoked meanwhile")
    return str(found["state"])


def _missing(seen: Seen) -> str:
    late = [name for name, state in seen.states.items() if state != "online"]
    listed = ", ".join(late[:8]) + (f" and {len(late) - 8} more" if len(late) > 8 else "")
    return (
        f"not online within {seen.seconds:.0f} s: {listed}. Has it power and a network, and does it reach the"
        " controller? Put its card into a reader: edgesplit/first-boot.log says what failed, if anything did"
    )
