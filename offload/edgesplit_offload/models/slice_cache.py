"""Slices that are loaded, within a budget: loaded on demand, let go of least recently used first, never one that runs.

Bytes are an estimate from the slices' files: what an engine makes of them it does not tell.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from edgesplit.errors import Busy, ModelRefused
from edgesplit.runtime import Program

log = logging.getLogger(__name__)

OVERHEAD = 1.3
"""A session's memory against its files: alexnet took 307 MB for 244."""
SESSION_BYTES = 1 << 20
"""What a session takes without weights."""


class Key(NamedTuple):
    """What is loaded: a slice of a release, for one input at a time or for stacks."""

    release: str
    name: str
    """The slice's: programs are known by it."""
    stacked: bool = False
    wide: bool = False
    """By several threads."""


@dataclass(frozen=True)
class Piece:
    """One slice as it can be loaded."""

    key: Key
    file_bytes: int
    load: Callable[[], Program] = field(compare=False)

    @property
    def bytes(self) -> int:
        """About what it takes while it is loaded."""
        return int(self.file_bytes * OVERHEAD) + SESSION_BYTES


class _Entry:
    """A piece that is loaded, or being loaded. `users` and whether its bytes count are the memory's to change."""

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.users = 0
        self.counts = False
        self.program: Program | None = None
        self._loading = threading.Lock()

    def loaded(self) -> Program:
        """Its program, loaded by one thread while others that want it wait."""
        with self._loading:
            if self.program is None:
                self.program = self.piece.load()
            return self.program


class Memory:
    """Programs of slices, within `budget` bytes (None: no bound). Thread-safe."""

    def __init__(self, budget: int | None = None) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()

    @property
    def bytes(self) -> int:
        """About what is taken now."""
        with self._lock:
            return self._taken()

    def has(self, pieces: Sequence[Piece]) -> bool:
        """Are all of them loaded?"""
        for one in pieces:  # one look at a time, which needs no lock: the next moment may have another answer anyway
            entry = self._entries.get(one.key)
            if entry is None or entry.program is None:
                return False
        return True

    def has_room(self, pieces: Sequence[Piece]) -> bool:
        """Could all of them be loaded without letting anything go?"""
        with self._lock:
            missing = sum(one.bytes for one in pieces if one.key not in self._entries)
            return self._budget is None or self._taken() + missing <= self._budget

    def lent(self, pieces: Sequence[Piece]) -> _Lent:
        """A block that has the programs of these slices by name: loaded now where they were not, kept until it ends.

        ModelRefused where they are more than the budget, Busy where what runs leaves no room for them just now.
        """
        return _Lent(self, pieces)

    def give_back(self, entries: Sequence[_Entry]) -> None:
        """One that had them needs them no more."""
        with self._lock:
            for entry in entries:
                entry.users -= 1
                if entry.program is None and not entry.users:  # it could not be loaded
                    self._forget(entry)

    def let_go(self, release: str, keys: Collection[Key] | None = None) -> None:
        """Forget what is loaded of that release (only these keys, if given) and does not run."""
        with self._lock:
            for entry in list(self._entries.values()):
                key = entry.piece.key
                if key.release == release and not entry.users and (keys is None or key in keys):
                    self._forget(entry)

    def take(self, pieces: Sequence[Piece]) -> list[_Entry]:
        """Entries of all of them, in use from now on."""
        with self._lock:
            entries, counted = [], True
            for piece in pieces:
                entry = self._entries.get(piece.key)
                if entry is None:
                    entry = self._entries[piece.key] = _Entry(piece)
                self._entries.move_to_end(piece.key)
                entry.users += 1
                entries.append(entry)
                counted = counted and entry.counts
            if not counted:
                self._make_room(entries)
            return entries

    def _make_room(self, entries: Sequence[_Entry]) -> None:
        """Let the least recently used go until these fit; they count from now on, or are not in use any more."""
        try:
            self._check_room(entries)
        except (ModelRefused, Busy):
            for entry in entries:
                entry.users -= 1
                if not entry.counts and not entry.users:
                    self._forget(entry)
            raise
        for entry in entries:
            entry.counts = True

    def _check_room(self, entries: Sequence[_Entry]) -> None:
        if self._budget is None:
            return
        needed = sum(entry.piece.bytes for entry in entries)
        if needed > self._budget:
            raise ModelRefused(
                f"this model takes about {needed / 1e6:.0f} MB, and this server may use {self._budget / 1e6:.0f} MB for"
                " models: give it more with --memory"
            )
        more = sum(entry.piece.bytes for entry in entries if not entry.counts)
        idle = [one for one in self._entries.values() if one.counts and not one.users]
        while self._taken() + more > self._budget:
            if not idle:
                raise Busy("the memory for models is taken by models that run")
            oldest = idle.pop(0)
            log.info("letting go of slice %s: memory is wanted for others", oldest.piece.key.name)
            self._forget(oldest)

    def _forget(self, entry: _Entry) -> None:
        if self._entries.get(entry.piece.key) is entry:
            del self._entries[entry.piece.key]

    def _taken(self) -> int:
        return sum(one.piece.bytes for one in self._entries.values() if one.counts)


class _Lent:
    """Programs, for as long as a block lasts."""

    __slots__ = ("_entries", "_memory", "_pieces")

    def __init__(self, memory: Memory, pieces: Sequence[Piece]) -> None:
        self._memory = memory
        self._pieces = pieces

    def __enter__(self) -> dict[str, Program]:
        self._entries = self._memory.take(self._pieces)
        try:
            return {entry.piece.key.name: entry.program or entry.loaded() for entry in self._entries}
        except BaseException:
            self._memory.give_back(self._entries)
            raise

    def __exit__(self, *_: object) -> None:
        self._memory.give_back(self._entries)
