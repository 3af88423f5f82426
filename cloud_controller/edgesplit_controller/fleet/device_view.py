"""A device as the API shows it: who it is, what it was told, what it said, how old that is, and what is wrong.

What a device said in a session that is over, or long ago, is never shown as what is: `telemetry` is then null and a
model's state `unknown`; what it said last stands under `last_telemetry` and `last_state`, with its age in `facts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from edgesplit.errors import MalformedMessage
from edgesplit.mqtt import messages
from edgesplit.mqtt.telemetry import ReleaseHealth
from edgesplit.release.manifest import Signed, Statement
from edgesplit_controller.fleet import conditions as causes
from edgesplit_controller.fleet import device_state
from edgesplit_controller.fleet.device_state import Fact, State, Told
from edgesplit_controller.fleet.listing import Page
from edgesplit_controller.fleet.rows import shown_flood
from edgesplit_controller.storage.database import Device
from edgesplit_controller.storage.tables.device_state import HeardRow

Shown = dict[str, Any]


def shown_device(device: Device, state: State, page: Page, now: float) -> Shown:
    """One device of a page."""
    birth, reported = device.birth or {}, device.reported or {}
    heard, flood = page.heard.get(device.name), page.floods.get(device.name)
    facts = _facts(device, state, heard)
    desired = page.desired.get(device.name, [])
    wanted = {row.model: row.release for row in desired}
    said = list(reported.get("models", []))
    tells = facts["telemetry"]
    return {
        "name": device.name,
        "state": state,
        "device_class": device.device_class,
        "group": device.group,
        "labels": device.labels,
        "link": device.link,
        "copied": page.copied.get(device.name),
        "flooded": shown_flood(flood) if flood is not None else None,
        "enrolled": device.enrolled,
        "last_seen": device.last_seen,
        "session": device.session,
        "emulated": bool(birth.get("emulated")),
        "simulated": bool(birth.get("simulated")),
        "agent_version": birth.get("version"),
        "local_url": birth.get("local_url"),
        "counter": device.counter,
        "restored": device.restored,
        "acted_upon": reported.get("counter"),
        "desired": [{"model": row.model, "release": row.release, "deployment": row.deployment} for row in desired],
        "models": [_model(one, facts["reported"]) for one in said],
        "differences": [asdict(one) for one in device_state.differences(wanted, said, _told(device, state, reported))],
        "health": [
            {**_health(row.health), "age_s": max(0.0, now - (row.health_at or now)), "current": state == "online"}
            for row in page.running.get(device.name, [])
            if row.health is not None
        ],
        "kept": list(reported.get("kept", [])),
        "safe_mode": reported.get("safe_mode", ""),
        "trouble": reported.get("trouble", ""),
        "telemetry": device.telemetry if tells is not None and tells.current else None,
        "last_telemetry": device.telemetry,
        "facts": {name: _fact(one, now) for name, one in facts.items()},
        "heard": _heard(heard),
        "conditions": conditions(device, state, page, now),
    }


def conditions(device: Device, state: State, page: Page, now: float) -> list[Shown]:
    """What is wrong with it, the oldest first; what it said itself is current only while it is online."""
    online = state == "online"
    found = [
        _condition(row.kind, row.since, row.text, current=online) for row in page.conditions.get(device.name, [])
    ]  # fmt: skip
    heard, flood = page.heard.get(device.name), page.floods.get(device.name)
    if (copied := page.copied.get(device.name)) is not None:
        found.append(_condition("copied", copied, "two agents took turns under its name"))
    if flood is not None and flood.held_until > now:
        found.append(_condition("flooding", flood.at, f"held off, {flood.times} times in a row"))
    expires = page.certificates.get(device.name)
    if expires is not None and expires < now + causes.NEAR_EXPIRY_S and device.revoked is None:
        left = f"in {(expires - now) / 86_400:.0f} days" if expires > now else "it has"
        found.append(_condition("certificate expires", expires - causes.NEAR_EXPIRY_S, left))
    if online and heard is not None and heard.deaf_since is not None and heard.deaf_since < now - causes.DEAF_S:
        found.append(_condition("deaf", heard.deaf_since, "it is here and does not act upon its newest statement"))
    return sorted(found, key=lambda one: float(one["since"]))


def _condition(kind: str, since: float, text: str, *, current: bool = True) -> Shown:
    return {"kind": kind, "since": since, "text": text, "do": causes.DO.get(kind, ""), "current": current}


def _facts(device: Device, state: State, heard: HeardRow | None) -> dict[str, Fact | None]:
    telemetry = device.telemetry or {}
    at = (heard.born_at, heard.reported_at) if heard is not None else (None, None)
    return {
        "birth": device_state.fact(device.birth, at[0], state=state, session=device.session),
        "reported": device_state.fact(device.reported, at[1], state=state, session=device.session),
        "telemetry": device_state.fact(telemetry, telemetry.get("at"), state=state, session=device.session),
    }


def _fact(one: Fact | None, now: float) -> Shown | None:
    if one is None:
        return None
    age_s = max(0.0, now - one.at) if one.at is not None else None
    return {"at": one.at, "age_s": age_s, "session": one.session, "current": one.current}


def _model(one: Mapping[str, Any], reported: Fact | None) -> Shown:
    """What it says of a model; of one that cannot be asked nobody knows."""
    current = reported is not None and reported.current
    return {**one, "current": current, "state": one["state"] if current else "unknown", "last_state": one["state"]}


def _health(kept: Mapping[str, Any]) -> Shown:
    """With what was left out because it is nothing."""
    return msgspec.structs.asdict(msgspec.convert(kept, ReleaseHealth))


def _told(device: Device, state: State, reported: Mapping[str, Any]) -> Told:
    return Told(
        state=state,
        session=device.session,
        counter=device.counter,
        told=_named(device.statement),
        reported_session=int(reported.get("session", 0)),
        acted_upon=int(reported.get("counter", 0)),
        trouble=str(reported.get("trouble", "")),
    )


def _named(statement: bytes | None) -> frozenset[tuple[str, str]]:
    """Models and releases of the statement that is retained for it."""
    if not statement:
        return frozenset()
    try:
        stated = messages.decode(messages.decode(statement, Signed).payload, Statement)
    except MalformedMessage:
        return frozenset()
    return frozenset((one.model, one.release) for one in stated.releases)


def _heard(row: HeardRow | None) -> Shown | None:
    """The order of its newest session's messages."""
    if row is None:
        return None
    counts = ("session", "sequence", "missing", "again", "earlier", "older", "late", "refused")
    times = ("born_at", "died_at", "reported_at", "telemetry_at", "clock_off_s")
    return {name: getattr(row, name) for name in (*counts, *times)}
