"""Which controller answers, and what waits in it. How its parts are is `parts`' to say."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import edgesplit

Waits = Callable[[], Mapping[str, float]]
"""What waits now, by queue; and `broker`, 1 where it is connected."""


@dataclass(frozen=True)
class Condition:
    """Of one controller process."""

    waits: Waits = dict
    addresses: Mapping[str, str] | None = None
    """Where devices are told to go: `broker`, `offload`."""

    def told(self) -> dict[str, Any]:
        """Everything, as it is now."""
        waiting = {name: count for name, count in self.waits().items() if name != "broker"}
        return {
            "version": edgesplit.__version__,
            "time": time.time(),
            "addresses": dict(self.addresses or {}),
            "waiting": waiting,
        }
