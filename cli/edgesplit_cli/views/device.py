"""Devices as text: the table of all, and the parts of the page of one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from edgesplit.cascade import format_score
from edgesplit.quantities import format_size
from edgesplit.terminal_text import printable, shorten
from edgesplit_cli.output import ms, percent_text, rate, table

STATE_STYLE = {"online": "green", "stale": "yellow", "offline": "red", "claimed": "dim", "revoked": "red"}
MODELS_IN_TABLE = 16
"""Models of one device in the table of all; the page of the device has the others."""
VERSION_CHARS, MODEL_CHARS, ROW_CHARS = 24, 64, 32
"""Characters of an agent's version, a model with its state, and a row's name in the table of all."""
OFFLINE_NAMED = 10
"""Offline devices that are named in one line."""
MODELS_ON_PAGE = 200
"""Models on the page of one device."""
COLUMNS = ("requests", "p50 ms", "p95 ms", "device ms", "link ms", "remote ms", "fallbacks", "joules")


def device_table(devices: list[dict[str, Any]]) -> Any:
    """A table of devices with one line for each model of a device."""
    rows = [line for entry in devices for line in _device_rows(entry)]
    columns = ("device", "state", "profile", "agent", "model", "cut")
    return table((*columns, ">p50 ms", ">p95 ms", ">uplink", ">round trip ms", "seen"), rows)


def _device_rows(device: dict[str, Any]) -> list[tuple[str | Text, ...]]:
    """The table's lines of one device; telemetry that is out of date is left out."""
    live = device["state"] == "online"
    telemetry = (device.get("telemetry") or {}) if live else {}
    windows = {window["model"]: window for window in telemetry.get("models", [])}
    origin = "simulated" if device.get("simulated") else "emulated" if device.get("emulated") else ""
    kind = device["device_class"] + (f" ({origin})" if origin else "")
    lines: list[tuple[str | Text, ...]] = []
    models = device.get("models") or [{"model": "-", "state": "", "release": ""}]
    for model in models[:MODELS_IN_TABLE]:
        window = windows.get(model["model"], {})
        running = model["model"] + (f" {model['state']}" if model["state"] not in ("running", "") else "")
        lines.append(
            (
                device["name"],
                state_text(device),
                kind,
                shorten(device.get("agent_version") or "-", VERSION_CHARS),
                shorten(running, MODEL_CHARS),
                shorten(window.get("row", "-"), ROW_CHARS),
                ms(window.get("latency_p50_s") or None),
                ms(window.get("latency_p95_s") or None),
                rate(telemetry.get("up_bytes_per_s")),
                ms(telemetry.get("rtt_s")),
                ago_text(device.get("last_seen")),
            )
        )
    if len(models) > MODELS_IN_TABLE:
        more = f"… and {len(models) - MODELS_IN_TABLE:,} more: `edgectl device show {device['name']}`"
        lines.append((device["name"], state_text(device), kind, "", more, *[""] * 6))
    return lines


def reason_lines(device: dict[str, Any]) -> list[Text]:
    """Why each model's last request was answered where it was."""
    telemetry = device.get("telemetry") or device.get("last_telemetry") or {}
    windows = [window for window in telemetry.get("models", []) if window.get("reason")]
    return [Text.assemble((window["model"], "bold"), f" {window['reason']}") for window in windows]


def window_rows(device: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row of `COLUMNS` for each model in the latest telemetry of a device."""
    return [
        (
            window["model"],
            window["row"],
            str(window["requests"]),
            ms(window["latency_p50_s"]),
            ms(window["latency_p95_s"]),
            ms(window["device_s"]),
            ms(window["link_s"]),
            ms(window["remote_s"]),
            str(window["fallbacks"]),
            joules_text(window),
        )
        for window in (device.get("telemetry") or device.get("last_telemetry") or {}).get("models", [])
    ]


def joules_text(window: dict[str, Any]) -> str:
    """Energy per answer, marked where it is predicted and not measured."""
    basis = window.get("joules_basis")
    return f"{window['joules']:.3g}{' (predicted)' if basis == 'predicted' else ''}" if basis else "-"


def log_lines(content: dict[str, Any]) -> list[str]:
    """A device's log as text, oldest line first; lines in another format are shown unchanged."""
    lines = [f"versions: {printable(content.get('versions'))}"]
    for line in content.get("log") or []:
        try:
            entry = printable(json.loads(line))
            lines.append(f"{entry['at']} {entry['level'].upper()} {entry['logger']}: {entry['message']}")
        except (ValueError, KeyError, TypeError, AttributeError):
            lines.append(str(printable(str(line))))
    return lines


def offline_lines(devices: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line that names devices which are offline, and when each was last seen; no line for no device."""
    if not devices:
        return []
    named = [
        f"{device['device']} ({f'last seen {ago_text(seen)}' if (seen := device['last_seen']) else 'never seen'})"
        for device in devices[:OFFLINE_NAMED]
    ]
    more = f" and {len(devices) - OFFLINE_NAMED} more" if len(devices) > OFFLINE_NAMED else ""
    return [f"  offline, until {'they return' if len(devices) > 1 else 'it returns'}: {', '.join(named)}{more}"]


def condition_line(condition: dict[str, Any]) -> Text:
    """What is wrong, since when, and what to do about it."""
    is_current = condition.get("current", True)
    when = (
        f"since {ago_text(condition['since'])}"
        if is_current
        else f"at its last message (since {ago_text(condition['since'])})"
    )
    details = f": {condition['text']}, {when}. {condition['remedy'][:1].upper()}{condition['remedy'][1:]}."
    return Text.assemble((condition["kind"], "red" if is_current else "yellow"), details)


def model_lines(device: dict[str, Any]) -> list[Text]:
    """Desired and reported state of each model, and the reason for a difference."""
    reported = (device.get("facts") or {}).get("reported") or {}
    models = {model["model"]: model for model in device.get("models") or []}
    differences = {difference["model"]: difference for difference in device.get("differences") or []}
    lines = []
    names = sorted({*models, *differences})
    for name in names[:MODELS_ON_PAGE]:
        model, difference = models.get(name, {}), differences.get(name, {})
        runs = difference.get("running") or model.get("release") or ""
        state = model.get("state", "unknown")
        parts: list[str | tuple[str, str]] = [
            f"  {name}: ",
            (state, "green" if state == "running" else "yellow"),
            f" {runs[:16] or 'nothing'}",
        ]
        if model and not model.get("current", True):
            parts.append(f" (reported {ago_text(reported.get('at'))}: {model.get('last_state')})")
        if difference.get("kind") not in (None, "as desired"):
            reason = f" ({difference['detail']})" if difference.get("detail") else ""
            wanted = f"; desired {difference['desired'][:16]}" if difference["desired"] not in ("", runs) else ""
            parts.append(f"{wanted}: {difference['kind']}{reason}")
        lines.append(Text.assemble(*parts))
    if len(names) > MODELS_ON_PAGE:
        lines.append(Text(f"  … and {len(names) - MODELS_ON_PAGE:,} more; --json prints all of them"))
    return lines


def health_line(health: dict[str, Any]) -> Text:
    """The health figures of a release since its activation, which rollout gates evaluate."""
    parts = [f"{health['requests']} requests", f"{health['failed']} failed", f"{health['fallbacks']} fallbacks"]
    if (p95 := health.get("latency_p95_s")) is not None:
        parts.append(f"p95 {ms(p95)} ms")
    if (memory := health.get("memory_bytes")) is not None:
        parts.append(f"{format_size(memory)} of memory")
    if (drift := health.get("drift")) is not None:
        top = {True: ", the same top-1", False: ", another top-1", None: ""}[health.get("top1_agrees")]
        parts.append(f"drift {percent_text(drift)}{top}")
    if health.get("golden_ok"):
        parts.append("golden inputs answered")
    text = f"  {health['model']} {health['release'][:12]} for {_duration_text(health['active_s'])}: {', '.join(parts)}"
    return Text(text, "" if health.get("current", True) else "yellow")


def audit_lines(audits: dict[str, Any]) -> Iterator[str]:
    """Who answered, and what audits found of the answers that this may have changed, beside what is allowed."""
    if (cascade := audits["cascade"]) is not None:
        total = max(1, cascade["sure"] + cascade["escalated"] + cascade["unsure"])
        answered = ", ".join(f"{name} {count}" for name, count in cascade["answered"].items())
        threshold = (
            "every request" if cascade["threshold"] is None else f"scores below {format_score(cascade['threshold'])}"
        )
        share = cascade["escalated"] / total
        yield f"  {audits['model']} answered by {answered or 'none'}; {cascade['unsure']} answers unsure"
        yield f"  {audits['model']} escalates {threshold}: {share:.1%} so far"
        yield f"  {audits['model']} cascade: {_promise_text(cascade)}"
    if (still := audits["still"]) is not None:
        yield f"  {audits['model']} still frames: {still['repeated']} repeated; {_promise_text(still)}"


def _promise_text(counts: dict[str, Any]) -> str:
    """What is allowed beside what was measured."""
    measured = "none audited yet"
    if counts["share"] is not None:
        measured = (
            f"{counts['changed']} of {counts['audited']} audited differed ({counts['at_least']:.1%} to"
            f" {counts['at_most']:.1%}, 90 % sure)"
        )
    alarms = f", {counts['alarms']} alarms" if counts["alarms"] else ""
    return f"allowed {counts['allowed']:.1%}, {measured}{alarms}, {counts['unaudited']} unaudited"


def sequence_line(counts: dict[str, Any]) -> str:
    """Counts of lost, repeated and reordered telemetry."""
    labels = (("missing", "lost"), ("again", "twice"), ("earlier", "out of order"), ("older", "of older sessions"))
    odd = [f"{counts[name]} {text}" for name, text in labels if counts.get(name)]
    late = f", {counts['from_backlog']} from the backlog" if counts.get("from_backlog") else ""
    return (
        f"telemetry {max(0, counts['sequence'])} of session {counts['session']}; {', '.join(odd) or 'none lost'}{late}"
    )


def power_line(power: dict[str, Any]) -> str:
    """Battery, power and temperature on one line; unknown values are left out."""
    reason = f" ({power['mode_reason']})" if power.get("mode_reason") else ""
    parts = [f"power: {power.get('mode', 'performance')}{reason}"]
    if (percent := power.get("battery_percent")) is not None:
        parts.append(f"battery {percent:.0f} %{' and falling' if power.get('discharging') else ''}")
    if (watts := power.get("watts")) is not None:
        budget = power.get("budget_watts")
        parts.append(f"{watts:.2f} W by its {power.get('watts_source', '')}{f' of {budget:g} W' if budget else ''}")
    elif power.get("budget_watts"):
        parts.append(f"budget {power['budget_watts']:g} W, by the plan's figures")
    if (celsius := power.get("celsius")) is not None:
        parts.append(f"{celsius:.0f} °C")
    if (speed := power.get("clock_ratio")) is not None and speed < 1:
        parts.append(f"clock capped at {speed:.0%}")
    if power.get("under_voltage"):
        parts.append("UNDER-VOLTAGE: check its supply and cable")
    if power.get("updates_deferred_reason"):
        parts.append(f"updates wait: {power['updates_deferred_reason']}")
    return ", ".join(parts)


def state_text(device: dict[str, Any]) -> Text:
    """The state of a device, with marks for a copied card, safe mode and a limited message rate."""
    style = STATE_STYLE.get(device["state"], "white")
    copied = (" copied", "red") if device.get("copied") else ""
    safe = (" safe mode", "red") if device.get("safe_mode") else ""
    limited_text = (" quarantined", "red") if _is_held(device.get("flooded")) else ""
    return Text.assemble((device["state"], style), copied, safe, limited_text)


def _is_held(flooded: dict[str, Any] | None) -> bool:
    return bool(flooded) and float((flooded or {}).get("held_until", 0.0)) > time.time()


def flood_text(name: str, flooded: dict[str, Any]) -> str:
    """The text for a device that exceeded the message rate of a correct agent."""
    left_s = flooded["held_until"] - time.time()
    status = f"quarantined for {left_s:.0f} s more" if left_s > 0 else "accepted again"
    times = "once" if flooded["times"] == 1 else f"{flooded['times']} times"
    return (
        f"it flooded the broker ({times}, last {ago_text(flooded['at'])}): {status}. "
        f"If no faulty agent explains this: `edgectl device revoke {name}`"
    )


def ago_text(seen_at: float | None) -> str:
    """How long ago, by this machine's clock."""
    return ago(seen_at, time.time())


def ago(seen_at: float | None, now: float) -> str:
    """How long ago, as text."""
    if not seen_at:
        return "never"
    return f"{_duration_text(max(0.0, now - seen_at))} ago"


def _duration_text(seconds: float) -> str:
    for unit, long_s in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * long_s:
            return f"{seconds / long_s:.0f} {unit}"
    return f"{seconds:.0f} s"
