"""Telemetry rolled up: minutes for a week, hours for a year and a month, so that a page can show a day and a month.

Raw messages are added up after they were stored, in the order of their rows, late ones too; how far that has come is a
row itself. `step` may run in one controller at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sqlalchemy import delete, func, select, tuple_
from sqlalchemy.orm import Session

from edgesplit_controller.database import Database, Desired, Device, TelemetryRow
from edgesplit_controller.truth_tables import MarkRow, RolledRow

SPANS: Mapping[str, int] = {"minute": 60, "hour": 3_600}
KEPT_S: Mapping[int, float] = {60: 7 * 86_400.0, 3_600: 400 * 86_400.0}
MARK = "telemetry rolled up to row"
AT_ONCE = 2_000
KEYS_AT_ONCE = 200
DEVICES_AT_ONCE = 500
RAW_S = 30 * 86_400.0
"""Of a device that goes on talking far fewer are kept (`devices.HISTORY`)."""
SETTLED_S = 10.0
"""Rows are numbered before they are committed: so long after one was stored, none with a lower number comes."""
OTHER = "(other)"
"""Models that a device was never told to run, together."""
DEVICE = ""
SUMS = ("requests", "failed", "fallbacks", "switches", "late", "up_bytes")
Content = dict[str, Any]
Key = tuple[str, str, int, float]
"""Device, model, span, beginning."""


def keys_of(device: str, model: str, at: float) -> list[Key]:
    """Where something that was measured `at` belongs."""
    return [(device, model, span, float(at // span * span)) for span in SPANS.values()]


def with_window(content: Content, window: Mapping[str, Any]) -> Content:
    """One window of a model's requests more."""
    requests = int(window.get("requests", 0))
    sums = {name: content.get(name, 0) + int(window.get(name, 0)) for name in SUMS}
    times = {
        f"{name}_sum": content.get(f"{name}_sum", 0.0) + float(window.get(name, 0.0)) * requests
        for name in ("device_s", "link_s", "remote_s", "latency_p50_s", "predicted_s")
    }
    weighed = requests if window.get("joules_basis") else 0
    cuts = dict(content.get("cuts", {}))
    if requests:
        row = str(window.get("row", ""))
        cuts[row if row in cuts or len(cuts) < 64 else OTHER] = cuts.get(row, 0) + requests
    return {
        **sums,
        **times,
        "latency_p95_worst_s": max(content.get("latency_p95_worst_s", 0.0), float(window.get("latency_p95_s", 0.0))),
        "joules_sum": content.get("joules_sum", 0.0) + float(window.get("joules", 0.0)) * weighed,
        "weighed": content.get("weighed", 0) + weighed,
        "cuts": cuts,
    }


def with_device(content: Content, message: Mapping[str, Any], *, late: bool) -> Content:
    """One message more, of what is the device's and no model's."""
    power = message.get("power") or {}
    queue = message.get("queue") or {}
    board = message.get("board") or {}
    weak = bool(power.get("under_voltage"))
    speed = power.get("speed")
    return {
        "samples": content.get("samples", 0) + 1,
        "late": content.get("late", 0) + late,
        "up_bytes_per_s_sum": content.get("up_bytes_per_s_sum", 0.0) + float(message.get("up_bytes_per_s", 0.0)),
        "rtt_s_sum": content.get("rtt_s_sum", 0.0) + float(message.get("rtt_s", 0.0)),
        "remote_ok": content.get("remote_ok", 0) + bool(message.get("remote_ok")),
        "under_voltage": content.get("under_voltage", 0) + weak,
        "throttled": content.get("throttled", 0) + (speed is not None and speed < 0.99),
        "watts_sum": content.get("watts_sum", 0.0) + float(power.get("watts") or 0.0),
        "watts_samples": content.get("watts_samples", 0) + (power.get("watts") is not None),
        "celsius_max": _extreme(max, content.get("celsius_max"), power.get("celsius")),
        "battery_percent_min": _extreme(min, content.get("battery_percent_min"), power.get("battery_percent")),
        "disk_free_bytes_min": _extreme(min, content.get("disk_free_bytes_min"), board.get("disk_free_bytes")),
        "queue_max": _extreme(max, content.get("queue_max"), queue.get("here", 0)),
    }


def shown_bucket(begins: float, span_s: int, content: Content) -> dict[str, Any]:
    """A bucket with means in place of sums."""
    shown: dict[str, Any] = {"at": begins, "span_s": span_s}
    count = content.get("requests", 0)
    for name, value in content.items():
        if name.endswith("_sum"):
            over = {"joules_sum": content.get("weighed", 0), "watts_sum": content.get("watts_samples", 0)}.get(
                name, content.get("samples", count)
            )
            shown[name.removesuffix("_sum")] = value / over if over else None
        elif name not in ("weighed", "watts_samples"):
            shown[name] = value
    return shown


class Rolling:
    """Adds telemetry up."""

    def __init__(self, database: Database, *, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def step(self) -> int:
        """Add up what was stored since the last step, at most so much that it takes a moment; how many messages."""
        with self._database.write() as session:
            mark = session.get(MarkRow, MARK)
            if mark is None:
                mark = MarkRow(name=MARK, value=0)
                session.add(mark)
            settled = self._now() - SETTLED_S
            new = select(TelemetryRow).where(TelemetryRow.id > mark.value).order_by(TelemetryRow.id).limit(AT_ONCE)
            rows = []
            for row in session.scalars(new):
                if row.stored > settled:
                    break
                rows.append(row)
            if rows:
                _add_up(session, rows)
                mark.value = rows[-1].id
            return len(rows)

    def trim(self) -> None:
        """Drop what is too old: buckets, and raw messages of devices that say nothing more."""
        with self._database.write() as session:
            for span, kept_s in KEPT_S.items():
                old = (RolledRow.span_s == span, RolledRow.begins < self._now() - kept_s)
                session.execute(delete(RolledRow).where(*old))
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

    def history(self, device: str, span: str, since: float, until: float) -> dict[str, list[dict[str, Any]]]:
        """By model (and the empty name for the device itself), the buckets of that time, oldest first."""
        span_s = SPANS[span]
        begin = float(since // span_s * span_s)
        wanted = (
            RolledRow.device == device, RolledRow.span_s == span_s, RolledRow.begins >= begin,
            RolledRow.begins < until,
        )  # fmt: skip
        found: dict[str, list[dict[str, Any]]] = {}
        with self._database.read() as session:
            for row in session.scalars(select(RolledRow).where(*wanted).order_by(RolledRow.begins)):
                found.setdefault(row.model, []).append(shown_bucket(row.begins, span_s, row.content))
        return found


def _add_up(session: Session, rows: list[TelemetryRow]) -> None:
    devices = sorted({row.device for row in rows})
    told: dict[str, set[str]] = {}
    for desired in session.scalars(select(Desired).where(Desired.device.in_(devices))):
        told.setdefault(desired.device, set()).add(desired.model)
    put: list[tuple[Key, Callable[[Content], Content]]] = []
    for row in rows:
        message, late = row.content, bool(row.late)
        put += [(key, partial(with_device, message=message, late=late)) for key in keys_of(row.device, DEVICE, row.at)]
        for window in message.get("models", ()):
            model = str(window["model"])
            known = model if model in told.get(row.device, ()) else OTHER
            put += [(key, partial(with_window, window=window)) for key in keys_of(row.device, known, row.at)]
    there = _buckets(session, sorted({key for key, _ in put}))
    contents: dict[Key, Content] = {key: row.content for key, row in there.items()}
    for key, added in put:
        contents[key] = added(contents.get(key, {}))
    for key, content in contents.items():
        if key in there:
            there[key].content = content
            continue
        device, model, span_s, begins = key
        session.add(RolledRow(device=device, model=model, span_s=span_s, begins=begins, content=content))


def _buckets(session: Session, keys: list[Key]) -> dict[Key, RolledRow]:
    """Those of them that are there."""
    column = tuple_(RolledRow.device, RolledRow.model, RolledRow.span_s, RolledRow.begins)
    found: dict[Key, RolledRow] = {}
    for start in range(0, len(keys), KEYS_AT_ONCE):
        asked = select(RolledRow).where(column.in_(keys[start : start + KEYS_AT_ONCE]))
        found.update({(row.device, row.model, row.span_s, row.begins): row for row in session.scalars(asked)})
    return found


def _extreme(choose: Callable[[float, float], float], known: float | None, seen: float | None) -> float | None:
    if known is None or seen is None:
        return seen if known is None else known
    return choose(known, seen)
