"""Messages that wait on disk for a link: a ring of small files with bounds on size and age.

An entry has a number, which only grows, and a worth. Entries of each worth lie in files of their own (segments), so
that what is worth least goes first when there is no room: `idle` before `busy` before `trouble`, the oldest of each
first. An SD card is spared: what is added is held in memory and written at most once a minute, in one piece and synced;
a power cut costs what was not written yet (`flush`), and nothing before it. What cannot be read again is passed over
and counted. A disk that is full or fails costs entries, never an exception.

    {first number}.{worth}    length, CRC-32, number, Unix seconds, seconds since boot, CRC-32 of the boot's mark,
                              payload; and so on
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from edgesplit.atomic_files import make_folders, sync_folder
from edgesplit.mqtt.telemetry import Moment, StoreSeen
from edgesplit_agent.host.clock import PLAUSIBLE

log = logging.getLogger(__name__)

WORTHS = ("idle", "busy", "trouble")
"""Least first."""
QUOTA_BYTES = 8 * 2**20
OLDEST_S = 7 * 86_400.0
SEGMENT_BYTES = 65_536
HELD_BYTES = 32_768
"""What may wait in memory for the next write; more is written at once."""
MOST_HELD_BYTES = 262_144
"""Where the disk takes nothing."""
_HEAD = struct.Struct(">IIQddI")


@dataclass(frozen=True, slots=True)
class Entry:
    """One message that waits."""

    number: int
    at: float
    """Unix seconds, by the device's clock then."""
    up_s: float
    boot: int
    payload: bytes

    def encoded(self) -> bytes:
        """As it lies in a segment."""
        body = _HEAD.pack(0, 0, self.number, self.at, self.up_s, self.boot)[8:] + self.payload
        return struct.pack(">II", len(body), crc32(body)) + body


def entries(raw: bytes) -> Iterator[Entry]:
    """The entries in a segment, up to the first that is not whole."""
    place = 0
    while place + _HEAD.size <= len(raw):
        length, checksum, number, at, up_s, boot = _HEAD.unpack_from(raw, place)
        body = raw[place + 8 : place + 8 + length]
        if length < _HEAD.size - 8 or len(body) < length or crc32(body) != checksum:
            return
        yield Entry(number, at, up_s, boot, body[_HEAD.size - 8 :])
        place += 8 + length


def boot_number(mark: str) -> int:
    """How an entry names its boot; 0 for none."""
    return crc32(mark.encode()) if mark else 0


def entry_age_s(entry: Entry, now: Moment) -> float:
    """How old an entry is: by the clock that is never set where it is of this boot, else by the other."""
    if entry.boot and entry.boot == boot_number(now.boot):
        return max(0.0, now.up_s - entry.up_s)
    known = entry.at >= PLAUSIBLE and now.at >= PLAUSIBLE
    return max(0.0, now.at - entry.at) if known else 0.0


@dataclass
class Segment:
    """One file of entries of one worth."""

    path: Path
    worth: str
    size: int = 0
    count: int = 0
    last: Entry | None = None

    @property
    def order(self) -> tuple[int, int]:
        """What goes first when there is no room."""
        return WORTHS.index(self.worth), self.last.number if self.last is not None else 0


def to_drop(segments: Sequence[Segment], quota_bytes: int, now: Moment, oldest_s: float) -> list[Segment]:
    """The segments that must go: what is too old, then what is worth least until the rest has room."""
    old = [one for one in segments if one.last is None or entry_age_s(one.last, now) > oldest_s]
    left = sorted((one for one in segments if one not in old), key=lambda one: one.order)
    excess = sum(one.size for one in left) - quota_bytes
    for one in left:
        if excess <= 0:
            break
        old.append(one)
        excess -= one.size
    return old


@dataclass
class _Held:
    """What waits in memory to be written."""

    entries: list[tuple[str, Entry]] = field(default_factory=list)
    size: int = 0


class Ring:
    """Entries of one folder. Not thread-safe by itself."""

    def __init__(self, folder: Path, *, quota_bytes: int = QUOTA_BYTES, oldest_s: float = OLDEST_S) -> None:
        self._folder = folder
        self._quota = quota_bytes
        self._oldest_s = oldest_s
        self._held = _Held()
        self._segments: list[Segment] = []
        self._dropped: dict[str, int] = dict.fromkeys(WORTHS, 0)
        self._spoilt = 0
        self._failing = False
        self._forgotten = 0
        """The highest number that waits no longer."""
        self._open()

    def add(self, worth: str, payload: bytes, now: Moment) -> None:
        """One message more."""
        entry = Entry(self._next, now.at, now.up_s, boot_number(now.boot), payload)
        self._next += 1
        self._held.entries.append((worth, entry))
        self._held.size += len(payload) + _HEAD.size
        if self._held.size >= HELD_BYTES:
            self.flush(now)

    def flush(self, now: Moment) -> None:
        """Write what is held, synced, and drop what has no room or is too old."""
        for worth in WORTHS:
            new = [entry for kind, entry in self._held.entries if kind == worth]
            if new and not self._write(worth, new):
                self._give_up_some()
                return
        self._held = _Held()
        for segment in to_drop(self._segments, self._quota, now, self._oldest_s):
            self._dropped[segment.worth] += self._waiting_in(segment)
            self._remove(segment)

    def batch(self, most_bytes: int, most: int) -> list[Entry]:
        """The oldest that wait, in order; at least one where any waits."""
        taken: list[Entry] = []
        size = 0
        for entry in self._waiting():
            if taken and (size + len(entry.payload) > most_bytes or len(taken) >= most):
                break
            taken.append(entry)
            size += len(entry.payload)
        return taken

    def forget(self, upto: int) -> None:
        """What has these numbers, and lower ones, waits no longer."""
        self._forgotten = max(self._forgotten, upto)
        self._held.entries = [(worth, one) for worth, one in self._held.entries if one.number > upto]
        self._held.size = sum(len(one.payload) + _HEAD.size for _, one in self._held.entries)
        for segment in list(self._segments):
            if segment.last is not None and segment.last.number <= upto:
                self._remove(segment)

    @property
    def is_empty(self) -> bool:
        """Nothing waits."""
        return not self._held.entries and not any(
            one.last is not None and one.last.number > self._forgotten for one in self._segments
        )

    def seen(self) -> StoreSeen:
        """For telemetry; what was sent of a segment that has more counts as waiting."""
        return StoreSeen(
            waiting=sum(one.count for one in self._segments) + len(self._held.entries),
            waiting_bytes=sum(one.size for one in self._segments) + self._held.size,
            dropped_idle=self._dropped["idle"],
            dropped_busy=self._dropped["busy"],
            dropped_trouble=self._dropped["trouble"],
            spoilt=self._spoilt,
        )

    def _waiting_in(self, segment: Segment) -> int:
        if _first_number(segment) > self._forgotten:
            return segment.count
        return sum(one.number > self._forgotten for one in self._read(segment))

    def _waiting(self) -> Iterator[Entry]:
        """In order of their numbers. A segment is read when its turn comes."""
        segments = sorted(self._segments, key=_first_number)
        ready: list[Entry] = []
        held = [one for _, one in self._held.entries]
        for place, segment in enumerate(segments):
            ready += [one for one in self._read(segment) if one.number > self._forgotten]
            ready.sort(key=lambda one: one.number)
            upto = _first_number(segments[place + 1]) if place + 1 < len(segments) else None
            while ready and upto is not None and ready[0].number < upto:
                yield ready.pop(0)
        yield from sorted([*ready, *held], key=lambda one: one.number)

    def _open(self) -> None:
        """Find what the last run left."""
        numbers = [0]
        try:
            found = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        except OSError as error:
            log.warning("%s cannot be listed: %s", self._folder, error.strerror)
            found = []
        for path in found:
            first, _, worth = path.name.partition(".")
            if worth not in WORTHS or not first.isdigit() or len(first) > 18:
                continue
            segment = Segment(path, worth)
            inside = self._read(segment)
            if not inside:
                self._remove(segment)
                continue
            segment.count, segment.last = len(inside), inside[-1]
            segment.size = sum(len(one.encoded()) for one in inside)  # what is cut off behind them is not grown on
            self._segments.append(segment)
            numbers.append(inside[-1].number)
        self._next = max(numbers) + 1

    def _write(self, worth: str, new: Sequence[Entry]) -> bool:
        data = b"".join(entry.encoded() for entry in new)
        segment = self._to_grow(worth, len(data), new[0].number)
        fresh = segment.last is None
        try:
            if fresh:
                make_folders(self._folder)
            descriptor = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, segment.size)  # what was cut off behind it would hide what follows
                _write_all(descriptor, data)
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
            if fresh:
                sync_folder(self._folder)
        except OSError as error:
            if not self._failing:
                log.warning("telemetry cannot be kept for later: %s", error.strerror)
            self._failing = True
            return False
        self._failing = False
        segment.size, segment.count, segment.last = segment.size + len(data), segment.count + len(new), new[-1]
        if fresh:
            self._segments.append(segment)
        written = {entry.number for entry in new}
        self._held.entries = [(kind, one) for kind, one in self._held.entries if one.number not in written]
        return True

    def _to_grow(self, worth: str, more: int, first: int) -> Segment:
        """The worth's newest segment if it has room, else a new one. One whose tail was spoilt is not grown."""
        mine = [one for one in self._segments if one.worth == worth]
        newest = max(mine, key=_first_number, default=None)
        if newest is not None and newest.size + more <= SEGMENT_BYTES:
            return newest
        return Segment(self._folder / f"{first:018d}.{worth}", worth)

    def _give_up_some(self) -> None:
        """The disk takes nothing: what is worth least goes, so that memory does not fill."""
        self._held.size = sum(len(one.payload) + _HEAD.size for _, one in self._held.entries)
        for worth in WORTHS:
            while self._held.size > MOST_HELD_BYTES:
                place = next((at for at, (kind, _) in enumerate(self._held.entries) if kind == worth), None)
                if place is None:
                    break
                _, gone = self._held.entries.pop(place)
                self._held.size -= len(gone.payload) + _HEAD.size
                self._dropped[worth] += 1

    def _read(self, segment: Segment) -> list[Entry]:
        try:
            raw = segment.path.read_bytes()
        except OSError as error:
            log.warning("%s cannot be read: %s", segment.path, error.strerror)
            return []
        found = list(entries(raw))
        if segment.last is None and sum(len(one.encoded()) for one in found) < len(raw):
            self._spoilt += 1  # told once, when it is found
        return found

    def _remove(self, segment: Segment) -> None:
        if segment in self._segments:
            self._segments.remove(segment)
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", segment.path, error.strerror)


def _first_number(segment: Segment) -> int:
    return int(segment.path.name.partition(".")[0])


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
