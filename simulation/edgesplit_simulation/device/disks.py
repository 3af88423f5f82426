"""The disks of a simulated fleet: real files without waiting for fsync, with injected faults: full disks, power cuts
during a write, flipped bits.

Only durable writes (those that call fsync) pass through here. Loss of writes that were never synced is tested
elsewhere: here a power cut keeps everything written so far.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from edgesplit.atomic_files import override_sync
from edgesplit.testing.virtual_time import TaskKilled


@dataclass
class Disks:
    """The disks of all devices, below one folder."""

    folder: Path
    full_devices: set[str] = field(default_factory=set)
    """Names of devices whose disks are full."""
    power_cuts: dict[str, tuple[int, Callable[[], None]]] = field(default_factory=dict)
    """By device: how many more durable writes succeed before its power fails, and the function that switches it off."""
    write_counts: Counter[str] = field(default_factory=Counter)
    """Number of durable writes by device."""

    def installed(self) -> AbstractContextManager[None]:
        """While entered, every durable write of this process goes through `sync`."""
        return override_sync(self.sync)

    def sync(self, descriptor: int, path: Path) -> None:
        """Called for every durable write. Raises OSError (ENOSPC) on a full disk and `TaskKilled` where the device's
        power fails."""
        device = self._device_of(path)
        if not device:
            return
        self.write_counts[device] += 1
        if device in self.full_devices:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        if device in self.power_cuts:
            remaining, off = self.power_cuts[device]
            if remaining > 0:
                self.power_cuts[device] = remaining - 1, off
                return
            del self.power_cuts[device]
            off()
            raise TaskKilled

    def flip_bit(self, device: str, release: str, rng: random.Random) -> bool:
        """Flip one random bit in a file of that release on that device's disk; False where there is no such file."""
        slices = self.folder / device / "releases" / release / "slices"
        files = sorted(path for path in slices.rglob("*") if path.is_file() and path.stat().st_size)
        if not files:
            return False
        path = rng.choice(files)
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        # Releases may share files by hard link: write a new file, so that only this release is damaged.
        own = path.with_suffix(".flipped")
        own.write_bytes(data)
        own.replace(path)
        return True

    def _device_of(self, path: Path) -> str:
        try:
            return path.relative_to(self.folder).parts[0]
        except (ValueError, IndexError):
            return ""
