"""The fleet as one table: a line per device with what an operator looks for, small enough to send for thousands.

Says of each fact what it is: a device that is not online is shown with what it last said, and its state says so; what
comes from an emulated device says `emulated`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import load_only

from edgesplit_controller.fleet import conditions
from edgesplit_controller.fleet.devices import Devices
from edgesplit_controller.storage.database import Database, Desired, Device

MOST_NAMES = 200
"""Devices asked for by name at once; who wants more reads the whole table."""
_COLUMNS = (
    Device.name, Device.device_class, Device.group, Device.labels, Device.enrolled, Device.revoked, Device.session,
    Device.alive, Device.last_seen, Device.birth, Device.reported, Device.telemetry, Device.counter,
)  # fmt: skip


def fleet_rows(database: Database, devices: Devices, *, names: Collection[str] = ()) -> list[dict[str, Any]]:
    """A row per device that exists for who asks, by name: those named, or all. Open claims among them."""
    wanted = select(Device).options(load_only(*_COLUMNS)).order_by(Device.name)
    told = select(Desired.device, Desired.model, Desired.release)
    if names:
        wanted, told = wanted.where(Device.name.in_(names)), told.where(Desired.device.in_(names))
    if devices.groups is not None:
        wanted = wanted.where(Device.group.in_(devices.groups))
    desired: defaultdict[str, dict[str, str]] = defaultdict(dict)
    with database.read() as session:
        rows = session.scalars(wanted).all()
        for device, model, release in session.execute(told):
            desired[device][model] = release
    there = {row.name for row in rows}
    claims = [] if names and set(names) <= there else devices.open_claims()
    waiting = [claim for claim in claims if claim.device not in there and (not names or claim.device in names)]
    return [
        *(fleet_row(row, devices.state(row), desired[row.name]) for row in rows),
        *(_claimed(claim.device, claim.device_class, claim.group, claim.labels) for claim in waiting),
    ]


def fleet_row(device: Device, state: str, desired: Mapping[str, str]) -> dict[str, Any]:
    """One device on one line."""
    birth, reported, telemetry = device.birth or {}, device.reported or {}, device.telemetry or {}
    windows = {window["model"]: window for window in telemetry.get("models", [])}
    models = [_model(one, windows.get(one["model"], {})) for one in reported.get("models", [])]
    known = {one["model"].partition("@")[0] for one in models}
    models += [
        {"model": model, "release": "", "wanted": release, "state": "told", "row": "", "detail": ""}
        for model, release in sorted(desired.items())
        if model not in known
    ]
    power = telemetry.get("power") or {}
    return {
        "name": device.name,
        "state": state,
        "group": device.group,
        "labels": device.labels,
        "class": device.device_class,
        "emulated": bool(birth.get("emulated")),
        "simulated": bool(birth.get("simulated")),
        "version": birth.get("version", ""),
        "last_seen": device.last_seen,
        "models": models,
        "p95_s": max((window.get("latency_p95_s", 0.0) for window in windows.values()), default=None),
        "requests": sum(window.get("requests", 0) for window in windows.values()),
        "failed": sum(window.get("failed", 0) for window in windows.values()),
        "fallbacks": sum(window.get("fallbacks", 0) for window in windows.values()),
        "remote_ok": telemetry.get("remote_ok"),
        "celsius": power.get("celsius"),
        "causes": conditions.in_words(reported, telemetry),
    }


def _model(state: Mapping[str, Any], window: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": state["model"],
        "release": state["release"],
        "wanted": state["wanted"],
        "state": state["state"],
        "row": window.get("row", ""),
        "detail": state.get("detail", ""),
    }


def _claimed(name: str, device_class: str, group: str, labels: Mapping[str, str]) -> dict[str, Any]:
    nothing: dict[str, Sequence[Any]] = {"models": [], "causes": []}
    return {
        "name": name, "state": "claimed", "group": group, "labels": dict(labels), "class": device_class,
        "emulated": False, "simulated": False, "version": "", "last_seen": None, "p95_s": None, "requests": 0,
        "failed": 0, "fallbacks": 0, "remote_ok": None, "celsius": None, **nothing,
    }  # fmt: skip
