"""Ingests messages of devices into database rows, a batch in one transaction. `device_state` decides which messages are
current.

Every row is found by the device name in the MQTT topic, so that no device can write another's. Rows are read for the
whole batch at once, in a transaction that locks these devices, so that several controller processes can ingest messages
of the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from sqlalchemy import delete, select, tuple_
from sqlalchemy.orm import Session

from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import Ack, Backlog, Birth, Death, JobRefused, LogPiece, Reported, Telemetry
from edgesplit_controller.fleet import audits, conditions, device_state, log_bundles, restore_check
from edgesplit_controller.storage.database import locked_devices, record_event
from edgesplit_controller.storage.tables.base import Table
from edgesplit_controller.storage.tables.core import Device, RemovedDeviceRow, TelemetryRow
from edgesplit_controller.storage.tables.device_state import ConditionRow, DeviceSessionRow, RunningRow

Received = Sequence[tuple[str, messages.Message]]
"""Messages with the name of their device, in order of arrival."""
OnBirth = Callable[[Session, Device, Birth, float], bool]
"""Callback for a birth message of a device that is not revoked; returns whether older certificates were revoked."""
T = TypeVar("T", bound=Table)


@dataclass(slots=True)
class IngestResult:
    """Result of ingesting a batch of messages."""

    intruders: set[str] = field(default_factory=set)
    """Revoked and removed devices that sent a message: their session must be ended."""
    removed: set[str] = field(default_factory=set)
    """Removed devices that were heard, also by their last will: what the broker retained of it must be cleared."""
    superseded: bool = False
    """A renewed certificate was seen in use, so that older ones were revoked."""
    acks: list[tuple[str, Ack]] = field(default_factory=list)
    """Acknowledgements to send to devices once this transaction is committed."""
    stored: dict[str, int] = field(default_factory=dict)
    """Telemetry messages that were stored, by device."""
    newest: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Session and sequence number of the newest live telemetry, by device."""
    lags_s: list[float] = field(default_factory=list)
    """Age of each backlog telemetry message on arrival, in seconds."""
    outcomes: dict[tuple[str, str], int] = field(default_factory=dict)
    """Number of messages by kind and outcome."""
    audits: dict[str, audits.AnswerAudits] = field(default_factory=dict)
    """What devices counted of changed answers, by model."""


def ingest_messages(session: Session, received: Received, now: float, on_birth: OnBirth) -> IngestResult:
    """Ingest messages, in order. Those of unknown, revoked and removed devices are dropped."""
    result = IngestResult()
    batch = _IngestBatch(session, received, now)
    result.removed = _note_messages_of_removed(session, {name for name, _ in received} - set(batch.devices))
    for name, message in received:
        device = batch.devices.get(name)
        outcome = "unknown"
        if name in result.removed or (device is not None and device.revoked):
            outcome = "revoked"
            if not isinstance(message, Death):  # a last will, published by the broker
                result.intruders.add(name)
        elif device is not None:
            outcome = batch.apply(device, message, result, on_birth)
        kind = type(message).__name__.lower()
        result.outcomes[kind, outcome] = result.outcomes.get((kind, outcome), 0) + 1
    session.flush()
    return result


def _note_messages_of_removed(session: Session, names: Collection[str]) -> set[str]:
    """Those of these names whose device was removed. Their messages may be retained, so the broker must be cleared
    again."""
    if not names:
        return set()
    rows = session.scalars(select(RemovedDeviceRow).where(RemovedDeviceRow.device.in_(names))).all()
    for row in rows:
        row.cleared = False
    return {row.device for row in rows}


class _IngestBatch:
    """The rows that a batch of messages reads and changes."""

    def __init__(self, session: Session, received: Received, now: float) -> None:
        self._session = session
        self._now = now
        self.devices = locked_devices(session, {name for name, _ in received})
        names = sorted(self.devices)
        self._sequence_rows = {row.device: row for row in self._rows(DeviceSessionRow, names)}
        self._running: dict[str, dict[str, RunningRow]] = {name: {} for name in names}
        for running in self._rows(RunningRow, names):
            self._running[running.device][running.model] = running
        self._conditions: dict[str, dict[str, ConditionRow]] = {name: {} for name in names}
        for condition in self._rows(ConditionRow, names):
            self._conditions[condition.device][condition.kind] = condition
        self._stored = self._already_stored(received)

    def _rows(self, table: type[T], names: Sequence[str]) -> list[T]:
        column: Any = table.__table__.c.device
        return list(self._session.scalars(select(table).where(column.in_(names)))) if names else []

    def _already_stored(self, received: Received) -> set[tuple[str, int, int]]:
        """Device, session and sequence number of the telemetry in the batch that is in the database already."""
        doubtful: set[tuple[str, int, int]] = set()
        for name, message in received:
            if isinstance(message, Backlog):
                doubtful.update((name, entry.session, entry.sequence) for entry in message.messages)
            elif isinstance(message, Telemetry):
                # Live telemetry beyond the newest number of its session cannot be stored yet: no lookup is needed.
                row = self._sequence_rows.get(name)
                if row is None or message.session != row.session or message.sequence <= row.sequence:
                    doubtful.add((name, message.session, message.sequence))
        if not doubtful:
            return set()
        key = tuple_(TelemetryRow.device, TelemetryRow.session, TelemetryRow.sequence)
        stored: set[tuple[str, int, int]] = set()
        keys = sorted(doubtful)
        for start in range(0, len(keys), 200):
            chunk = keys[start : start + 200]
            stored.update((entry[0], entry[1], entry[2]) for entry in self._session.execute(
                select(TelemetryRow.device, TelemetryRow.session, TelemetryRow.sequence).where(key.in_(chunk))
            ))  # fmt: skip
        return stored

    def apply(self, device: Device, message: messages.Message, result: IngestResult, on_birth: OnBirth) -> str:
        """Apply one message to the rows; returns its outcome in a word, for the metrics."""
        if isinstance(message, Birth):
            return self._birth(device, message, result, on_birth)
        if isinstance(message, Death):
            return self._death(device, message)
        if isinstance(message, Reported):
            return self._report(device, message)
        if isinstance(message, Telemetry):
            return self._telemetry(device, message, result)
        if isinstance(message, Backlog):
            return self._backlog(device, message, result)
        if isinstance(message, LogPiece | JobRefused):
            log_bundles.on_message(self._session, device.name, message)
            return "new"
        if device.last_seen is None or self._now - device.last_seen > 1.0:  # a fetch, which the broker never retains
            device.last_seen = self._now
        return "new"

    def _birth(self, device: Device, birth: Birth, result: IngestResult, on_birth: OnBirth) -> str:
        if birth.session < device.session:
            return "older session"
        fresh = birth.session > device.session
        result.superseded |= on_birth(self._session, device, birth, self._now)
        row = self._sequence_row(device)
        _update_row(row, device_state.after_birth(_to_state(row), birth.session))
        row.agent, row.emulated, row.simulated = birth.agent_version, birth.emulated, birth.simulated
        if fresh:
            row.born_at, row.unresponsive_since = self._now, None
        return "new" if fresh else "duplicate"

    def _death(self, device: Device, death: Death) -> str:
        if death.session < device.session:
            return "older session"
        was_alive = device.alive
        if was_alive:
            record_event(self._session, self._now, device.name, "device.died", device.name, session=death.session)
        device.alive, device.session = False, death.session
        if was_alive:
            self._sequence_row(device).died_at = self._now
        return "new" if was_alive else "duplicate"

    def _report(self, device: Device, report: Reported) -> str:
        row = self._sequence_row(device)
        sequence_state, verdict = device_state.after_report(_to_state(row), report.session, report.report_number)
        if report.session < device.session:
            verdict = "older session"
        _update_row(row, sequence_state)
        # A retained report is repeated at each connection: also a repeated one shows the device's statement.
        if device.restored is not None and verdict in ("new", "duplicate"):
            restore_check.check_restored(self._session, device, report.statement_counter, self._now)
        if verdict != "new":
            return verdict
        device.reported, row.reported_at = msgspec.to_builtins(report), self._now
        self._store_conditions(device.name, "report", conditions.from_report(report))
        self._store_running(device.name, report)
        return verdict

    def _store_running(self, name: str, report: Reported) -> None:
        """Store the release and state of each reported model."""
        rows = self._running[name]
        reported = {status.model: status for status in report.models}
        for removed in sorted(set(rows) - set(reported)):
            self._session.delete(rows.pop(removed))
        for model, status in reported.items():
            row = rows.get(model)
            if row is None:
                row = rows[model] = RunningRow(
                    device=name, model=model, health=None, health_at=None, cut="", audits=None
                )
                self._session.add(row)
            if row.release != status.release:
                row.cut = ""
            failed = status.state in conditions.FAILED_STATES
            row.release, row.desired_release, row.state = status.release, status.desired_release, status.state
            row.detail = status.detail[: conditions.MAX_TEXT_CHARS]
            row.cause = conditions.normalise_cause(status.detail or report.safe_mode) if failed else ""

    def _telemetry(self, device: Device, message: Telemetry, result: IngestResult) -> str:
        row = self._sequence_row(device)
        key = (device.name, message.session, message.sequence)
        sequence_state, verdict = device_state.after_telemetry(
            _to_state(row), message.session, message.sequence, key in self._stored
        )
        if message.session < device.session:
            verdict = "older session"
        _update_row(row, sequence_state)
        if verdict in ("older session", "duplicate"):
            return verdict
        self._store(device.name, message, self._now, late=False, dated="now", result=result)
        self._store_audits(device.name, message, result)
        # Reordered telemetry belongs to the history; the device's present state comes from newer messages.
        if verdict == "out of order":
            return verdict
        result.newest[device.name] = (message.session, message.sequence)
        device.telemetry = {"at": self._now, **msgspec.to_builtins(message)}
        device.last_seen = row.telemetry_at = self._now
        row.clock_off_s = device_state.clock_off_s(message.measured_at, self._now)
        if message.agent_version:
            row.agent = message.agent_version
            is_behind = bool(device.statement) and message.statement_counter < device.counter
            row.unresponsive_since = (row.unresponsive_since or self._now) if is_behind else None
        self._store_conditions(device.name, "telemetry", conditions.from_telemetry(message, row.clock_off_s))
        self._store_measurements(device.name, message)
        return verdict

    def _store_measurements(self, name: str, message: Telemetry) -> None:
        """Store split point and health of each model that the device has reported."""
        rows = self._running[name]
        for window in message.models:
            if (row := rows.get(window.model)) is not None and row.cut != window.row:
                row.cut = window.row
        for health in message.health:
            if (row := rows.get(health.model)) is not None:
                row.health = _merged(row.health, msgspec.to_builtins(health))
                row.health_at = self._now

    def _store_audits(self, name: str, message: Telemetry, result: IngestResult) -> None:
        """Add what the device counted of changed answers to the sums of its releases."""
        rows = self._running[name]
        for window in message.models:
            if (row := rows.get(window.model)) is not None:
                releases = (row.release, row.desired_release)
                row.audits = audits.with_window(row.audits, window, releases)
                if (fresh := audits.audits_of(window)) is not None and window.release in releases:
                    before = result.audits.get(window.model)
                    result.audits[window.model] = fresh if before is None else before + fresh

    def _backlog(self, device: Device, message: Backlog, result: IngestResult) -> str:
        """Store backlog telemetry under the time of its measurement; the present state does not change."""
        row = self._sequence_row(device)
        device.last_seen = self._now
        for telemetry in message.messages:
            key = (device.name, telemetry.session, telemetry.sequence)
            if key in self._stored:
                row.again += 1
                continue
            if len(messages.encode(telemetry)) > LIMITS.telemetry_bytes:
                row.refused += 1
                continue
            at, dated = device_state.measured_at(telemetry.measured_at, message.sent_at, self._now)
            self._store(device.name, telemetry, at, late=True, dated=dated, result=result)
            self._store_audits(device.name, telemetry, result)
            _update_row(row, device_state.after_backlog(_to_state(row), telemetry.session, telemetry.sequence))
            row.from_backlog += 1
            result.lags_s.append(self._now - at)
        result.acks.append((device.name, Ack(batch=message.batch)))
        return "new"

    def _store(self, name: str, message: Telemetry, at: float, *, late: bool, dated: str, result: IngestResult) -> None:
        self._stored.add((name, message.session, message.sequence))
        content = msgspec.to_builtins(message)
        self._session.add(
            TelemetryRow(
                device=name, at=at, stored=self._now, session=message.session, sequence=message.sequence,
                from_backlog=late, dated=dated, content=content,
            )
        )  # fmt: skip
        result.stored[name] = result.stored.get(name, 0) + 1

    def _store_conditions(self, name: str, source: str, conditions_by_kind: dict[str, str]) -> None:
        """Store the conditions of one source, report or telemetry: add new kinds, delete those that have ended."""
        rows = self._conditions[name]
        for kind in [kind for kind, row in rows.items() if row.source == source and kind not in conditions_by_kind]:
            self._session.delete(rows.pop(kind))
        for kind, text in conditions_by_kind.items():
            row = rows.get(kind)
            if row is None:
                row = rows[kind] = ConditionRow(device=name, kind=kind, source=source, since=self._now, text=text)
                self._session.add(row)
                if kind in conditions.SELF_REPORTED:
                    record_event(self._session, self._now, name, f"device.{kind.replace(' ', '_')}", name, text=text)
            elif row.text != text:
                row.text = text

    def _sequence_row(self, device: Device) -> DeviceSessionRow:
        row = self._sequence_rows.get(device.name)
        if row is None:
            row = self._sequence_rows[device.name] = DeviceSessionRow(
                device=device.name, session=device.session, sequence=-1, report=0, missing=0, again=0, earlier=0,
                older=0, agent="", emulated=False, simulated=False, from_backlog=0, refused=0,
            )  # fmt: skip
            self._session.add(row)
        return row


def delete_reported_state(session: Session, name: str) -> None:
    """Delete what was reported under this name: the device enrolled with another key."""
    for table in (DeviceSessionRow, RunningRow, ConditionRow):
        session.execute(delete(table).where(table.device == name))


_SEQUENCE_FIELDS = ("session", "sequence", "report", "missing", "again", "earlier", "older")


def _to_state(row: DeviceSessionRow) -> device_state.SequenceState:
    return device_state.SequenceState(**{name: getattr(row, name) for name in _SEQUENCE_FIELDS})


def _update_row(row: DeviceSessionRow, state: device_state.SequenceState) -> None:
    for name in _SEQUENCE_FIELDS:
        if getattr(row, name) != (value := getattr(state, name)):
            setattr(row, name, value)


def _merged(before: dict[str, Any] | None, reported: dict[str, Any]) -> dict[str, Any]:
    """The new health with comparison results of an earlier run of the same release: an agent compares outputs once per
    release, not after each start."""
    if before is None or before.get("release") != reported.get("release"):
        return reported
    compared = (
        "drift", "top1_agrees", "golden_ok", "golden_labelled", "golden_right", "golden_compared", "golden_agreeing"
    )  # fmt: skip
    return {**{name: before[name] for name in compared if before.get(name) is not None}, **reported}
