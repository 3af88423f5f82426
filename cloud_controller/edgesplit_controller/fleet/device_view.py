"""A device as the API returns it: identity, desired state, reported state with its age, and conditions.

What a device reported in a session that has ended, or long ago, is never returned as current: `telemetry` is then null
and a model's state `unknown`; the last known values are in `last_telemetry` and `last_state`, with their age in
`facts`.
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
from edgesplit_controller.fleet.audits import audits_view, sums_of
from edgesplit_controller.fleet.device_state import DesiredVsReported, Fact, State
from edgesplit_controller.fleet.listing import DevicePage
from edgesplit_controller.fleet.rows import flood_to_dict
from edgesplit_controller.storage.tables.core import Device
from edgesplit_controller.storage.tables.device_state import DeviceSessionRow

JsonObject = dict[str, Any]


def device_to_dict(device: Device, state: State, page: DevicePage, now: float) -> JsonObject:
    """One device of a page."""
    birth, reported = device.birth or {}, device.reported or {}
    session_row, flood = page.sessions.get(device.name), page.floods.get(device.name)
    facts = _facts(device, state, session_row)
    desired = page.desired.get(device.name, [])
    wanted = {row.model: row.release for row in desired}
    reported_models = list(reported.get("models", []))
    telemetry_fact = facts["telemetry"]
    return {
        "name": device.name,
        "state": state,
        "device_class": device.device_class,
        "group": device.group,
        "labels": device.labels,
        "link": device.link,
        "copied": page.copied.get(device.name),
        "flooded": flood_to_dict(flood) if flood is not None else None,
        "enrolled": device.enrolled,
        "last_seen": device.last_seen,
        "session": device.session,
        "emulated": bool(birth.get("emulated")),
        "simulated": bool(birth.get("simulated")),
        "agent_version": birth.get("agent_version"),
        "local_url": birth.get("local_url"),
        "counter": device.counter,
        "restored": device.restored,
        "acted_upon": reported.get("statement_counter"),
        "desired": [{"model": row.model, "release": row.release, "deployment": row.deployment} for row in desired],
        "models": [_model(entry, facts["reported"]) for entry in reported_models],
        "differences": [
            asdict(entry)
            for entry in device_state.find_differences(
                wanted, reported_models, _desired_vs_reported(device, state, reported)
            )
        ],
        "health": [
            {**_health(row.health), "age_s": max(0.0, now - (row.health_at or now)), "current": state == "online"}
            for row in page.running.get(device.name, [])
            if row.health is not None
        ],
        "audits": [
            {"model": row.model, "release": row.release, **audits_view(sums)}
            for row in page.running.get(device.name, [])
            if (sums := sums_of(row.audits, row.release)) is not None
        ],
        "gateway_models": list(reported.get("gateway_models", [])),
        "safe_mode": reported.get("safe_mode", ""),
        "statement_problem": reported.get("statement_problem", ""),
        "telemetry": device.telemetry if telemetry_fact is not None and telemetry_fact.current else None,
        "last_telemetry": device.telemetry,
        "facts": {name: _fact(entry, now) for name, entry in facts.items()},
        "message_sequence": _sequence_to_dict(session_row),
        "conditions": conditions(device, state, page, now),
    }


def conditions(device: Device, state: State, page: DevicePage, now: float) -> list[JsonObject]:
    """Conditions of the device, oldest first. Those that it reported itself are current only while it is online."""
    online = state == "online"
    result = [
        _condition(row.kind, row.since, row.text, current=online) for row in page.conditions.get(device.name, [])
    ]  # fmt: skip
    session_row, flood = page.sessions.get(device.name), page.floods.get(device.name)
    if (copied := page.copied.get(device.name)) is not None:
        result.append(_condition("copied", copied, "two agents connect alternately under its name"))
    if flood is not None and flood.held_until > now:
        result.append(_condition("flooding", flood.at, f"quarantined, {flood.times} times in a row"))
    offload_flood = page.offload_floods.get(device.name)
    if offload_flood is not None and offload_flood.at > now - causes.OFFLOAD_FLOOD_S:
        text = f"an offload server refused it {offload_flood.refused} times in two minutes: {offload_flood.reasons}"
        result.append(_condition("flooding offload server", offload_flood.since, text))
    expires = page.certificates.get(device.name)
    if expires is not None and expires < now + causes.NEAR_EXPIRY_S and device.revoked is None:
        remaining = f"it expires in {(expires - now) / 86_400:.0f} days" if expires > now else "it has expired"
        result.append(_condition("certificate expires", expires - causes.NEAR_EXPIRY_S, remaining))
    since = session_row.unresponsive_since if session_row is not None and online else None
    if since is not None and since < now - causes.UNRESPONSIVE_S:
        result.append(_condition("unresponsive", since, "it is online and does not apply its newest statement"))
    return sorted(result, key=lambda condition: float(condition["since"]))


def _condition(kind: str, since: float, text: str, *, current: bool = True) -> JsonObject:
    return {"kind": kind, "since": since, "text": text, "remedy": causes.REMEDIES.get(kind, ""), "current": current}


def _facts(device: Device, state: State, session_row: DeviceSessionRow | None) -> dict[str, Fact | None]:
    telemetry = device.telemetry or {}
    at = (session_row.born_at, session_row.reported_at) if session_row is not None else (None, None)
    return {
        "birth": device_state.fact(device.birth, at[0], state=state, session=device.session),
        "reported": device_state.fact(device.reported, at[1], state=state, session=device.session),
        "telemetry": device_state.fact(telemetry, telemetry.get("at"), state=state, session=device.session),
    }


def _fact(fact: Fact | None, now: float) -> JsonObject | None:
    if fact is None:
        return None
    age_s = max(0.0, now - fact.at) if fact.at is not None else None
    return {"at": fact.at, "age_s": age_s, "session": fact.session, "current": fact.current}


def _model(model: Mapping[str, Any], reported: Fact | None) -> JsonObject:
    """A model as the device reported it; its state is `unknown` if the report is not current."""
    current = reported is not None and reported.current
    return {
        **model, "current": current, "state": model["state"] if current else "unknown", "last_state": model["state"],
    }  # fmt: skip


def _health(stored: Mapping[str, Any]) -> JsonObject:
    """A release's health, with the default values of fields that were omitted."""
    return msgspec.structs.asdict(msgspec.convert(stored, ReleaseHealth))


def _desired_vs_reported(device: Device, state: State, reported: Mapping[str, Any]) -> DesiredVsReported:
    return DesiredVsReported(
        state=state, session=device.session, counter=device.counter,
        statement_releases=_releases_in_statement(device.statement), reported_session=int(reported.get("session", 0)),
        acted_upon=int(reported.get("statement_counter", 0)),
        statement_problem=str(reported.get("statement_problem", "")),
    )  # fmt: skip


def _releases_in_statement(statement: bytes | None) -> frozenset[tuple[str, str]]:
    """Models and releases in the statement that is retained for the device."""
    if not statement:
        return frozenset()
    try:
        parsed = messages.decode(messages.decode(statement, Signed).payload, Statement)
    except MalformedMessage:
        return frozenset()
    return frozenset((release.model, release.release) for release in parsed.releases)


def _sequence_to_dict(row: DeviceSessionRow | None) -> JsonObject | None:
    """Sequence numbers and counters of the device's newest session."""
    if row is None:
        return None
    counts = ("session", "sequence", "missing", "again", "earlier", "older", "from_backlog", "refused")
    times = ("born_at", "died_at", "reported_at", "telemetry_at", "clock_off_s")
    return {name: getattr(row, name) for name in (*counts, *times)}
