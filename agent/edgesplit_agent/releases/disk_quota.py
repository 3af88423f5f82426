"""Disk space for releases: which one is evicted for the next, and when there is no room.

`eviction_candidate` is the whole policy; the chunk store measures and deletes. Releases in `protected` (running, on
trial, or needed for a rollback) are never evicted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from edgesplit.errors import EdgeError

RESERVE_BYTES = 16 * 2**20
"""Free space that releases never use: logs, metadata and the next session number need room too."""
MANIFEST_ALLOWANCE_BYTES = 2**20
"""Allowance for a release's manifest and proof, beside its slices."""


class NoRoom(EdgeError):
    """The release does not fit, and nothing may be evicted for it. The step is retried, because there may be room
    later."""


@dataclass(frozen=True, slots=True)
class StoredReleaseAge:
    """A release on disk, complete or in assembly."""

    release: str
    kept_since: float
    """Unix seconds since which it is here."""


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Use of the disk, in bytes as the file system counts them."""

    free: int
    """Free on the file system."""
    used: int
    """Used by all releases and assemblies; what several share counts once."""
    quota: int
    """Limit of `used`."""

    def shortage(self, need: int) -> int:
        """Bytes that must be freed for `need` more; 0 where they fit."""
        return max(0, need + RESERVE_BYTES - self.free, self.used + need - self.quota)


def eviction_candidate(
    release: str, need: int, disk: DiskUsage, stored: Sequence[StoredReleaseAge], protected: Collection[str]
) -> str | None:
    """The release to evict so that `release` finds `need` more bytes: the oldest that is not protected. None once they
    fit. NoRoom where they do not fit and nothing may be evicted."""
    if not disk.shortage(need):
        return None
    excluded = {release, *protected}
    evictable = [entry for entry in stored if entry.release not in excluded]
    if evictable:
        return min(evictable, key=lambda entry: (entry.kept_since, entry.release)).release
    if disk.used + need > disk.quota:
        raise NoRoom(
            f"no room for release {release[:12]}: it needs {_mb(need)} more, and of the store's quota of"
            f" {_mb(disk.quota)} {_mb(disk.used)} are used by releases that run or are kept for a rollback; run the"
            " agent with a larger --store-quota, or deploy a plan with less on the device"
        )
    raise NoRoom(
        f"no room for release {release[:12]}: it needs {_mb(need + RESERVE_BYTES)} with reserve, {_mb(disk.free)} are"
        " free on the disk; free some space, or deploy a plan with less on the device"
    )


def default_quota(total: int) -> int:
    """Half of the disk on which the data folder lies."""
    return total // 2


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
