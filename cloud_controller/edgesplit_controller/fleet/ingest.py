"""Takes in what devices said: from messages to rows, a batch in one transaction. What to believe is `truth`'s.

Every row is found by the device that the topic names, so that no device speaks for another. Rows are read for the whole
batch at once, in a transaction that holds these devices (`Database.hear`), so that several controllers can take in
messages of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from sqlalchemy import delete, select, tuple_
from sqlalchemy.orm import Session

from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import Birth, BundlePiece, Death, JobRefused, Kept, Late, Reported, Telemetry
from edgesplit_controller.fleet import conditions, device_state, log_bundles, restore_check
from edgesplit_controller.storage.database import Device, Table, TelemetryRow, held_of, record
from edgesplit_controller.storage.tables.device_state import ConditionRow, HeardRow, RunningRow

Said = Sequence[tuple[str, messages.Message]]
Born = Callable[[Session, Device, Birth, float], bool]
"""A birth of a living device; whether older certificates are revoked by it."""
MOST_MODELS = 64
"""Of one device that are kept."""
T = TypeVar("T", bound=Table)


@dataclass(slots=True)
class Taken:
    """What taking in some messages brought to light."""

    intruders: set[str] = field(default_factory=set)
    """Revoked devices that spoke: their session lives and must end."""
    superseded: bool = False
    """A renewed certificate was seen at work, so that older ones were revoked."""
    kept: list[tuple[str, Kept]] = field(default_factory=list)
    """What devices may forget, once this transaction is over."""
    stored: dict[str, int] = field(default_factory=dict)
    """Telemetry that was stored, by device."""
    newest: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Session and sequence of the newest live telemetry, by device."""
    lags_s: list[float] = field(default_factory=list)
    """How old late telemetry was."""
    outcomes: dict[tuple[str, str], int] = field(default_factory=dict)
    """Messages by kind and by what was made of them."""


def take_in(session: Session, said: Said, now: float, born: Born) -> Taken:
    """All of them, in order. Unknown and revoked devices are not heard."""
    taken = Taken()
    batch = _Batch(session, said, now)
    for name, message in said:
        device = batch.devices.get(name)
        outcome = "unknown"
        if device is not None and device.revoked:
            outcome = "revoked"
            if not isinstance(message, Death):  # the broker says that, when the session has ended
                taken.intruders.add(name)
        elif device is not None:
            outcome = batch.take(device, message, taken, born)
        kind = type(message).__name__.lower()
        taken.outcomes[kind, outcome] = taken.outcomes.get((kind, outcome), 0) + 1
    session.flush()
    return taken


class _Batch:
    """The rows that some messages are about."""

    def __init__(self, session: Session, said: Said, now: float) -> None:
        self._session = session
        self._now = now
        self.devices = held_of(session, {name for name, _ in said})
        here = sorted(self.devices)
        self._heard = {one.device: one for one in self._rows(HeardRow, here)}
        self._running: dict[str, dict[str, RunningRow]] = {name: {} for name in here}
        for running in self._rows(RunningRow, here):
            self._running[running.device][running.model] = running
        self._conditions: dict[str, dict[str, ConditionRow]] = {name: {} for name in here}
        for condition in self._rows(ConditionRow, here):
            self._conditions[condition.device][condition.kind] = condition
        self._stored = self._already_stored(said)

    def _rows(self, table: type[T], names: Sequence[str]) -> list[T]:
        column: Any = table.__table__.c.device
        return list(self._session.scalars(select(table).where(column.in_(names)))) if names else []

    def _already_stored(self, said: Said) -> set[tuple[str, int, int]]:
        """Of the telemetry that may have come before, what did."""
        doubtful: set[tuple[str, int, int]] = set()
        for name, message in said:
            if isinstance(message, Late):
                doubtful.update((name, one.session, one.sequence) for one in message.measured)
            elif isinstance(message, Telemetry):
                row = self._heard.get(name)
                if row is None or message.session != row.session or message.sequence <= row.sequence:
                    doubtful.add((name, message.session, message.sequence))
        if not doubtful:
            return set()
        key = tuple_(TelemetryRow.device, TelemetryRow.session, TelemetryRow.sequence)
        found: set[tuple[str, int, int]] = set()
        every = sorted(doubtful)
        for start in range(0, len(every), 200):
            asked = every[start : start + 200]
            found.update((one[0], one[1], one[2]) for one in self._session.execute(
                select(TelemetryRow.device, TelemetryRow.session, TelemetryRow.sequence).where(key.in_(asked))
            ))  # fmt: skip
        return found

    def take(self, device: Device, message: messages.Message, taken: Taken, born: Born) -> str:
        """What one message changes; in a word, what was made of it."""
        if isinstance(message, Birth):
            return self._birth(device, message, taken, born)
        if isinstance(message, Death):
            return self._death(device, message)
        if isinstance(message, Reported):
            return self._report(device, message)
        if isinstance(message, Telemetry):
            return self._telemetry(device, message, taken)
        if isinstance(message, Late):
            return self._late(device, message, taken)
        if isinstance(message, BundlePiece | JobRefused):
            log_bundles.take_in(self._session, device.name, message)
            return "new"
        if device.last_seen is None or self._now - device.last_seen > 1.0:  # a fetch: nobody retains it
            device.last_seen = self._now
        return "new"

    def _birth(self, device: Device, birth: Birth, taken: Taken, born: Born) -> str:
        if birth.session < device.session:
            return "older session"
        fresh = birth.session > device.session
        taken.superseded |= born(self._session, device, birth, self._now)
        row = self._row(device)
        _keep(row, device_state.after_birth(_known(row), birth.session))
        row.agent, row.emulated, row.simulated = birth.version[:40], birth.emulated, birth.simulated
        if fresh:
            row.born_at, row.deaf_since = self._now, None
        return "new" if fresh else "again"

    def _death(self, device: Device, death: Death) -> str:
        if death.session < device.session:
            return "older session"
        was_alive = device.alive
        if was_alive:
            record(self._session, self._now, device.name, "device.died", device.name, session=death.session)
        device.alive, device.session = False, death.session
        if was_alive:
            self._row(device).died_at = self._now
        return "new" if was_alive else "again"

    def _report(self, device: Device, report: Reported) -> str:
        row = self._row(device)
        heard, verdict = device_state.after_report(_known(row), report.session, report.number)
        if report.session < device.session:
            verdict = "older session"
        _keep(row, heard)
        if device.restored is not None and verdict in ("new", "again"):
            restore_check.compare(self._session, device, report.counter, self._now)
        if verdict != "new":
            return verdict
        device.reported, row.reported_at = msgspec.to_builtins(report), self._now
        self._note(device.name, "report", conditions.of_report(report))
        self._runs(device.name, report)
        return verdict

    def _runs(self, name: str, report: Reported) -> None:
        """What it runs, model by model."""
        rows = self._running[name]
        told = {one.model[:80]: one for one in report.models[:MOST_MODELS]}
        for gone in sorted(set(rows) - set(told)):
            self._session.delete(rows.pop(gone))
        for model, one in told.items():
            row = rows.get(model)
            if row is None:
                row = rows[model] = RunningRow(device=name, model=model, health=None, health_at=None, cut="")
                self._session.add(row)
            if row.release != one.release:
                row.cut = ""
            failed = one.state in conditions.FAILED
            row.release, row.wanted, row.state = one.release[:64], one.wanted[:64], one.state
            row.detail = one.detail[: conditions.LONGEST]
            row.cause = conditions.cause(one.detail or report.safe_mode) if failed else ""

    def _telemetry(self, device: Device, message: Telemetry, taken: Taken) -> str:
        row = self._row(device)
        key = (device.name, message.session, message.sequence)
        heard, verdict = device_state.after_telemetry(
            _known(row), message.session, message.sequence, key in self._stored
        )
        if message.session < device.session:
            verdict = "older session"
        _keep(row, heard)
        if verdict in ("older session", "again"):
            return verdict
        self._store(device.name, message, self._now, late=False, dated="now", taken=taken)
        if verdict == "earlier":
            return verdict
        taken.newest[device.name] = (message.session, message.sequence)
        device.telemetry = {"at": self._now, **msgspec.to_builtins(message)}
        device.last_seen = row.telemetry_at = self._now
        row.clock_off_s = device_state.clock_off_s(message.moment, self._now)
        if message.agent:
            row.agent = message.agent
            deaf = bool(device.statement) and message.statement < device.counter
            row.deaf_since = (row.deaf_since or self._now) if deaf else None
        self._note(device.name, "telemetry", conditions.of_telemetry(message, row.clock_off_s))
        self._measures(device.name, message)
        return verdict

    def _measures(self, name: str, message: Telemetry) -> None:
        """Cut and health of each model that it has said it runs."""
        rows = self._running[name]
        for window in message.models:
            if (row := rows.get(window.model)) is not None and row.cut != window.row:
                row.cut = window.row[:80]
        for health in message.health:
            if (row := rows.get(health.model)) is not None:
                row.health = _merged(row.health, msgspec.to_builtins(health))
                row.health_at = self._now

    def _late(self, device: Device, message: Late, taken: Taken) -> str:
        """Stored where it was measured; what is known of now does not change by it."""
        row = self._row(device)
        device.last_seen = self._now
        for one in message.measured:
            key = (device.name, one.session, one.sequence)
            if key in self._stored:
                row.again += 1
                continue
            if len(messages.encode(one)) > LIMITS.telemetry_bytes:
                row.refused += 1
                continue
            at, dated = device_state.measured_at(one.moment, message.sent, self._now)
            self._store(device.name, one, at, late=True, dated=dated, taken=taken)
            _keep(row, device_state.after_late(_known(row), one.session, one.sequence))
            row.late += 1
            taken.lags_s.append(self._now - at)
        taken.kept.append((device.name, Kept(late=message.number)))
        return "new"

    def _store(self, name: str, message: Telemetry, at: float, *, late: bool, dated: str, taken: Taken) -> None:
        self._stored.add((name, message.session, message.sequence))
        content = msgspec.to_builtins(message)
        self._session.add(
            TelemetryRow(
                device=name, at=at, stored=self._now, session=message.session, sequence=message.sequence,
                late=late, dated=dated, content=content,
            )
        )  # fmt: skip
        taken.stored[name] = taken.stored.get(name, 0) + 1

    def _note(self, name: str, source: str, found: dict[str, str]) -> None:
        """What is wrong now by this source's word: new kinds begin, others end."""
        rows = self._conditions[name]
        for kind in [kind for kind, row in rows.items() if row.source == source and kind not in found]:
            self._session.delete(rows.pop(kind))
        for kind, text in found.items():
            row = rows.get(kind)
            if row is None:
                row = rows[kind] = ConditionRow(device=name, kind=kind, source=source, since=self._now, text=text)
                self._session.add(row)
            elif row.text != text:
                row.text = text

    def _row(self, device: Device) -> HeardRow:
        row = self._heard.get(device.name)
        if row is None:
            row = self._heard[device.name] = HeardRow(
                device=device.name, session=device.session, sequence=-1, report=0, missing=0, again=0, earlier=0,
                older=0, agent="", emulated=False, simulated=False, late=0, refused=0,
            )  # fmt: skip
            self._session.add(row)
        return row


def forget(session: Session, name: str) -> None:
    """A device begins anew, with another key: nothing that the one before it said is its own."""
    for table in (HeardRow, RunningRow, ConditionRow):
        session.execute(delete(table).where(table.device == name))


_FIELDS = ("session", "sequence", "report", "missing", "again", "earlier", "older")


def _known(row: HeardRow) -> device_state.Heard:
    return device_state.Heard(**{name: getattr(row, name) for name in _FIELDS})


def _keep(row: HeardRow, heard: device_state.Heard) -> None:
    for name in _FIELDS:
        if getattr(row, name) != (value := getattr(heard, name)):
            setattr(row, name, value)


def _merged(before: dict[str, Any] | None, said: dict[str, Any]) -> dict[str, Any]:
    """What an agent knew before it was started again stays known of the same release: it compares only once."""
    if before is None or before.get("release") != said.get("release"):
        return said
    compared = ("drift", "top_agrees", "golden_ok")
    return {**{name: before[name] for name in compared if before.get(name) is not None}, **said}
