"""Cache of loaded slices within a memory budget: loaded on demand, least recently used evicted first.

No slice in use is evicted to make room. One in use that is evicted by name is loaded anew for the next request, and its
memory counts until its last user has finished. Sizes are estimates from the slices' files, because engines do not
report their memory.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from edgesplit.errors import Busy, ModelRefused
from edgesplit.runtime import Program

log = logging.getLogger(__name__)

MEMORY_PER_FILE_BYTE = 1.3
"""A session's memory divided by its file size: alexnet took 307 MB for 244."""
SESSION_BYTES = 1 << 20
"""Memory of a session without weights."""


class SliceKey(NamedTuple):
    """Identifies a loaded slice: of a release, for single inputs or for batches."""

    release: str
    name: str
    """The slice's name, under which its program is known."""
    stacked: bool = False
    wide: bool = False
    """Whether it runs with several threads."""


@dataclass(frozen=True)
class LoadableSlice:
    """A slice that can be loaded."""

    key: SliceKey
    file_bytes: int
    load: Callable[[], Program] = field(compare=False)

    @property
    def bytes(self) -> int:
        """Estimated memory while it is loaded."""
        return int(self.file_bytes * MEMORY_PER_FILE_BYTE) + SESSION_BYTES


class _Entry:
    """A slice that is loaded or being loaded. `users` and `is_counted` (whether its bytes count against the budget) are
    changed by the cache only."""

    def __init__(self, slice_: LoadableSlice) -> None:
        self.slice_ = slice_
        self.users = 0
        self.is_counted = False
        self.program: Program | None = None
        self._loading = threading.Lock()

    def load(self) -> Program:
        """Its program, loaded by one thread while others that need it wait."""
        with self._loading:
            if self.program is None:
                self.program = self.slice_.load()
            return self.program


class SliceCache:
    """Programs of slices, within `budget` bytes (None: unbounded). Thread-safe."""

    def __init__(self, budget: int | None = None) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._entries: OrderedDict[SliceKey, _Entry] = OrderedDict()
        self._evicted_in_use: set[_Entry] = set()

    @property
    def bytes(self) -> int:
        """Estimated memory in use."""
        with self._lock:
            return self._used_bytes()

    def has_loaded(self, slices: Sequence[LoadableSlice]) -> bool:
        """Whether all of them are loaded."""
        for (
            slice_
        ) in slices:  # without the lock: single look-ups are atomic, and the result may be outdated at once anyway
            entry = self._entries.get(slice_.key)
            if entry is None or entry.program is None:
                return False
        return True

    def has_room(self, slices: Sequence[LoadableSlice]) -> bool:
        """Whether all of them could be loaded without evicting anything."""
        with self._lock:
            missing = sum(slice_.bytes for slice_ in slices if slice_.key not in self._entries)
            return self._budget is None or self._used_bytes() + missing <= self._budget

    def borrow(self, slices: Sequence[LoadableSlice]) -> _Borrowed:
        """A context manager that gives the programs of these slices by name: loaded if needed, and not evicted until it
        ends.

        Entering it raises ModelRefused if they exceed the budget, Busy if the slices in use leave no room for them now.
        """
        return _Borrowed(self, slices)

    def release(self, entries: Sequence[_Entry]) -> None:
        """A borrower has finished with these entries."""
        with self._lock:
            for entry in entries:
                entry.users -= 1
                if not entry.users:
                    self._evicted_in_use.discard(entry)
                    if entry.program is None:  # loading it failed
                        self._forget(entry)

    def evict(self, release: str, keys: Collection[SliceKey] | None = None) -> None:
        """Evict the release's slices; only those in `keys`, if given. The runs that use one finish with it."""
        with self._lock:
            for entry in list(self._entries.values()):
                key = entry.slice_.key
                if key.release == release and (keys is None or key in keys):
                    self._forget(entry)
                    if entry.users:
                        self._evicted_in_use.add(entry)

    def acquire(self, slices: Sequence[LoadableSlice]) -> list[_Entry]:
        """Entries of all of them, in use from now on. Raises ModelRefused or Busy like `borrow`."""
        with self._lock:
            entries, all_counted = [], True
            for piece in slices:
                entry = self._entries.get(piece.key)
                if entry is None:
                    entry = self._entries[piece.key] = _Entry(piece)
                self._entries.move_to_end(piece.key)
                entry.users += 1
                entries.append(entry)
                all_counted = all_counted and entry.is_counted
            if not all_counted:
                self._make_room(entries)
            return entries

    def _make_room(self, entries: Sequence[_Entry]) -> None:
        """Evict least recently used slices until these fit and count them; if they do not fit, give them back and
        raise."""
        try:
            self._check_room(entries)
        except (ModelRefused, Busy):
            for entry in entries:
                entry.users -= 1
                if not entry.is_counted and not entry.users:
                    self._forget(entry)
            raise
        for entry in entries:
            entry.is_counted = True

    def _check_room(self, entries: Sequence[_Entry]) -> None:
        if self._budget is None:
            return
        needed = sum(entry.slice_.bytes for entry in entries)
        if needed > self._budget:
            raise ModelRefused(
                f"this model takes about {needed / 1e6:.0f} MB, and this server may use {self._budget / 1e6:.0f} MB for"
                " models: give it more with --memory"
            )
        missing = sum(entry.slice_.bytes for entry in entries if not entry.is_counted)
        idle = [candidate for candidate in self._entries.values() if candidate.is_counted and not candidate.users]
        while self._used_bytes() + missing > self._budget:
            if not idle:
                raise Busy("the memory for models is in use by running models")
            oldest = idle.pop(0)
            log.info("evicting slice %s: its memory is needed for others", oldest.slice_.key.name)
            self._forget(oldest)

    def _forget(self, entry: _Entry) -> None:
        if self._entries.get(entry.slice_.key) is entry:
            del self._entries[entry.slice_.key]

    def _used_bytes(self) -> int:
        held = chain(self._entries.values(), self._evicted_in_use)
        return sum(entry.slice_.bytes for entry in held if entry.is_counted)


class _Borrowed:
    """Context manager with the programs of borrowed slices."""

    __slots__ = ("_entries", "_memory", "_pieces")

    def __init__(self, memory: SliceCache, pieces: Sequence[LoadableSlice]) -> None:
        self._memory = memory
        self._pieces = pieces

    def __enter__(self) -> dict[str, Program]:
        self._entries = self._memory.acquire(self._pieces)
        try:
            return {entry.slice_.key.name: entry.program or entry.load() for entry in self._entries}
        except BaseException:
            self._memory.release(self._entries)
            raise

    def __exit__(self, *_: object) -> None:
        self._memory.release(self._entries)
