"""Status of the controller process that answers an API request. The status of its components is in `components`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import edgesplit

ReadQueueLengths = Callable[[], Mapping[str, float]]
"""Reads the length of each queue by name; the entry `broker` is 1 while the MQTT session is connected."""


@dataclass(frozen=True)
class ProcessStatus:
    """Status of one controller process."""

    read_queue_lengths: ReadQueueLengths = dict
    addresses: Mapping[str, str] | None = None
    """Addresses that are given to devices, under the keys `broker` and `offload`."""

    def to_dict(self) -> dict[str, Any]:
        """The status as the API returns it: version, Unix time, addresses, queue lengths."""
        queue_lengths = {name: count for name, count in self.read_queue_lengths().items() if name != "broker"}
        return {
            "version": edgesplit.__version__,
            "time": time.time(),
            "addresses": dict(self.addresses or {}),
            "waiting": queue_lengths,
        }
