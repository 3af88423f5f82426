"""The fleet as one table: a row per device, small enough to send for thousands.

A device that is not online is shown with its last reported values, and its state says so; an emulated device is marked
as `emulated`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import load_only

from edgesplit_controller.fleet import conditions
from edgesplit_controller.fleet.devices import Devices
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Desired, Device

MAX_NAMES = 200
"""Limit of devices that are requested by name; for more, read the whole table."""
_COLUMNS = (
    Device.name, Device.device_class, Device.group, Device.labels, Device.enrolled, Device.revoked, Device.session,
    Device.alive, Device.last_seen, Device.birth, Device.reported, Device.telemetry, Device.counter,
)  # fmt: skip


def fleet_rows(database: Database, devices: Devices, *, names: Collection[str] = ()) -> list[dict[str, Any]]:
    """A row per visible device, by name: those in `names`, or all; open claims are included."""
    query = select(Device).options(load_only(*_COLUMNS)).order_by(Device.name)
    desired_query = select(Desired.device, Desired.model, Desired.release)
    if names:
        query, desired_query = query.where(Device.name.in_(names)), desired_query.where(Desired.device.in_(names))
    if devices.groups is not None:
        query = query.where(Device.group.in_(devices.groups))
    desired: defaultdict[str, dict[str, str]] = defaultdict(dict)
    with database.read() as session:
        rows = session.scalars(query).all()
        for device, model, release in session.execute(desired_query):
            desired[device][model] = release
    enrolled = {row.name for row in rows}
    claims = [] if names and set(names) <= enrolled else devices.open_claims()
    open_claims = [claim for claim in claims if claim.device not in enrolled and (not names or claim.device in names)]
    return [
        *(fleet_row(row, devices.state(row), desired[row.name]) for row in rows),
        *(_claim_row(claim.device, claim.device_class, claim.group, claim.labels) for claim in open_claims),
    ]


def fleet_row(device: Device, state: str, desired: Mapping[str, str]) -> dict[str, Any]:
    """The table's row of one device."""
    birth, reported, telemetry = device.birth or {}, device.reported or {}, device.telemetry or {}
    windows = {window["model"]: window for window in telemetry.get("models", [])}
    models = [_model(entry, windows.get(entry["model"], {})) for entry in reported.get("models", [])]
    reported_models = {entry["model"].partition("@")[0] for entry in models}
    models += [
        {"model": model, "release": "", "desired_release": release, "state": "assigned", "row": "", "detail": ""}
        for model, release in sorted(desired.items())
        if model not in reported_models
    ]
    power = telemetry.get("power") or {}
    return {
        "name": device.name, "state": state, "group": device.group, "labels": device.labels,
        "class": device.device_class, "emulated": bool(birth.get("emulated")),
        "simulated": bool(birth.get("simulated")), "version": birth.get("agent_version", ""),
        "last_seen": device.last_seen, "models": models,
        "p95_s": max((window["latency_p95_s"] for window in windows.values() if window.get("requests")), default=None),
        "requests": sum(window.get("requests", 0) for window in windows.values()),
        "failed": sum(window.get("failed", 0) for window in windows.values()),
        "fallbacks": sum(window.get("fallbacks", 0) for window in windows.values()),
        "remote_usable": telemetry.get("remote_usable"), "celsius": power.get("celsius"),
        "causes": conditions.failure_causes(reported, telemetry),
    }  # fmt: skip


def _model(state: Mapping[str, Any], window: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": state["model"], "release": state["release"], "desired_release": state["desired_release"],
        "state": state["state"], "row": window.get("row", ""), "detail": state.get("detail", ""),
    }  # fmt: skip


def _claim_row(name: str, device_class: str, group: str, labels: Mapping[str, str]) -> dict[str, Any]:
    nothing: dict[str, Sequence[Any]] = {"models": [], "causes": []}
    return {
        "name": name, "state": "claimed", "group": group, "labels": dict(labels), "class": device_class,
        "emulated": False, "simulated": False, "version": "", "last_seen": None, "p95_s": None, "requests": 0,
        "failed": 0, "fallbacks": 0, "remote_usable": None, "celsius": None, **nothing,
    }  # fmt: skip
