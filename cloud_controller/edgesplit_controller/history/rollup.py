"""Telemetry rolled up by minutes, hours, days and months (`buckets`), of each device and of each model in a fleet.

Raw messages are added up after they were stored, in the order of their rows, late ones too; how far that has come is a
row itself. `step` may run in one controller at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from edgesplit_controller.history.buckets import (
    DAY_S,
    OTHER,
    SPANS,
    Content,
    Span,
    begin_of,
    merged,
    of_message,
    of_window,
    shown,
)
from edgesplit_controller.storage.database import Database, Desired, Device, TelemetryRow
from edgesplit_controller.storage.engines import POSTGRESQL
from edgesplit_controller.storage.tables.device_state import HeardRow, MarkRow, ModelRolledRow, RolledRow

MARK = "telemetry rolled up to row"
AT_ONCE = 50_000
"""Messages added up in one transaction at most: the more, the fewer times a bucket is written."""
READ_AT_ONCE = 2_000
KEYS_AT_ONCE = 200
ROWS_AT_ONCE = 1_000
DEVICES_AT_ONCE = 500
RAW_S = 30 * DAY_S
"""Of a device that goes on talking far fewer are kept (`devices.HISTORY`)."""
SETTLED_S = 10.0
"""Rows are numbered before they are committed: so long after one was stored, none with a lower number comes."""
DEVICE = ""
"""In the place of a model: the device itself."""
_OF_RAW = (
    TelemetryRow.id, TelemetryRow.device, TelemetryRow.at, TelemetryRow.stored, TelemetryRow.late, TelemetryRow.content,
)  # fmt: skip
Key = tuple[str, str, int, float]
"""Device and model, or model and group; span, beginning."""
_KEYS: Mapping[type[RolledRow | ModelRolledRow], tuple[str, ...]] = {
    RolledRow: ("device", "model", "span_s", "begins"),
    ModelRolledRow: ("model", "group", "span_s", "begins"),
}


class Rolling:
    """Adds telemetry up."""

    def __init__(self, database: Database, *, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def step(self) -> int:
        """Add up what was stored since the last step, at most so much that it takes a moment; how many messages."""
        with self._database.hear() as session:
            mark = session.get(MarkRow, MARK)
            if mark is None:
                mark = MarkRow(name=MARK, value=0)
                session.add(mark)
            sums, count = _Fleet(), 0
            while count < AT_ONCE and (rows := self._settled(session, mark.value)):
                sums.add(session, rows)
                mark.value, count = rows[-1].id, count + len(rows)
            sums.store(session)
            return count

    def _settled(self, session: Session, after: int) -> list[Any]:
        """The next ones that are whole."""
        new = select(*_OF_RAW).where(TelemetryRow.id > after).order_by(TelemetryRow.id).limit(READ_AT_ONCE)
        settled = self._now() - SETTLED_S
        return list(takewhile(lambda row: row.stored <= settled, session.execute(new)))

    def trim(self) -> None:
        """Drop what is too old: buckets, and raw messages of devices that say nothing more."""
        with self._database.write() as session:
            for kept in SPANS.values():
                for table in _KEYS:
                    old = (table.span_s == kept.seconds, table.begins < self._now() - kept.kept_s)
                    session.execute(delete(table).where(*old))
        after = ""
        while names := self._drop_raw(after):
            after = names[-1]

    def _drop_raw(self, after: str) -> list[str]:
        """Of some devices, the next ones by name; device by device, for that is how messages are found."""
        with self._database.write() as session:
            some = select(Device.name).where(Device.name > after).order_by(Device.name).limit(DEVICES_AT_ONCE)
            names = list(session.scalars(some))
            oldest = self._now() - RAW_S
            for name in names:
                session.execute(delete(TelemetryRow).where(TelemetryRow.device == name, TelemetryRow.at < oldest))
        return names

    def behind(self) -> int:
        """About how many messages are not added up yet."""
        with self._database.read() as session:
            newest = session.scalar(select(func.max(TelemetryRow.id))) or 0
            mark = session.get(MarkRow, MARK)
            return max(0, newest - (mark.value if mark is not None else 0))

    def history(self, device: str, span: Span, since: float, until: float) -> dict[str, list[dict[str, Any]]]:
        """By model (and the empty name for the device itself), the buckets of that time, oldest first."""
        found: dict[str, list[dict[str, Any]]] = {}
        wanted = select(RolledRow).where(RolledRow.device == device, *_within(RolledRow, span, since, until))
        with self._database.read() as session:
            for row in session.scalars(wanted.order_by(RolledRow.begins)):
                found.setdefault(row.model, []).append(shown(row.begins, span, row.content))
        return found

    def of_model(
        self, model: str, span: Span, since: float, until: float, groups: Collection[str] | None = None
    ) -> list[dict[str, Any]]:
        """The same of one model (by name) on all devices that run it, or on those of some groups."""
        wanted = select(ModelRolledRow).where(ModelRolledRow.model == model)
        wanted = wanted.where(*_within(ModelRolledRow, span, since, until))
        if groups is not None:
            wanted = wanted.where(ModelRolledRow.group.in_(sorted(groups)))
        sums: dict[float, Content] = {}
        with self._database.read() as session:
            for row in session.scalars(wanted):
                sums[row.begins] = merged(sums.get(row.begins, {}), row.content)
        return [shown(begins, span, sums[begins]) for begins in sorted(sums)]


@dataclass(slots=True)
class _Sums:
    """What is to be added to the buckets of one table."""

    table: type[RolledRow | ModelRolledRow]
    by_minute: dict[tuple[str, str, float], Content] = field(default_factory=dict)

    def add(self, first: str, second: str, at: float, content: Content) -> None:
        """To the minute of that moment."""
        key = (first, second, begin_of("minute", at))
        self.by_minute[key] = merged(self.by_minute[key], content) if key in self.by_minute else content

    def store(self, session: Session) -> None:
        """To the minute's row, and to those of its hour, its day and its month."""
        sums: dict[Key, Content] = {}
        for (first, second, minute), content in self.by_minute.items():
            for span, kept in SPANS.items():
                key = (first, second, kept.seconds, begin_of(span, minute))
                sums[key] = merged(sums.get(key, {}), content)
        there = _contents(session, self.table, sums)
        names = _KEYS[self.table]
        rows = [
            {**dict(zip(names, key, strict=True)), "content": merged(there[key], content) if key in there else content}
            for key, content in sums.items()
        ]
        for start in range(0, len(rows), ROWS_AT_ONCE):
            session.execute(_put(session, self.table), rows[start : start + ROWS_AT_ONCE])


@dataclass(frozen=True, slots=True)
class _Speaker:
    """What is known of the device that a message is of."""

    group: str
    simulated: bool
    told: frozenset[str]
    """Models that it shall run."""


@dataclass(slots=True)
class _Fleet:
    """What is to be added to the buckets of devices and of models."""

    devices: _Sums = field(default_factory=lambda: _Sums(RolledRow))
    models: _Sums = field(default_factory=lambda: _Sums(ModelRolledRow))

    def add(self, session: Session, rows: Sequence[Any]) -> None:
        """Some messages."""
        speakers = _speakers(session, {row.device for row in rows})
        for row in rows:
            speaker, message = speakers[row.device], row.content
            self.devices.add(row.device, DEVICE, row.at, of_message(message, late=bool(row.late)))
            made_up = "simulated" if speaker.simulated else "emulated" if message.get("emulated") else "real"
            for window in message.get("models", ()):
                content = of_window(window)
                known = str(window["model"]) if window["model"] in speaker.told else OTHER
                self.devices.add(row.device, known, row.at, content)
                origins = {**content, "origins": {made_up: content["requests"]}}
                self.models.add(known, speaker.group, row.at, origins)

    def store(self, session: Session) -> None:
        self.devices.store(session)
        self.models.store(session)


def _speakers(session: Session, names: Collection[str]) -> dict[str, _Speaker]:
    ordered = sorted(names)
    told: dict[str, set[str]] = {}
    for desired in session.scalars(select(Desired).where(Desired.device.in_(ordered))):
        told.setdefault(desired.device, set()).add(desired.model)
    known = select(Device.name, Device.group, HeardRow.simulated).outerjoin(HeardRow, HeardRow.device == Device.name)
    return {
        name: _Speaker(group, bool(simulated), frozenset(told.get(name, ())))
        for name, group, simulated in session.execute(known.where(Device.name.in_(ordered)))
    }


def _contents(session: Session, table: type[RolledRow | ModelRolledRow], keys: Collection[Key]) -> dict[Key, Content]:
    """Of those of them that are there. Asked for by the first part of the key, which the index is ordered by."""
    columns = [getattr(table, name) for name in _KEYS[table]]
    firsts = sorted({key[0] for key in keys})
    spans, begins = sorted({key[2] for key in keys}), sorted({key[3] for key in keys})
    found: dict[Key, Content] = {}
    for start in range(0, len(firsts), KEYS_AT_ONCE):
        asked = select(*columns, table.content).where(
            columns[0].in_(firsts[start : start + KEYS_AT_ONCE]), table.span_s.in_(spans), table.begins.in_(begins)
        )
        for row in session.execute(asked):
            if (key := (row[0], row[1], row[2], row[3])) in keys:
                found[key] = row[4]
    return found


def _put(session: Session, table: type[RolledRow | ModelRolledRow]) -> Any:
    """Insert rows, or put their contents in the place of what is there."""
    names, of = _KEYS[table], table.__table__
    if session.get_bind().dialect.name == POSTGRESQL:
        there = postgresql.insert(of)  # type: ignore[arg-type]
        return there.on_conflict_do_update(index_elements=names, set_={"content": there.excluded.content})
    here = sqlite.insert(of)  # type: ignore[arg-type]
    return here.on_conflict_do_update(index_elements=names, set_={"content": here.excluded.content})


def _within(table: type[RolledRow | ModelRolledRow], span: Span, since: float, until: float) -> Iterable[Any]:
    return (table.span_s == SPANS[span].seconds, table.begins >= begin_of(span, since), table.begins < until)
