"""Columns, states and the fields of stored messages are named for what they hold; values stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

COLUMNS = {
    "rollouts": {"why": "reason", "pace": "rate_state"},
    "rollout_stages": {"asked": "size"},
    "rollout_devices": {"told_at": "assigned_at", "goes_back": "rolls_back"},
    "bundles": {"why": "reason", "asked": "requested"},
    "running": {"wanted": "desired_release"},
    "heard": {"deaf_since": "unresponsive_since", "late": "from_backlog"},
    "telemetry": {"late": "from_backlog"},
    "devices": {"stated": "published"},
    "replan_proposals": {"told": "summary"},
    "operators": {"made": "created"},
    "operator_tokens": {"made": "created"},
    "browser_sessions": {"made": "created"},
}
"""New column names by old ones, by table."""
VALUES = {
    "rollout_devices": ("state", {"told": "assigned", "gone back": "rolled back"}),
    "bundles": ("state", {"asked": "requested", "coming": "receiving", "here": "complete", "spoilt": "corrupt"}),
    "conditions": ("kind", {"deaf": "unresponsive"}),
}
"""Column, and new values by old ones, by table."""
BIRTH = {
    "boot_s": "agent_uptime_s", "version": "agent_version", "start": "start_id", "certificate": "certificate_serial",
    "built_for": "build_tag",
}  # fmt: skip
REPORTED = {
    "counter": "statement_counter", "trouble": "statement_problem", "kept": "gateway_models",
    "number": "report_number", "wanted": "desired_release",
}  # fmt: skip
HEALTH = {"top_agrees": "top1_agrees", "since_s": "active_s"}
TELEMETRY = {
    "moment": "measured_at", "agent": "agent_version", "statement": "statement_counter", "board": "machine",
    "store": "backlog", "remote_ok": "remote_usable", "late": "emulation_overruns", "trouble": "problem",
    "why": "mode_reason", "updates_wait": "updates_deferred_reason", "watts_from": "watts_source",
    "speed": "clock_ratio", "here": "in_flight", "boot": "boot_id", "up_s": "since_boot_s", "waiting": "messages",
    "waiting_bytes": "bytes", "dropped_trouble": "dropped_failures", "spoilt": "corrupt", **HEALTH,
}  # fmt: skip
RATE_STATE = {"told": "assigned"}
PROPOSAL = {"why": "reason", "after": "split_after", "heard": "measured_devices", "what": "quantity"}
DOCUMENTS: tuple[tuple[str, tuple[str, ...], dict[str, dict[str, str]]], ...] = (
    ("devices", ("name",), {"birth": BIRTH, "reported": REPORTED, "telemetry": TELEMETRY}),
    ("telemetry", ("id",), {"content": TELEMETRY}),
    ("running", ("device", "model"), {"health": HEALTH}),
    ("rollouts", ("id",), {"rate_state": RATE_STATE}),
    ("replan_proposals", ("id",), {"summary": PROPOSAL}),
)
"""Table, its key, and by JSON column the new field names by old ones."""
BUCKETS = {"telemetry_rolled": ("device", "model", "span_s", "begins"),
           "models_rolled": ("model", "group", "span_s", "begins")}  # fmt: skip
AT_ONCE = 1_000


def upgrade() -> None:
    """Rename the columns in place, then the values, then the fields of JSON documents."""
    connection = op.get_bind()
    quote = connection.dialect.identifier_preparer.quote
    for table, names in COLUMNS.items():
        for old, new in names.items():
            # Both SQLite and PostgreSQL rename a column without copying its table, and indexes follow.
            op.execute(f"ALTER TABLE {quote(table)} RENAME COLUMN {quote(old)} TO {quote(new)}")
    for table, (column, values) in VALUES.items():
        target = sa.table(table, sa.column(column))
        for old, new in values.items():
            op.execute(target.update().where(target.c[column] == old).values({column: new}))
    for table, key, columns in DOCUMENTS:
        _rename_fields(connection, table, key, columns)
    for table, key in BUCKETS.items():
        # A bucket of the device itself (empty model) counts messages from the backlog, any other emulation overruns.
        late = {True: "from_backlog", False: "emulation_overruns"}
        for of_device, new in late.items():
            names = {"late": new, "remote_ok": "remote_usable"}
            _rename_fields(connection, table, key, {"content": names}, of_device=of_device)


def _rename_fields(
    connection: sa.Connection, table: str, key: tuple[str, ...], columns: Mapping[str, Mapping[str, str]],
    *, of_device: bool | None = None,
) -> None:  # fmt: skip
    target = sa.table(table, *(sa.column(name) for name in key), *(sa.column(name, sa.JSON()) for name in columns))
    rows = sa.select(target)
    if of_device is not None:
        rows = rows.where((target.c.model == "") == of_device)
    update = target.update().where(*(target.c[name] == sa.bindparam(f"key_{name}") for name in key))
    update = update.values({name: sa.bindparam(f"new_{name}", type_=sa.JSON()) for name in columns})
    keys = [target.c[name] for name in key]
    page = rows.order_by(*keys).limit(AT_ONCE)
    while found := connection.execute(page).mappings().all():
        changed = []
        for row in found:
            new = {name: _renamed(row[name], names) for name, names in columns.items()}
            if any(new[name] != row[name] for name in columns):
                changed.append({f"key_{name}": row[name] for name in key} | {f"new_{n}": v for n, v in new.items()})
        if changed:
            connection.execute(update, changed)
        last = sa.tuple_(*(sa.literal(found[-1][name]) for name in key))
        page = rows.where(sa.tuple_(*keys) > last).order_by(*keys).limit(AT_ONCE)


def _renamed(document: Any, names: Mapping[str, str]) -> Any:
    """The document with its fields renamed at every depth. `at` is renamed only in a device's own time."""
    if isinstance(document, list):
        return [_renamed(entry, names) for entry in document]
    if not isinstance(document, dict):
        return document
    result = {names.get(name, name): _renamed(value, names) for name, value in document.items()}
    if isinstance(moment := result.get("measured_at"), dict) and "at" in moment:
        moment["unix_s"] = moment.pop("at")
    return result
