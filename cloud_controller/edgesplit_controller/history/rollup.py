"""Roll-up of telemetry into buckets of a minute, an hour, a day and a month, per device and per model of a fleet.

Raw messages are added after they were stored, in the order of their row ids, late messages included. The id of the last
row added is itself a row (the cursor). `RollUp.step` may run in only one controller process at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.orm import Session

from edgesplit_controller.history.buckets import (
    DAY_S,
    OTHER,
    SPANS,
    Content,
    Span,
    bucket_start,
    bucket_view,
    content_of_message,
    content_of_window,
    merged,
)
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.engines import POSTGRESQL
from edgesplit_controller.storage.tables.core import Desired, Device, TelemetryRow
from edgesplit_controller.storage.tables.device_state import (
    CursorRow,
    DeviceBucketRow,
    DeviceSessionRow,
    ModelBucketRow,
)

CURSOR = "telemetry rolled up to row"
"""Name of the cursor row."""
MESSAGES_PER_TRANSACTION = 50_000
"""Messages added up in one transaction at most: the larger, the fewer times a bucket is rewritten."""
MESSAGES_PER_READ = 2_000
"""Messages read by one query."""
KEYS_PER_QUERY = 200
"""Devices (or models) named in one query for existing buckets."""
ROWS_PER_STATEMENT = 1_000
"""Buckets written by one statement."""
DEVICES_PER_TRANSACTION = 500
"""Devices whose old messages are deleted in one transaction."""
RAW_RETENTION_S = 30 * DAY_S
"""Age at which a raw message is deleted. Devices that keep sending have far fewer
(`fleet.devices.MAX_TELEMETRY_ROWS`)."""
SETTLED_S = 10.0
"""Row ids are assigned before the commit. This many seconds after a row was stored, no row with a lower id can appear.
"""
DEVICE_ITSELF = ""
"""Stands in the model column of a bucket that belongs to the device itself."""
_RAW_COLUMNS = (
    TelemetryRow.id, TelemetryRow.device, TelemetryRow.at, TelemetryRow.stored, TelemetryRow.from_backlog,
    TelemetryRow.content,
)  # fmt: skip
"""Columns read of a raw message."""
Key = tuple[str, str, int, float]
"""Primary key of a bucket: device and model (or model and group), length in seconds, start."""
_KEY_COLUMNS: Mapping[type[DeviceBucketRow | ModelBucketRow], tuple[str, ...]] = {
    DeviceBucketRow: ("device", "model", "span_s", "begins"),
    ModelBucketRow: ("model", "group", "span_s", "begins"),
}
"""Primary key columns of each bucket table."""


class RollUp:
    """Adds new telemetry to the buckets and deletes what is too old."""

    def __init__(self, database: Database, *, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def step(self) -> int:
        """Add up messages stored since the last step, at most about `MESSAGES_PER_TRANSACTION`; return how many."""
        # The buckets and the cursor change in one transaction: a message is added exactly once, also after a crash.
        with self._database.write_concurrent() as session:
            cursor = session.get(CursorRow, CURSOR)
            if cursor is None:
                cursor = CursorRow(name=CURSOR, value=0)
                session.add(cursor)
            sums, count = _FleetSums(), 0
            while count < MESSAGES_PER_TRANSACTION and (rows := self._settled(session, cursor.value)):
                sums.add(session, rows)
                cursor.value, count = rows[-1].id, count + len(rows)
            sums.store(session)
            return count

    def _settled(self, session: Session, after: int) -> list[Any]:
        """The next messages after row `after` that no lower row id can precede any more."""
        # Ids are assigned at insertion, but rows appear at commit: a slow transaction may commit a lower id after a
        # higher one was read. So the read stops at the first row that is younger than `SETTLED_S`.
        new = select(*_RAW_COLUMNS).where(TelemetryRow.id > after).order_by(TelemetryRow.id).limit(MESSAGES_PER_READ)
        settled = self._now() - SETTLED_S
        return list(takewhile(lambda row: row.stored <= settled, session.execute(new)))

    def trim(self) -> None:
        """Delete buckets past their retention, and raw messages older than `RAW_RETENTION_S` of devices that went
        silent."""
        with self._database.write() as session:
            for retention in SPANS.values():
                for table in _KEY_COLUMNS:
                    expired = (table.span_s == retention.bucket_s, table.begins < self._now() - retention.retention_s)
                    session.execute(delete(table).where(*expired))
        after = ""
        while names := self._delete_raw(after):
            after = names[-1]

    def _delete_raw(self, after: str) -> list[str]:
        """Delete old messages of the next devices after `after` by name; return their names. One statement per device,
        because the index on telemetry begins with the device."""
        with self._database.write() as session:
            batch = select(Device.name).where(Device.name > after).order_by(Device.name).limit(DEVICES_PER_TRANSACTION)
            names = list(session.scalars(batch))
            oldest = self._now() - RAW_RETENTION_S
            for name in names:
                session.execute(delete(TelemetryRow).where(TelemetryRow.device == name, TelemetryRow.at < oldest))
        return names

    def backlog(self) -> int:
        """Approximate number of messages that are not in the buckets yet."""
        with self._database.read() as session:
            newest = session.scalar(select(func.max(TelemetryRow.id))) or 0
            cursor = session.get(CursorRow, CURSOR)
            return max(0, newest - (cursor.value if cursor is not None else 0))

    def device_history(self, device: str, span: Span, since: float, until: float) -> dict[str, list[dict[str, Any]]]:
        """Buckets of a device between two Unix times, oldest first, by model; the empty name holds the device's own."""
        by_model: dict[str, list[dict[str, Any]]] = {}
        query = select(DeviceBucketRow).where(
            DeviceBucketRow.device == device, *_in_range(DeviceBucketRow, span, since, until)
        )
        with self._database.read() as session:
            for row in session.scalars(query.order_by(DeviceBucketRow.begins)):
                by_model.setdefault(row.model, []).append(bucket_view(row.begins, span, row.content))
        return by_model

    def model_history(
        self, model: str, span: Span, since: float, until: float, groups: Collection[str] | None = None
    ) -> list[dict[str, Any]]:
        """Buckets of a model (by name) between two Unix times, oldest first, over all devices that run it or those of
        `groups`."""
        query = select(ModelBucketRow).where(ModelBucketRow.model == model)
        query = query.where(*_in_range(ModelBucketRow, span, since, until))
        if groups is not None:
            query = query.where(ModelBucketRow.group.in_(sorted(groups)))
        sums: dict[float, Content] = {}
        with self._database.read() as session:
            for row in session.scalars(query):
                sums[row.begins] = merged(sums.get(row.begins, {}), row.content)
        return [bucket_view(begins, span, sums[begins]) for begins in sorted(sums)]

    def fleet_history(
        self, span: Span, since: float, until: float, groups: Collection[str] | None = None
    ) -> list[dict[str, Any]]:
        """Buckets of all models between two Unix times, oldest first, each with the number of devices that sent
        telemetry in it (`devices`), over all devices or those of `groups`."""
        models = select(ModelBucketRow.begins, ModelBucketRow.content).where(
            *_in_range(ModelBucketRow, span, since, until)
        )
        devices = select(DeviceBucketRow.begins, func.count()).where(
            DeviceBucketRow.model == DEVICE_ITSELF, *_in_range(DeviceBucketRow, span, since, until)
        )
        if groups is not None:
            models = models.where(ModelBucketRow.group.in_(sorted(groups)))
            visible = select(Device.name).where(Device.group.in_(sorted(groups)))
            devices = devices.where(DeviceBucketRow.device.in_(visible))
        sums: dict[float, Content] = {}
        with self._database.read() as session:
            reporting = {row[0]: int(row[1]) for row in session.execute(devices.group_by(DeviceBucketRow.begins))}
            for begins, content in session.execute(models):
                sums[begins] = merged(sums.get(begins, {}), content)
        return [
            {**bucket_view(begins, span, sums.get(begins, {})), "devices": reporting.get(begins, 0)}
            for begins in sorted({*sums, *reporting})
        ]


@dataclass(slots=True)
class _TableSums:
    """Contents to be added to the buckets of one table."""

    table: type[DeviceBucketRow | ModelBucketRow]
    by_minute: dict[tuple[str, str, float], Content] = field(default_factory=dict)

    def add(self, first: str, second: str, at: float, content: Content) -> None:
        """Add `content` to the minute that contains the Unix time `at`; `first` and `second` are the names in the
        key."""
        key = (first, second, bucket_start("minute", at))
        self.by_minute[key] = merged(self.by_minute[key], content) if key in self.by_minute else content

    def store(self, session: Session) -> None:
        """Merge the sums into the stored buckets of each minute, and of its hour, day and month."""
        sums: dict[Key, Content] = {}
        for (first, second, minute), content in self.by_minute.items():
            for span, retention in SPANS.items():
                key = (first, second, retention.bucket_s, bucket_start(span, minute))
                sums[key] = merged(sums.get(key, {}), content)
        stored = _stored_contents(session, self.table, sums)
        names = _KEY_COLUMNS[self.table]
        rows = [
            {
                **dict(zip(names, key, strict=True)),
                "content": merged(stored[key], content) if key in stored else content,
            }
            for key, content in sums.items()
        ]
        for start in range(0, len(rows), ROWS_PER_STATEMENT):
            session.execute(_upsert(session, self.table), rows[start : start + ROWS_PER_STATEMENT])


@dataclass(frozen=True, slots=True)
class _Sender:
    """Facts about the device that sent a message."""

    group: str
    simulated: bool
    assigned_models: frozenset[str]
    """Names of the models assigned to it."""


@dataclass(slots=True)
class _FleetSums:
    """Contents to be added to the bucket tables of devices and of models."""

    devices: _TableSums = field(default_factory=lambda: _TableSums(DeviceBucketRow))
    models: _TableSums = field(default_factory=lambda: _TableSums(ModelBucketRow))

    def add(self, session: Session, rows: Sequence[Any]) -> None:
        """Add these raw messages."""
        senders = _senders(session, {row.device for row in rows})
        for row in rows:
            sender, message = senders[row.device], row.content
            self.devices.add(
                row.device, DEVICE_ITSELF, row.at, content_of_message(message, from_backlog=bool(row.from_backlog))
            )
            origin = "simulated" if sender.simulated else "emulated" if message.get("emulated") else "real"
            for window in message.get("models", ()):
                content = content_of_window(window)
                model = str(window["model"]) if window["model"] in sender.assigned_models else OTHER
                self.devices.add(row.device, model, row.at, content)
                with_origin = {**content, "origins": {origin: content["requests"]}}
                self.models.add(model, sender.group, row.at, with_origin)

    def store(self, session: Session) -> None:
        self.devices.store(session)
        self.models.store(session)


def _senders(session: Session, names: Collection[str]) -> dict[str, _Sender]:
    ordered = sorted(names)
    assigned: dict[str, set[str]] = {}
    for desired in session.scalars(select(Desired).where(Desired.device.in_(ordered))):
        assigned.setdefault(desired.device, set()).add(desired.model)
    query = select(Device.name, Device.group, DeviceSessionRow.simulated).outerjoin(
        DeviceSessionRow, DeviceSessionRow.device == Device.name
    )
    return {
        name: _Sender(group, bool(simulated), frozenset(assigned.get(name, ())))
        for name, group, simulated in session.execute(query.where(Device.name.in_(ordered)))
    }


def _stored_contents(
    session: Session, table: type[DeviceBucketRow | ModelBucketRow], keys: Collection[Key]
) -> dict[Key, Content]:
    """Stored contents of those `keys` that exist. Queried by the first column of the key, by which the index is
    ordered."""
    columns = [getattr(table, name) for name in _KEY_COLUMNS[table]]
    firsts = sorted({key[0] for key in keys})
    spans, begins = sorted({key[2] for key in keys}), sorted({key[3] for key in keys})
    stored: dict[Key, Content] = {}
    for start in range(0, len(firsts), KEYS_PER_QUERY):
        query = select(*columns, table.content).where(
            columns[0].in_(firsts[start : start + KEYS_PER_QUERY]), table.span_s.in_(spans), table.begins.in_(begins)
        )
        for row in session.execute(query):
            if (key := (row[0], row[1], row[2], row[3])) in keys:
                stored[key] = row[4]
    return stored


def _upsert(session: Session, table: type[DeviceBucketRow | ModelBucketRow]) -> Any:
    """Statement that inserts a bucket, or replaces the content of the stored one."""
    names, bucket_table = _KEY_COLUMNS[table], table.__table__
    if session.get_bind().dialect.name == POSTGRESQL:
        from sqlalchemy.dialects import postgresql  # its drivers' modules are imported with it

        insert = postgresql.insert(bucket_table)  # type: ignore[arg-type]
        return insert.on_conflict_do_update(index_elements=names, set_={"content": insert.excluded.content})
    sqlite_insert = sqlite.insert(bucket_table)  # type: ignore[arg-type]
    return sqlite_insert.on_conflict_do_update(index_elements=names, set_={"content": sqlite_insert.excluded.content})


def _in_range(table: type[DeviceBucketRow | ModelBucketRow], span: Span, since: float, until: float) -> Iterable[Any]:
    return (table.span_s == SPANS[span].bucket_s, table.begins >= bucket_start(span, since), table.begins < until)
