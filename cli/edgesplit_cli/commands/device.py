"""`edgectl device`: claims, lists, shows, labels and revokes devices."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
from rich.text import Text

from edgesplit.controller_client.claims import ClaimRequest, create_claim
from edgesplit.errors import LinkError, UsageError
from edgesplit.terminal_text import printable, size
from edgesplit_cli.output import check_writable, console, json_option, ms, percent_text, print_json, rate, table
from edgesplit_cli.settings import connect
from edgesplit_cli.views.timeline import mean_bars

STATE_STYLE = {"online": "green", "stale": "yellow", "offline": "red", "claimed": "dim", "revoked": "red"}


@click.group()
def device() -> None:
    """Enrol devices, see what they do, revoke them."""


@device.command()
@click.argument("name")
@click.option("--profile", required=True, help="Its device profile (see `edgectl profiles`).")
@click.option(
    "--link",
    default="wifi",
    show_default=True,
    help="The link that plans assume: wifi, lte, 3g, or UP/RTT as in 8mbit/40ms.",
)
@click.option("--group", default=None, help="Group, for `--to group=NAME`.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="A label; may be given several times.")
@click.option(
    "--expires",
    "expires_s",
    type=click.IntRange(60),
    default=3600,
    show_default=True,
    help="Seconds until the token is void.",
)
@click.option(
    "--replace",
    is_flag=True,
    help="NAME is an existing device: its name goes to other hardware; the old one is cut off then.",
)
@click.option(
    "--gateway",
    default="",
    metavar="HOST:PORT",
    help="It is a gateway: devices reach it there, and it finishes inferences for them. --link is then its own to the"
    " cloud.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write the claim to this file (0600)."
)
@click.pass_obj
def claim(
    data: Path,
    name: str,
    profile: str,
    link: str,
    group: str | None,
    labels: tuple[str, ...],
    expires_s: int,
    replace: bool,
    gateway: str,
    out: Path | None,
) -> None:
    """Make a one-time claim with which the device NAME enrols."""
    if out is not None:
        check_writable(out)  # request a claim only if it can be saved
    request = ClaimRequest(
        device=name, device_class=profile, link=link, group=group, labels=dict(_parse_label(label) for label in labels),
        expires_s=expires_s, replace=replace, gateway=gateway,
    )  # fmt: skip
    claim_text = create_claim(connect(data), request)
    if out is None:
        click.echo(claim_text)
        return
    out.touch(mode=0o600)
    out.chmod(0o600)
    out.write_text(claim_text)
    serving = f" --gateway :{gateway.rpartition(':')[2]}" if gateway else ""
    click.echo(
        f"claim for {name} in {out}: on the device, run `edgesplit-agent run --data FOLDER --claim {out}{serving}`"
    )


def _parse_label(text: str) -> tuple[str, str]:
    """Parse KEY=VALUE; UsageError for a label without a value, which no `--to KEY=VALUE` could match."""
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise UsageError(f"--label {text[:60]}: write it as KEY=VALUE, as in --label room=kitchen")
    return key, value


@device.command("list")
@json_option
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--group", default=None, help="Only devices of this group.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="Only devices with this label; repeatable.")
@click.option("--state", type=click.Choice(tuple(STATE_STYLE)), default=None, help="Only devices in this state.")
@click.option(
    "--condition", default=None, metavar="KIND", help="Only devices with this condition (see `edgectl fleet`)."
)
@click.pass_obj
def list_devices(
    data: Path,
    as_json: bool,
    watch: bool,
    group: str | None,
    labels: tuple[str, ...],
    state: str | None,
    condition: str | None,
) -> None:
    """List devices: state, running models, cut in use, latency."""
    api = connect(data)
    filters = {"group": group, "label": list(labels) or None, "state": state, "condition": condition}
    while True:
        devices = api.get_all("/v1/devices", **filters)
        if as_json:
            print_json(devices)
        else:
            if watch:
                click.clear()
            console().print(device_table(printable(devices)))
        if not watch:
            return
        time.sleep(1.0)


COLUMNS = ("requests", "p50 ms", "p95 ms", "device ms", "link ms", "remote ms", "fallbacks", "joules")


@device.command()
@click.argument("name")
@json_option
@click.pass_obj
def show(data: Path, name: str, as_json: bool) -> None:
    """One device: identity, desired and reported state, its latest telemetry."""
    record = connect(data).get(f"/v1/devices/{name}")
    if as_json:
        print_json(record)
        return
    record = printable(record)
    out = console()
    belongs = f"link {record.get('link') or '-'}  group {record.get('group') or '-'}"
    out.print(
        Text.assemble((record["name"], "bold"), "  ", _state_text(record), f"  {record['device_class']}  {belongs}")
    )
    for label, value in (record.get("labels") or {}).items():
        out.print(f"  {label}={value}")
    for condition in record.get("conditions") or []:
        out.print(condition_line(condition))
    if flooded := record.get("flooded"):
        out.print(Text(_flood_text(record["name"], flooded), "red"))
    last_seen = f"last seen {_ago_text(record.get('last_seen'))}; session {record.get('session') or '-'}"
    out.print(f"{last_seen}; agent {record.get('agent_version') or '-'} at {record.get('local_url') or '-'}")
    if safe_mode := record.get("safe_mode"):
        hint = f": {safe_mode}. Deploy another release to end it."
        out.print(Text.assemble(("safe mode, no model is loaded", "red"), hint))
    if trouble := record.get("statement_problem"):
        out.print(Text(trouble, "red"))
    if through := record.get("gateway"):
        out.print(f"offloads through the gateway {through}")
    if serves := record.get("serves_at"):
        out.print(f"a gateway: devices reach it at {serves}")
    for held in record.get("gateway_models") or []:
        here = "here" if held["release"] else held["state"]
        out.print(
            f"  keeps {held['model']} {held['desired_release'][:16]} for devices behind it: {here} {held['detail']}"
        )
    if heard := record.get("heard"):
        out.print(sequence_line(heard))
    if power := (record.get("telemetry") or {}).get("power"):
        out.print(Text(power_line(power), "red" if power.get("under_voltage") else ""))
    for line in model_lines(record):
        out.print(line)
    for health in record.get("health") or []:
        out.print(health_line(health))
    if (old := record.get("last_telemetry")) and not record.get("telemetry"):
        out.print(
            Text(f"it measured nothing since {_ago_text(old.get('at'))}: what follows is not how it is now", "yellow")
        )
    out.print(
        table(
            ("model", "cut", *(">" + name for name in COLUMNS)),
            _window_rows(record),
        )
    )
    for window in (record.get("telemetry") or {}).get("models", []):
        if window.get("phases") and window["requests"]:
            made_up = "simulated" if record.get("simulated") else "emulated"
            emulated = f", {made_up}" if record["telemetry"].get("emulated") else ""
            requests = window["requests"]
            out.print(f"{window['model']}: where the time of the latest {requests} requests went (mean{emulated})")
            for line in mean_bars(window["phases"], requests):
                out.print(line)


@device.command("logs")
@click.argument("name")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write the log bundle to this file."
)
@click.option(
    "--wait",
    "wait_s",
    type=click.IntRange(1, 3_600),
    default=60,
    show_default=True,
    help="Seconds to wait for the device.",
)
@json_option
@click.pass_obj
def logs(data: Path, name: str, out: Path | None, wait_s: int, as_json: bool) -> None:
    """Request the recent log, versions and state of NAME, without secrets, and show them."""
    if out is not None:
        check_writable(out)
    api = connect(data)
    requested = api.post(f"/v1/devices/{name}/logs")
    until = time.monotonic() + wait_s
    while (log := api.get(f"/v1/devices/{name}/logs/{requested['id']}"))["state"] in ("requested", "receiving"):
        if time.monotonic() >= until:
            raise LinkError(f"{name} has not answered within {wait_s} s; `edgectl device show {name}` says how it is")
        time.sleep(0.5)
    if log["state"] != "complete":
        raise LinkError(f"{name} sent no logs: {log['reason']}")
    if out is not None:
        out.write_text(json.dumps(log["content"], indent=1))
        click.echo(f"{len(log['content'].get('log') or [])} lines of {name} and its state in {out}")
    elif as_json:
        print_json(log["content"])
    else:
        for line in log_lines(log["content"]):
            console().print(line)


@device.command()
@click.argument("name")
@click.argument("labels", nargs=-1, metavar="[K=V|K-]...")
@click.option("--group", default=None, help="Put it into this group.")
@click.pass_obj
def label(data: Path, name: str, labels: tuple[str, ...], group: str | None) -> None:
    """Give NAME labels (K=V), remove labels (K-), or put it into another group. What it runs stays unchanged."""
    if not labels and group is None:
        raise UsageError(f"say what to change, as in `edgectl device label {name} room=kitchen` or --group NAME")
    removed = {text[:-1]: None for text in labels if text.endswith("-") and "=" not in text}
    added = dict(_parse_label(text) for text in labels if "=" in text or not text.endswith("-"))
    updated = connect(data).patch(
        f"/v1/devices/{quote(name, safe='')}", {"group": group, "labels": {**added, **removed}}
    )
    labels_text = "  ".join(f"{key}={value}" for key, value in updated["labels"].items())
    click.echo(f"{name}: group {updated['group'] or '-'}  {labels_text}".rstrip())


@device.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def revoke(data: Path, name: str, yes: bool) -> None:
    """Revoke a device's right to connect."""
    if not yes:
        click.confirm(f"Revoke {name}? It will need a new claim.", abort=True)
    connect(data).delete(f"/v1/devices/{name}")
    click.echo(f"{name} is revoked: its session ends now, and its certificate opens no other")


@device.command()
@click.argument("targets", nargs=-1, required=True, metavar="DEVICE|group=NAME|all...")
@click.argument("gateway", metavar="GATEWAY|none")
@click.option("--link", default="", help="Their link from now on: to the gateway, or with none to the cloud.")
@click.pass_obj
def gateway(data: Path, targets: tuple[str, ...], gateway: str, link: str) -> None:
    """Let devices offload through GATEWAY, or with `none` to the cloud again. Deploy again to plan for it."""
    body = {"devices": list(targets), "gateway": gateway, "link": link}
    answer = connect(data).post("/v1/devices/gateway", body)
    route = f"through {answer['gateway']}" if answer["gateway"] else "to the cloud"
    click.echo(f"{', '.join(answer['devices'])}: offloads {route} from now on; `edgectl deploy` plans for it")


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
    for model in device.get("models") or [{"model": "-", "state": "", "release": ""}]:
        window = windows.get(model["model"], {})
        running = model["model"] + (f" {model['state']}" if model["state"] not in ("running", "") else "")
        lines.append(
            (
                device["name"],
                _state_text(device),
                kind,
                device.get("agent_version") or "-",
                running,
                window.get("row", "-"),
                ms(window.get("latency_p50_s") or None),
                ms(window.get("latency_p95_s") or None),
                rate(telemetry.get("up_bytes_per_s")),
                ms(telemetry.get("rtt_s")),
                _ago_text(device.get("last_seen")),
            )
        )
    return lines


def _window_rows(device: dict[str, Any]) -> list[tuple[str, ...]]:
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


def condition_line(condition: dict[str, Any]) -> Text:
    """What is wrong, since when, and what to do about it."""
    is_current = condition.get("current", True)
    when = (
        f"since {_ago_text(condition['since'])}"
        if is_current
        else f"when it was last heard (since {_ago_text(condition['since'])})"
    )
    details = f": {condition['text']}, {when}. {condition['remedy'][:1].upper()}{condition['remedy'][1:]}."
    return Text.assemble((condition["kind"], "red" if is_current else "yellow"), details)


def model_lines(device: dict[str, Any]) -> list[Text]:
    """Desired and reported state of each model, and the reason for a difference."""
    reported = (device.get("facts") or {}).get("reported") or {}
    models = {model["model"]: model for model in device.get("models") or []}
    differences = {difference["model"]: difference for difference in device.get("differences") or []}
    lines = []
    for name in sorted({*models, *differences}):
        model, difference = models.get(name, {}), differences.get(name, {})
        runs = difference.get("runs") or model.get("release") or ""
        state = model.get("state", "unknown")
        parts: list[str | tuple[str, str]] = [
            f"  {name}: ",
            (state, "green" if state == "running" else "yellow"),
            f" {runs[:16] or 'nothing'}",
        ]
        if model and not model.get("current", True):
            parts.append(f" (said {_ago_text(reported.get('at'))}: {model.get('last_state')})")
        if difference.get("kind") not in (None, "as desired"):
            reason = f" ({difference['detail']})" if difference.get("detail") else ""
            wanted = f"; shall run {difference['desired'][:16]}" if difference["desired"] not in ("", runs) else ""
            parts.append(f"{wanted}: {difference['kind']}{reason}")
        lines.append(Text.assemble(*parts))
    return lines


def health_line(health: dict[str, Any]) -> Text:
    """The health figures of a release since its activation, which rollout gates evaluate."""
    parts = [f"{health['requests']} requests", f"{health['failed']} failed", f"{health['fallbacks']} fallbacks"]
    if (p95 := health.get("latency_p95_s")) is not None:
        parts.append(f"p95 {ms(p95)} ms")
    if (memory := health.get("memory_bytes")) is not None:
        parts.append(f"{size(memory)} of memory")
    if (drift := health.get("drift")) is not None:
        top = {True: ", the same first place", False: ", another first place", None: ""}[health.get("top1_agrees")]
        parts.append(f"drift {percent_text(drift)}{top}")
    if health.get("golden_ok"):
        parts.append("golden inputs answered")
    text = f"  {health['model']} {health['release'][:12]} for {_duration_text(health['active_s'])}: {', '.join(parts)}"
    return Text(text, "" if health.get("current", True) else "yellow")


def sequence_line(counts: dict[str, Any]) -> str:
    """Counts of lost, repeated and reordered telemetry."""
    labels = (("missing", "lost"), ("again", "twice"), ("earlier", "out of order"), ("older", "of older sessions"))
    odd = [f"{counts[name]} {text}" for name, text in labels if counts.get(name)]
    late = f", {counts['from_backlog']} came late" if counts.get("from_backlog") else ""
    return (
        f"telemetry {max(0, counts['sequence'])} of session {counts['session']}; {', '.join(odd) or 'none lost'}{late}"
    )


def power_line(power: dict[str, Any]) -> str:
    """Battery, power and temperature on one line; unknown values are left out."""
    parts = [
        "power: "
        + power.get("mode", "performance")
        + (f" ({power['mode_reason']})" if power.get("mode_reason") else "")
    ]
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


def _state_text(device: dict[str, Any]) -> Text:
    style = STATE_STYLE.get(device["state"], "white")
    copied = (" copied", "red") if device.get("copied") else ""
    safe = (" safe mode", "red") if device.get("safe_mode") else ""
    limited_text = (" held off", "red") if _is_held(device.get("flooded")) else ""
    return Text.assemble((device["state"], style), copied, safe, limited_text)


def _is_held(flooded: dict[str, Any] | None) -> bool:
    return bool(flooded) and float((flooded or {}).get("held_until", 0.0)) > time.time()


def _flood_text(name: str, flooded: dict[str, Any]) -> str:
    """The text for a device that exceeded the message rate of a correct agent."""
    left_s = flooded["held_until"] - time.time()
    status = f"held off for {left_s:.0f} s more" if left_s > 0 else "let in again"
    times = "once" if flooded["times"] == 1 else f"{flooded['times']} times"
    return (
        f"it flooded the broker ({times}, last {_ago_text(flooded['at'])}): {status}. "
        f"If that is no fault of its own: `edgectl device revoke {name}`"
    )


def _ago_text(seen_at: float | None) -> str:
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
