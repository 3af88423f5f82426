"""How the controller itself is: what only it sees of its broker, its database and its disk. `edgectl doctor` asks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import text

import edgesplit
from edgesplit.errors import EdgeError
from edgesplit_controller.database import Database

Waits = Callable[[], Mapping[str, float]]
"""What waits now, by queue; and `broker`, 1 where it is connected."""


@dataclass(frozen=True)
class Condition:
    """Of one controller process."""

    database: Database
    data: Path | None = None
    """Its data folder; None: not known here."""
    waits: Waits = dict
    addresses: Mapping[str, str] | None = None
    """Where devices are told to go: `broker`, `offload`."""

    def told(self) -> dict[str, Any]:
        """Everything, as it is now; what fails is told, not raised."""
        waiting = dict(self.waits())
        connected = waiting.pop("broker", None)
        return {
            "version": edgesplit.__version__,
            "time": time.time(),
            "broker_connected": None if connected is None else bool(connected),
            "addresses": dict(self.addresses or {}),
            "database": self._database(),
            "disk": self._disk(),
            "waiting": waiting,
        }

    def _database(self) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            with self.database.read() as session:
                session.execute(text("select 1"))
            problem = ""
        except EdgeError as error:
            problem = str(error)
        kind = self.database.engine.dialect.name
        return {"kind": kind, "seconds": time.perf_counter() - began, "problem": problem}

    def _disk(self) -> dict[str, int] | None:
        if self.data is None:
            return None
        try:
            disk = os.statvfs(self.data)
        except OSError:
            return None
        return {"free_bytes": disk.f_bavail * disk.f_frsize, "bytes": disk.f_blocks * disk.f_frsize}
