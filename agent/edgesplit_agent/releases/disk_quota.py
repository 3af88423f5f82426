"""Room for releases on this device's disk: what must be dropped for the next one, and when there is none.

`drop_next` is the whole policy; measuring and dropping are the chunk store's. What runs, what is on trial and what may
be gone back to are `protected`: they are never dropped, whatever is wanted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from edgesplit.errors import EdgeError

RESERVE_BYTES = 16 * 2**20
"""Never filled: logs, metadata and the next session number need room too."""
PAPERS_BYTES = 2**20
"""What a release needs besides its slices: manifest and proof."""


class NoRoom(EdgeError):
    """The release does not fit, and nothing may be dropped for it. It is tried again, for there may be room later."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A release on disk, or what is here of one."""

    release: str
    kept_since: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes, as the file system counts them."""

    free: int
    held: int
    """By all releases here and what is on its way into one; what several share counts once."""
    quota: int
    """`held` shall not exceed."""

    def lacks(self, need: int) -> int:
        """How much is missing for `need` more bytes; 0 where they fit."""
        return max(0, need + RESERVE_BYTES - self.free, self.held + need - self.quota)


def drop_next(release: str, need: int, disk: Disk, stored: Sequence[Stored], protected: Collection[str]) -> str | None:
    """The release to drop so that `release` finds `need` more bytes, the oldest that nobody needs first; None once they
    fit. NoRoom where they do not and nothing may be dropped."""
    if not disk.lacks(need):
        return None
    kept = {release, *protected}
    spare = sorted((one for one in stored if one.release not in kept), key=lambda one: (one.kept_since, one.release))
    if spare:
        return spare[0].release
    if disk.held + need > disk.quota:
        raise NoRoom(
            f"no room for release {release[:12]}: it needs {_mb(need)} more, and of the store's quota of"
            f" {_mb(disk.quota)} {_mb(disk.held)} are taken by what runs or may be gone back to; run the agent with a"
            " larger --store-quota, or deploy a plan with less on the device"
        )
    raise NoRoom(
        f"no room for release {release[:12]}: it needs {_mb(need + RESERVE_BYTES)} with reserve, {_mb(disk.free)} are"
        " free on the disk; free some, or deploy a plan with less on the device"
    )


def default_quota(total: int) -> int:
    """Half of the disk that the data folder lies on."""
    return total // 2


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
