"""The disks of a fleet: real files, of which nothing is waited for; they fill up, and power fails amid a write.

Only what a device asks to be made durable is seen here. That a disk loses what was not is another matter, and has tests
of its own: here a power cut keeps what was written until then.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from edgesplit.atomic_files import syncing_by
from edgesplit.testing.virtual_time import Ended


@dataclass
class Disks:
    """Every device's, below one folder."""

    folder: Path
    full: set[str] = field(default_factory=set)
    """Devices whose disks take nothing."""
    cuts: dict[str, tuple[int, Callable[[], None]]] = field(default_factory=dict)
    """Devices whose power fails after so many more writes, and what switches them off."""
    synced: Counter[str] = field(default_factory=Counter)

    def mounted(self) -> AbstractContextManager[None]:
        """Use them for everything that this process writes durably."""
        return syncing_by(self.sync)

    def sync(self, descriptor: int, path: Path) -> None:
        """A device has written something. OSError on a full disk; Ended where its power fails."""
        device = self._device_of(path)
        if not device:
            return
        self.synced[device] += 1
        if device in self.full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        if device in self.cuts:
            left, off = self.cuts[device]
            if left > 0:
                self.cuts[device] = left - 1, off
                return
            del self.cuts[device]
            off()
            raise Ended

    def flip(self, device: str, release: str, dice: random.Random) -> bool:
        """Flip one bit of that release on that device's disk; False where nothing of it is there."""
        slices = self.folder / device / "releases" / release / "slices"
        files = sorted(path for path in slices.rglob("*") if path.is_file() and path.stat().st_size)
        if not files:
            return False
        path = dice.choice(files)
        data = bytearray(path.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        own = path.with_suffix(".flipped")  # a file that several releases share is damaged for this one only
        own.write_bytes(data)
        own.replace(path)
        return True

    def _device_of(self, path: Path) -> str:
        try:
            return path.relative_to(self.folder).parts[0]
        except (ValueError, IndexError):
            return ""
