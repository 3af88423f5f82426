"""Telemetry by days and months, and by model over the fleet, made of the hours that are there; how the parts are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0004"

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
HOUR, DAY, MONTH = 3_600, 86_400, 2_592_000
AT_ONCE = 1_000


def upgrade() -> None:
    """Add two tables, and what the hours add up to."""
    rolled = sa.table(
        "telemetry_rolled", sa.column("device"), sa.column("model"), sa.column("span_s"), sa.column("begins"),
        sa.column("content", sa.JSON()),
    )  # fmt: skip
    models = op.create_table(
        "models_rolled",
        sa.Column("model", sa.String(), primary_key=True),
        sa.Column("group", sa.String(), primary_key=True),
        sa.Column("span_s", BIG, primary_key=True),
        sa.Column("begins", sa.Double(), primary_key=True),
        sa.Column("content", sa.JSON(), nullable=False),
    )
    op.create_index("models_rolled_by_age", "models_rolled", ["span_s", "begins"])
    op.create_table(
        "parts",
        sa.Column("process", BIG, primary_key=True),
        sa.Column("name", sa.String(), primary_key=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
    )
    _add_up(op.get_bind(), rolled, models)


def _add_up(connection: sa.Connection, rolled: Any, models: Any) -> None:
    devices = sa.table("devices", sa.column("name"), sa.column("group"))
    groups = {row[0]: row[1] for row in connection.execute(sa.select(devices.c.name, devices.c.group))}
    of_models: dict[tuple[str, str, int, float], dict[str, Any]] = {}
    made: list[dict[str, Any]] = []
    for (device, model), rows in groupby(_hours(connection, rolled), key=lambda row: (row[0], row[1])):
        mine: dict[tuple[int, float], dict[str, Any]] = {}
        for _, _, begins, content in rows:
            for span, at in ((HOUR, begins), (DAY, begins // DAY * DAY), (MONTH, _first_of_month(begins))):
                if span != HOUR:
                    mine[span, at] = _merged(mine.get((span, at), {}), content)
                if model:
                    key = (model, groups.get(device, ""), span, at)
                    of_models[key] = _merged(of_models.get(key, {}), content)
        made += [
            {"device": device, "model": model, "span_s": span, "begins": at, "content": content}
            for (span, at), content in mine.items()
        ]
        if len(made) >= AT_ONCE:
            connection.execute(rolled.insert(), made)
            made = []
    if made:
        connection.execute(rolled.insert(), made)
    if of_models:
        names = ("model", "group", "span_s", "begins")
        rows_of_models = [
            {**dict(zip(names, key, strict=True)), "content": content} for key, content in of_models.items()
        ]
        connection.execute(models.insert(), rows_of_models)


def _hours(connection: sa.Connection, rolled: Any) -> Iterator[tuple[str, str, float, dict[str, Any]]]:
    """Of one device and model after the other; read by the key, for a table may be changed while it is read."""
    names = connection.execute(sa.select(rolled.c.device, rolled.c.model).distinct().order_by("device", "model"))
    for device, model in names.all():
        wanted = sa.select(rolled.c.begins, rolled.c.content).where(
            rolled.c.device == device, rolled.c.model == model, rolled.c.span_s == HOUR
        )
        for begins, content in connection.execute(wanted).all():
            yield device, model, begins, content


def _first_of_month(at: float) -> float:
    moment = datetime.fromtimestamp(at, UTC)
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """As telemetry added up at the time of this step."""
    made = dict(one)
    for name, value in other.items():
        before = made.get(name)
        if before is None or value is None:
            made[name] = value if before is None else before
        elif isinstance(value, dict):
            made[name] = {key: before.get(key, 0) + value.get(key, 0) for key in {**before, **value}}
        elif name.endswith(("_max", "_worst_s")):
            made[name] = max(before, value)
        elif name.endswith("_min"):
            made[name] = min(before, value)
        else:
            made[name] = before + value
    return made
