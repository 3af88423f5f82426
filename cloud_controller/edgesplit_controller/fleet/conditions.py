"""What is wrong with a device, said so that a thousand devices fall into few groups. All pure.

A condition has a kind, which decides what to do about it, and a text. Failures are grouped by cause, everywhere by the
same rule: their text without what differs from device to device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgesplit.mqtt.messages import PowerSeen, Reported, Telemetry
from edgesplit.mqtt.telemetry import BoardSeen

LONGEST = 200
CLOCK_OFF_S = 60.0
"""TLS, statements and fetch hours go by the clock; a minute harms none of them."""
LOW_DISK_PART = 0.05
LOW_DISK_BYTES = 200 * 2**20
LOW_MEMORY_PART = 0.03
NEAR_EXPIRY_S = 30 * 86_400.0
"""An agent renews its certificate at two thirds of its life, and has not."""
DEAF_S = 600.0
"""So long online without acting upon the newest statement is no accident: somebody withholds it, or the agent hangs."""
FAILED: frozenset[str] = frozenset({"failed", "rolled back", "safe mode"})

DO: Mapping[str, str] = {
    "under-voltage": "check its power supply and cable",
    "throttled": "cool it, or give it a stronger supply: its clock is capped",
    "low disk": "free some of its disk, or lower --store-quota",
    "low memory": "deploy a plan with less on the device (--memory)",
    "clock wrong": "set its clock (NTP): certificates and statements are judged by it",
    "stale metadata": "it has not heard a fresh statement: look at its link and its broker; what it runs goes on",
    "telemetry dropped": "its link was gone for longer than it has room for: raise --telemetry-quota if that matters",
    "failing release": "see why with `edgectl device show`; roll back or deploy another release",
    "safe mode": "no model is loaded: deploy another release to end it",
    "refused": "it does not believe its statement: see its trouble with `edgectl device show`, and `edgectl keys show`",
    "copied": "two agents share its identity: revoke it, and claim both anew",
    "flooding": "it sends more than any agent does: look at it, or revoke it",
    "certificate expires": "its agent has not renewed it: look at its log (`edgectl device logs`), or claim it anew",
    "deaf": "it is here and does not act upon the newest statement: restart its agent, and look at its log",
}
"""By kind: what an operator does about it."""


def of_telemetry(message: Telemetry, clock_off: float | None) -> dict[str, str]:
    """What live telemetry says is wrong: text by kind."""
    found = {**_power(message.power), **_board(message.board)}
    if clock_off is not None and abs(clock_off) > CLOCK_OFF_S:
        found["clock wrong"] = f"its clock is {_seconds(abs(clock_off))} {'ahead' if clock_off > 0 else 'behind'}"
    moment = message.moment
    if message.statement_expires and moment is not None and moment.at > message.statement_expires:
        found["stale metadata"] = "what it was told has expired by its clock"
    store = message.store
    if store is not None and (dropped := store.dropped_idle + store.dropped_busy + store.dropped_trouble):
        found["telemetry dropped"] = f"{dropped} messages found no room while the link was gone"
    return found


def of_report(message: Reported) -> dict[str, str]:
    """What a report says is wrong: text by kind."""
    found: dict[str, str] = {}
    if message.safe_mode:
        found["safe mode"] = message.safe_mode[:LONGEST]
    elif failed := [one for one in message.models if one.state in FAILED]:
        one = failed[0]
        found["failing release"] = f"{one.model} {one.wanted[:12]} {one.state}: {one.detail}"[:LONGEST]
    if message.trouble:
        found["refused"] = message.trouble[:LONGEST]
    return found


def cause(detail: str) -> str:
    """A failure's text without digests, numbers, names in quotes and addresses: the same for every device."""
    text = re.sub(r"[0-9a-fA-F]{8,64}", "…", detail)
    text = re.sub(r"'[^']{0,200}'|\"[^\"]{0,200}\"", "…", text)
    text = re.sub(r"\d+(?:\.\d+)?", "N", text)
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    text = " ".join(text.split())[:LONGEST]
    return text[:1].lower() + text[1:] or "it gives no reason"


def grouped(kind: str, detail: str) -> str:
    """A kind of failure and its cause in one text, which many devices have in common."""
    return f"{kind}: {cause(detail)}" if detail else kind


def in_words(reported: Mapping[str, Any], telemetry: Mapping[str, Any]) -> list[dict[str, str]]:
    """What a device's last report and telemetry say is wrong: each cause as it is grouped by, and its detail."""
    safe_mode = reported.get("safe_mode") or ""
    found = [("safe mode", safe_mode)] if safe_mode else []
    found += [("refused", reported["trouble"])] if reported.get("trouble") else []
    for one in reported.get("models", []):
        if one["state"] in FAILED:
            found.append((one["state"], one.get("detail") or safe_mode))
    found += [("runs badly", one["trouble"]) for one in telemetry.get("models", []) if one.get("trouble")]
    if (telemetry.get("power") or {}).get("under_voltage"):
        found.append(("under-voltage", ""))
    return [{"cause": grouped(kind, detail), "detail": detail} for kind, detail in dict.fromkeys(found)]


def _power(power: PowerSeen | None) -> dict[str, str]:
    found: dict[str, str] = {}
    if power is None:
        return found
    if power.under_voltage:
        found["under-voltage"] = "its supply is too weak now"
    elif power.under_voltage_since_boot:
        found["under-voltage"] = "its supply was too weak since it booted"
    if power.speed is not None and power.speed < 0.99:
        heat = f" at {power.celsius:.0f} °C" if power.celsius is not None else ""
        found["throttled"] = f"its clock is capped at {power.speed:.0%}{heat}"
    return found


def _board(board: BoardSeen | None) -> dict[str, str]:
    found: dict[str, str] = {}
    if board is None:
        return found
    free, whole = board.disk_free_bytes, board.disk_bytes
    if free is not None and whole and (free < LOW_DISK_PART * whole or free < min(LOW_DISK_BYTES, whole / 2)):
        found["low disk"] = f"{free / 2**20:.0f} MiB of {whole / 2**20:.0f} are free"
    free, whole = board.memory_free_bytes, board.memory_bytes
    if free is not None and whole and free < LOW_MEMORY_PART * whole:
        found["low memory"] = f"{free / 2**20:.0f} MiB of {whole / 2**20:.0f} are free"
    return found


def _seconds(value: float) -> str:
    for unit, seconds in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if value >= 2 * seconds:
            return f"{value / seconds:.0f} {unit}"
    return f"{value:.0f} s"
