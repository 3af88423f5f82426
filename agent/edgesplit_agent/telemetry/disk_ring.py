"""Disk ring: a bounded queue of telemetry messages on disk for times without a link, limited in size and age.

Each entry has a sequence number, which only grows, and a priority. Entries of each priority lie in files of their own
(segments), so that eviction takes the lowest priority first (`idle` before `busy` before `trouble`) and in each the
oldest. To spare SD cards, entries are buffered in memory and written at most once a minute, in one synced write: a
power cut costs what was not yet written (`flush`) and nothing before it. Unreadable data is skipped and counted. A disk
that is full or failing costs entries, never an exception.

    {first number}.{priority}    length, CRC-32, number, Unix seconds, seconds since boot, CRC-32 of the boot's id,
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
from edgesplit.mqtt.telemetry import BacklogState, DeviceTime
from edgesplit_agent.host.clock import MIN_PLAUSIBLE_TIME

log = logging.getLogger(__name__)

PRIORITIES = ("idle", "busy", "trouble")
"""Priorities, lowest first."""
QUOTA_BYTES = 8 * 2**20
"""Default limit of the segments' size in bytes."""
MAX_AGE_S = 7 * 86_400.0
"""Default maximum age of an entry in seconds."""
SEGMENT_BYTES = 65_536
"""Maximum size of a segment in bytes."""
BUFFER_BYTES = 32_768
"""Bytes that may be buffered in memory before they are written at once."""
MAX_BUFFER_BYTES = 262_144
"""Maximum bytes buffered in memory while the disk accepts no data."""
_HEAD = struct.Struct(">IIQddI")


@dataclass(frozen=True, slots=True)
class Entry:
    """One queued message."""

    number: int
    at: float
    """Unix seconds, by the device's wall clock when it was added."""
    up_s: float
    boot: int
    payload: bytes

    def encoded(self) -> bytes:
        """The entry as it lies in a segment."""
        body = _HEAD.pack(0, 0, self.number, self.at, self.up_s, self.boot)[8:] + self.payload
        return struct.pack(">II", len(body), crc32(body)) + body


def parse_entries(raw: bytes) -> Iterator[Entry]:
    """The entries in a segment's bytes, up to the first that is incomplete or corrupt."""
    offset = 0
    while offset + _HEAD.size <= len(raw):
        length, checksum, number, at, up_s, boot = _HEAD.unpack_from(raw, offset)
        body = raw[offset + 8 : offset + 8 + length]
        if length < _HEAD.size - 8 or len(body) < length or crc32(body) != checksum:
            return
        yield Entry(number, at, up_s, boot, body[_HEAD.size - 8 :])
        offset += 8 + length


def boot_number(mark: str) -> int:
    """Number that identifies a boot in an entry; 0 if the boot is unknown."""
    return crc32(mark.encode()) if mark else 0


def entry_age_s(entry: Entry, now: DeviceTime) -> float:
    """Age of an entry in seconds: by the time since boot within one boot, else by the wall clock; 0 where neither is
    reliable."""
    if entry.boot and entry.boot == boot_number(now.boot_id):
        return max(0.0, now.since_boot_s - entry.up_s)
    known = entry.at >= MIN_PLAUSIBLE_TIME and now.unix_s >= MIN_PLAUSIBLE_TIME
    return max(0.0, now.unix_s - entry.at) if known else 0.0


@dataclass
class Segment:
    """One file of entries of one priority."""

    path: Path
    priority: str
    size: int = 0
    count: int = 0
    last: Entry | None = None

    @property
    def eviction_key(self) -> tuple[int, int]:
        """Sort key of eviction: lowest priority first, then oldest."""
        return PRIORITIES.index(self.priority), self.last.number if self.last is not None else 0


def segments_to_evict(segments: Sequence[Segment], max_bytes: int, now: DeviceTime, max_age_s: float) -> list[Segment]:
    """The segments to evict: those that are too old, then the lowest priorities until the rest fits the quota."""
    dropped = [segment for segment in segments if segment.last is None or entry_age_s(segment.last, now) > max_age_s]
    remaining = [segment for segment in segments if segment not in dropped]
    remaining.sort(key=lambda segment: segment.eviction_key)
    excess = sum(segment.size for segment in remaining) - max_bytes
    for segment in remaining:
        if excess <= 0:
            break
        dropped.append(segment)
        excess -= segment.size
    return dropped


@dataclass
class _Buffer:
    """Entries buffered in memory, not yet written."""

    entries: list[tuple[str, Entry]] = field(default_factory=list)
    size: int = 0


class DiskRing:
    """Disk ring in one folder. Not thread-safe."""

    def __init__(self, folder: Path, *, quota_bytes: int = QUOTA_BYTES, max_age_s: float = MAX_AGE_S) -> None:
        self._folder = folder
        self._quota = quota_bytes
        self._max_age_s = max_age_s
        self._buffer = _Buffer()
        self._segments: list[Segment] = []
        self._dropped: dict[str, int] = dict.fromkeys(PRIORITIES, 0)
        self._corrupt_segments = 0
        self._failing = False
        self._acknowledged = 0
        """The highest acknowledged number."""
        self._load()

    def add(self, priority: str, payload: bytes, now: DeviceTime) -> None:
        """Add a message."""
        entry = Entry(self._next, now.unix_s, now.since_boot_s, boot_number(now.boot_id), payload)
        self._next += 1
        self._buffer.entries.append((priority, entry))
        self._buffer.size += len(payload) + _HEAD.size
        if self._buffer.size >= BUFFER_BYTES:
            self.flush(now)

    def flush(self, now: DeviceTime) -> None:
        """Write the buffered entries, synced, and evict what exceeds quota or age."""
        for worth in PRIORITIES:
            new = [entry for priority, entry in self._buffer.entries if priority == worth]
            if new and not self._write(worth, new):
                self._evict_buffered()
                return
        self._buffer = _Buffer()
        for segment in segments_to_evict(self._segments, self._quota, now, self._max_age_s):
            self._dropped[segment.priority] += self._queued_in(segment)
            self._remove(segment)

    def batch(self, max_bytes: int, max_entries: int) -> list[Entry]:
        """The oldest entries in order, up to these limits; at least one if any is queued."""
        taken: list[Entry] = []
        size = 0
        for entry in self._queued():
            if taken and (size + len(entry.payload) > max_bytes or len(taken) >= max_entries):
                break
            taken.append(entry)
            size += len(entry.payload)
        return taken

    def acknowledge(self, upto: int) -> None:
        """Remove the entries with numbers up to `upto`, which were acknowledged."""
        self._acknowledged = max(self._acknowledged, upto)
        self._buffer.entries = [(worth, entry) for worth, entry in self._buffer.entries if entry.number > upto]
        self._buffer.size = sum(len(entry.payload) + _HEAD.size for _, entry in self._buffer.entries)
        for segment in list(self._segments):
            if segment.last is not None and segment.last.number <= upto:
                self._remove(segment)

    @property
    def is_empty(self) -> bool:
        """Whether no entry is queued."""
        return not self._buffer.entries and not any(
            segment.last is not None and segment.last.number > self._acknowledged for segment in self._segments
        )

    def to_telemetry(self) -> BacklogState:
        """Fill level and losses, for telemetry; acknowledged entries in a segment with others count as waiting."""
        return BacklogState(
            messages=sum(segment.count for segment in self._segments) + len(self._buffer.entries),
            bytes=sum(segment.size for segment in self._segments) + self._buffer.size,
            dropped_idle=self._dropped["idle"],
            dropped_busy=self._dropped["busy"],
            dropped_failures=self._dropped["trouble"],
            corrupt=self._corrupt_segments,
        )

    def _queued_in(self, segment: Segment) -> int:
        """Number of entries in this segment that were not acknowledged."""
        if _first_number(segment) > self._acknowledged:
            return segment.count
        return sum(entry.number > self._acknowledged for entry in self._read(segment))

    def _queued(self) -> Iterator[Entry]:
        """All queued entries in order of their numbers; a segment is read only when it is reached."""
        segments = sorted(self._segments, key=_first_number)
        ready: list[Entry] = []
        held = [entry for _, entry in self._buffer.entries]
        for index, segment in enumerate(segments):
            ready += [entry for entry in self._read(segment) if entry.number > self._acknowledged]
            ready.sort(key=lambda entry: entry.number)
            upto = _first_number(segments[index + 1]) if index + 1 < len(segments) else None
            while ready and upto is not None and ready[0].number < upto:
                yield ready.pop(0)
        yield from sorted([*ready, *held], key=lambda entry: entry.number)

    def _load(self) -> None:
        """Load the segments that an earlier run of the agent left."""
        last_numbers = [0]
        try:
            paths = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        except OSError as error:
            log.warning("%s cannot be listed: %s", self._folder, error.strerror)
            paths = []
        for path in paths:
            first, _, worth = path.name.partition(".")
            if worth not in PRIORITIES or not first.isdigit() or len(first) > 18:
                continue
            segment = Segment(path, worth)
            found_entries = self._read(segment)
            if not found_entries:
                self._remove(segment)
                continue
            segment.count, segment.last = len(found_entries), found_entries[-1]
            # Without the corrupt bytes behind the entries: `_write` truncates them.
            segment.size = sum(len(entry.encoded()) for entry in found_entries)
            self._segments.append(segment)
            last_numbers.append(found_entries[-1].number)
        self._next = max(last_numbers) + 1

    def _write(self, priority: str, new: Sequence[Entry]) -> bool:
        """Append entries to a segment of their priority; False where the disk refuses."""
        data = b"".join(entry.encoded() for entry in new)
        segment = self._segment_for(priority, len(data), new[0].number)
        fresh = segment.last is None
        try:
            if fresh:
                make_folders(self._folder)
            descriptor = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, segment.size)  # entries after corrupt bytes could not be read
                _write_all(descriptor, data)
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
            if fresh:
                sync_folder(self._folder)
        except OSError as error:
            if not self._failing:
                log.warning("telemetry cannot be stored on disk: %s", error.strerror)
            self._failing = True
            return False
        self._failing = False
        segment.size, segment.count, segment.last = segment.size + len(data), segment.count + len(new), new[-1]
        if fresh:
            self._segments.append(segment)
        written = {entry.number for entry in new}
        self._buffer.entries = [(kind, kept) for kind, kept in self._buffer.entries if kept.number not in written]
        return True

    def _segment_for(self, priority: str, more: int, first: int) -> Segment:
        """The newest segment of this priority if it has room, else a new one."""
        candidates = [existing for existing in self._segments if existing.priority == priority]
        newest = max(candidates, key=_first_number, default=None)
        if newest is not None and newest.size + more <= SEGMENT_BYTES:
            return newest
        return Segment(self._folder / f"{first:018d}.{priority}", priority)

    def _evict_buffered(self) -> None:
        """Evict buffered entries, lowest priority first, because the disk accepts nothing and memory must not fill."""
        self._buffer.size = sum(len(entry.payload) + _HEAD.size for _, entry in self._buffer.entries)
        for worth in PRIORITIES:
            while self._buffer.size > MAX_BUFFER_BYTES:
                index = next((at for at, (kind, _) in enumerate(self._buffer.entries) if kind == worth), None)
                if index is None:
                    break
                _, gone = self._buffer.entries.pop(index)
                self._buffer.size -= len(gone.payload) + _HEAD.size
                self._dropped[worth] += 1

    def _read(self, segment: Segment) -> list[Entry]:
        """The entries of a segment; empty if it cannot be read."""
        try:
            raw = segment.path.read_bytes()
        except OSError as error:
            log.warning("%s cannot be read: %s", segment.path, error.strerror)
            return []
        whole = list(parse_entries(raw))
        if segment.last is None and sum(len(entry.encoded()) for entry in whole) < len(raw):
            self._corrupt_segments += 1  # counted once, when the segment is loaded
        return whole

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
