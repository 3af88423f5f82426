"""Conditions: what is wrong with a device, normalised so that a thousand devices fall into few groups. Pure functions.

A condition has a kind, which decides the remedy, and a text. Failures are grouped by cause: their text without the
parts that differ between devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgesplit.mqtt.messages import (
    CASCADE_CHANGED,
    ENDPOINT_FLOODED,
    GATEWAY_FLOODED,
    LIST_EXPIRED,
    REPEATS_CHANGED,
    PowerState,
    Reported,
    Telemetry,
)
from edgesplit.mqtt.telemetry import MachineState

MAX_TEXT_CHARS = 200
"""Characters of a text."""
CLOCK_OFF_S = 60.0
"""Clock error in seconds from which it is a condition. TLS, statements and fetch hours depend on the clock; a minute
harms none of them."""
LOW_DISK_PART = 0.05
"""Free share of the disk below which it is a condition."""
LOW_DISK_BYTES = 200 * 2**20
LOW_MEMORY_PART = 0.03
"""Free share of the memory below which it is a condition."""
NEAR_EXPIRY_S = 30 * 86_400.0
"""Seconds before the certificate's expiry from which it is a condition: the agent renews at two thirds of the validity,
and has not."""
UNRESPONSIVE_S = 600.0
"""Seconds online without acting on the newest statement after which it is a condition: the statement is withheld, or
the agent hangs."""
OFFLOAD_FLOOD_S = 300.0
"""Seconds without a report of the offload server after which a device no longer floods it."""
SELF_REPORTED = (ENDPOINT_FLOODED, GATEWAY_FLOODED, LIST_EXPIRED, REPEATS_CHANGED, CASCADE_CHANGED)
"""Conditions that a device finds itself. Their beginning is an event."""
FAILED_STATES: frozenset[str] = frozenset({"failed", "rolled back", "safe mode"})
"""States of a release that count as failures."""

REMEDIES: Mapping[str, str] = {
    "under-voltage": "check its power supply and cable",
    "throttled": "improve its cooling or its power supply: its CPU clock is capped",
    "low disk": "free disk space on the device, or lower --store-quota",
    "low memory": "deploy a plan that needs less memory on the device (--memory)",
    "clock wrong": "set its clock (NTP): the validity of certificates and statements is checked against it",
    "stale metadata": "its statement expired before a newer one arrived: check its link and the broker; its"
    " releases keep running",
    "telemetry dropped": "its link was down for longer than its backlog can hold: raise --telemetry-quota if"
    " that data matters",
    "failing release": "`edgectl device show` gives the reason: roll back or deploy another release",
    "safe mode": "no model is loaded: deploy another release to end it",
    "refused": "it rejects its statement: `edgectl device show` gives the reason, `edgectl keys show` the state"
    " of the keys",
    "copied": "two agents use its identity: revoke it, and create a new claim for each",
    "flooding": "it sends the broker more than a correct agent: inspect it, or revoke it",
    "flooding offload server": "an offload server keeps refusing its connections or requests: inspect it, or revoke it",
    ENDPOINT_FLOODED: "a program on the device is refused by the local endpoint again and again: find it by its user",
    GATEWAY_FLOODED: "this gateway keeps refusing the device that is named: inspect that device, or revoke it",
    LIST_EXPIRED: "this gateway has had no revocation list from the controller for a month, and serves devices revoked"
    " since: check its way to the API",
    REPEATS_CHANGED: "a camera's picture has changed, or its frames show less than they did: its threshold was"
    " tightened by itself; allow the stream more with --changed, or leave --skip-still out",
    CASCADE_CHANGED: "its inputs are no longer like the samples by which the threshold was found: it was tightened by"
    " itself, and more requests are escalated; deploy the cascade again with newer samples",
    "certificate expires": "its agent has not renewed it: read its log (`edgectl device logs`), or create a new"
    " claim for it",
    "unresponsive": "it is online and does not apply the newest statement: restart its agent, and read its log",
}
"""What an operator does about a condition, by its kind."""


def from_telemetry(message: Telemetry, clock_off: float | None) -> dict[str, str]:
    """Conditions in live telemetry: text by kind. `clock_off`: the device's clock error in seconds, None if unknown."""
    conditions = {**_power(message.power), **_board(message.machine)}
    if clock_off is not None and abs(clock_off) > CLOCK_OFF_S:
        direction = "ahead" if clock_off > 0 else "behind"
        conditions["clock wrong"] = f"its clock is {_duration_text(abs(clock_off))} {direction}"
    moment = message.measured_at
    if message.statement_expires and moment is not None and moment.unix_s > message.statement_expires:
        conditions["stale metadata"] = "its statement has expired by its own clock"
    conditions.update(
        (reported.kind, reported.text) for reported in message.conditions if reported.kind in SELF_REPORTED
    )
    store = message.backlog
    if store is not None and (dropped := store.dropped_idle + store.dropped_busy + store.dropped_failures):
        conditions["telemetry dropped"] = (
            f"{dropped} messages were dropped: the backlog was full while the link was down"
        )
    return conditions


def from_report(message: Reported) -> dict[str, str]:
    """Conditions in a report: text by kind."""
    conditions: dict[str, str] = {}
    if message.safe_mode:
        conditions["safe mode"] = message.safe_mode[:MAX_TEXT_CHARS]
    elif failed := [release for release in message.models if release.state in FAILED_STATES]:
        release = failed[0]
        conditions["failing release"] = (
            f"{release.model} {release.desired_release[:12]} {release.state}: {release.detail}"[:MAX_TEXT_CHARS]
        )
    if message.statement_problem:
        conditions["refused"] = message.statement_problem[:MAX_TEXT_CHARS]
    return conditions


def normalise_cause(detail: str) -> str:
    """A failure's text without digests, numbers, quoted names and addresses, so that it is equal for all devices."""
    text = re.sub(r"[0-9a-fA-F]{8,64}", "…", detail)
    text = re.sub(r"'[^']{0,200}'|\"[^\"]{0,200}\"", "…", text)
    text = re.sub(r"\d+(?:\.\d+)?", "N", text)
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    text = " ".join(text.split())[:MAX_TEXT_CHARS]
    return text[:1].lower() + text[1:] or "no reason given"


def cause_with_kind(kind: str, detail: str) -> str:
    """Kind and cause of a failure in one text, by which failures are grouped."""
    return f"{kind}: {normalise_cause(detail)}" if detail else kind


def failure_causes(reported: Mapping[str, Any], telemetry: Mapping[str, Any]) -> list[dict[str, str]]:
    """Failures in a device's last report and telemetry: for each the cause by which it is grouped, and its detail."""
    safe_mode = reported.get("safe_mode") or ""
    failures = [("safe mode", safe_mode)] if safe_mode else []
    failures += [("refused", reported["statement_problem"])] if reported.get("statement_problem") else []
    for release in reported.get("models", []):
        if release["state"] in FAILED_STATES:
            failures.append((release["state"], release.get("detail") or safe_mode))
    failures += [("degraded", release["problem"]) for release in telemetry.get("models", []) if release.get("problem")]
    if (telemetry.get("power") or {}).get("under_voltage"):
        failures.append(("under-voltage", ""))
    return [{"cause": cause_with_kind(kind, detail), "detail": detail} for kind, detail in dict.fromkeys(failures)]


def _power(power: PowerState | None) -> dict[str, str]:
    conditions: dict[str, str] = {}
    if power is None:
        return conditions
    if power.under_voltage:
        conditions["under-voltage"] = "its supply voltage is too low now"
    elif power.under_voltage_since_boot:
        conditions["under-voltage"] = "its supply voltage was too low at times since it booted"
    if power.clock_ratio is not None and power.clock_ratio < 0.99:
        heat = f" at {power.celsius:.0f} °C" if power.celsius is not None else ""
        conditions["throttled"] = f"its CPU clock is capped at {power.clock_ratio:.0%}{heat}"
    return conditions


def _board(board: MachineState | None) -> dict[str, str]:
    conditions: dict[str, str] = {}
    if board is None:
        return conditions
    free, whole = board.disk_free_bytes, board.disk_bytes
    if free is not None and whole and (free < LOW_DISK_PART * whole or free < min(LOW_DISK_BYTES, whole / 2)):
        conditions["low disk"] = f"{free / 2**20:.0f} MiB of {whole / 2**20:.0f} are free"
    free, whole = board.memory_free_bytes, board.memory_bytes
    if free is not None and whole and free < LOW_MEMORY_PART * whole:
        conditions["low memory"] = f"{free / 2**20:.0f} MiB of {whole / 2**20:.0f} are free"
    return conditions


def _duration_text(value: float) -> str:
    for unit, seconds in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if value >= 2 * seconds:
            return f"{value / seconds:.0f} {unit}"
    return f"{value:.0f} s"
