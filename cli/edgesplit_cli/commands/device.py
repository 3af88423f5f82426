"""`edgectl device`: claim, list, show and revoke devices."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
from rich.text import Text

from edgesplit.controller_client.claims import ClaimWish, make_claim
from edgesplit.errors import LinkError, UsageError
from edgesplit_cli.output import can_write, console, json_option, ms, plain, print_json, rate, share, size, table
from edgesplit_cli.settings import connect
from edgesplit_cli.views.timeline import means

STATE_STYLE = {"online": "green", "stale": "yellow", "offline": "red", "claimed": "dim", "revoked": "red"}


@click.group()
def device() -> None:
    """Enrol devices, see what they do, send them away."""


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
    "--replace", is_flag=True, help="NAME is a device already: give its name to other hardware, and cut it off then."
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
        can_write(out)  # the claim is made only if it can be kept
    wish = ClaimWish(
        device=name, device_class=profile, link=link, group=group, labels=dict(_label(label) for label in labels),
        expires_s=expires_s, replace=replace, gateway=gateway,
    )  # fmt: skip
    made = make_claim(connect(data), wish)
    if out is None:
        click.echo(made)
        return
    out.touch(mode=0o600)
    out.chmod(0o600)
    out.write_text(made)
    serve = f" --gateway :{gateway.rpartition(':')[2]}" if gateway else ""
    click.echo(
        f"claim for {name} in {out}: on the device, run `edgesplit-agent run --data FOLDER --claim {out}{serve}`"
    )


def _label(text: str) -> tuple[str, str]:
    """Key and value; UsageError for a label without a value, which no `--to KEY=VALUE` would ever find."""
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
@click.option("--condition", default=None, metavar="KIND", help="Only devices with this wrong (see `edgectl fleet`).")
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
    """Who is online, what runs, which cut, how fast."""
    api = connect(data)
    asked = {"group": group, "label": list(labels) or None, "state": state, "condition": condition}
    while True:
        every = api.pages("/v1/devices", **asked)
        if as_json:
            print_json(every)
        else:
            if watch:
                click.clear()
            console().print(device_table(plain(every)))
        if not watch:
            return
        time.sleep(1.0)


COLUMNS = ("requests", "p50 ms", "p95 ms", "device ms", "link ms", "remote ms", "fallbacks", "joules")


@device.command()
@click.argument("name")
@json_option
@click.pass_obj
def show(data: Path, name: str, as_json: bool) -> None:
    """One device: identity, what it was told, what it really runs, its latest telemetry."""
    one = connect(data).get(f"/v1/devices/{name}")
    if as_json:
        print_json(one)
        return
    one = plain(one)
    out = console()
    belongs = f"link {one.get('link') or '-'}  group {one.get('group') or '-'}"
    out.print(Text.assemble((one["name"], "bold"), "  ", _state(one), f"  {one['device_class']}  {belongs}"))
    for label, value in (one.get("labels") or {}).items():
        out.print(f"  {label}={value}")
    for condition in one.get("conditions") or []:
        out.print(condition_line(condition))
    if flooded := one.get("flooded"):
        out.print(Text(_flood(one["name"], flooded), "red"))
    seen = f"last seen {_ago(one.get('last_seen'))}; session {one.get('session') or '-'}"
    out.print(f"{seen}; agent {one.get('agent_version') or '-'} at {one.get('local_url') or '-'}")
    if safe_mode := one.get("safe_mode"):
        told = f": {safe_mode}. Deploy another release to end it."
        out.print(Text.assemble(("safe mode, no model is loaded", "red"), told))
    if trouble := one.get("trouble"):
        out.print(Text(trouble, "red"))
    if through := one.get("gateway"):
        out.print(f"offloads through the gateway {through}")
    if serves := one.get("serves_at"):
        out.print(f"a gateway: devices reach it at {serves}")
    for kept in one.get("kept") or []:
        here = "here" if kept["release"] else kept["state"]
        out.print(f"  keeps {kept['model']} {kept['wanted'][:16]} for devices behind it: {here} {kept['detail']}")
    if heard := one.get("heard"):
        out.print(heard_line(heard))
    if power := (one.get("telemetry") or {}).get("power"):
        out.print(Text(power_line(power), "red" if power.get("under_voltage") else ""))
    for line in model_lines(one):
        out.print(line)
    for health in one.get("health") or []:
        out.print(health_line(health))
    if (old := one.get("last_telemetry")) and not one.get("telemetry"):
        out.print(Text(f"it measured nothing since {_ago(old.get('at'))}: what follows is not how it is now", "yellow"))
    out.print(
        table(
            ("model", "cut", *(">" + name for name in COLUMNS)),
            _windows(one),
        )
    )
    for window in (one.get("telemetry") or {}).get("models", []):
        if window.get("phases") and window["requests"]:
            made_up = "simulated" if one.get("simulated") else "emulated"
            emulated = f", {made_up}" if one["telemetry"].get("emulated") else ""
            requests = window["requests"]
            out.print(f"{window['model']}: where the time of the latest {requests} requests went (mean{emulated})")
            for line in means(window["phases"], requests):
                out.print(line)


@device.command("logs")
@click.argument("name")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write the bundle there.")
@click.option("--wait", "wait_s", type=click.IntRange(1, 3_600), default=60, show_default=True, help="Seconds.")
@json_option
@click.pass_obj
def logs(data: Path, name: str, out: Path | None, wait_s: int, as_json: bool) -> None:
    """Ask NAME for its recent log, versions and state, without secrets, and show them."""
    if out is not None:
        can_write(out)
    api = connect(data)
    asked = api.post(f"/v1/devices/{name}/logs")
    until = time.monotonic() + wait_s
    while (found := api.get(f"/v1/devices/{name}/logs/{asked['id']}"))["state"] in ("asked", "coming"):
        if time.monotonic() >= until:
            raise LinkError(f"{name} has not answered within {wait_s} s; `edgectl device show {name}` says how it is")
        time.sleep(0.5)
    if found["state"] != "here":
        raise LinkError(f"{name} sent no logs: {found['why']}")
    if out is not None:
        out.write_text(json.dumps(found["content"], indent=1))
        click.echo(f"{len(found['content'].get('log') or [])} lines of {name} and its state in {out}")
    elif as_json:
        print_json(found["content"])
    else:
        for line in log_lines(found["content"]):
            console().print(line)


@device.command()
@click.argument("name")
@click.argument("labels", nargs=-1, metavar="[K=V|K-]...")
@click.option("--group", default=None, help="Put it into this group.")
@click.pass_obj
def label(data: Path, name: str, labels: tuple[str, ...], group: str | None) -> None:
    """Give NAME labels (K=V), take labels away (K-), or put it into another group. What it runs stays as it is."""
    if not labels and group is None:
        raise UsageError(f"say what to change, as in `edgectl device label {name} room=kitchen` or --group NAME")
    taken = {one[:-1]: None for one in labels if one.endswith("-") and "=" not in one}
    given = dict(_label(one) for one in labels if "=" in one or not one.endswith("-"))
    now = connect(data).patch(f"/v1/devices/{quote(name, safe='')}", {"group": group, "labels": {**given, **taken}})
    shown = "  ".join(f"{key}={value}" for key, value in now["labels"].items())
    click.echo(f"{name}: group {now['group'] or '-'}  {shown}".rstrip())


@device.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def revoke(data: Path, name: str, yes: bool) -> None:
    """Take a device's right to connect away."""
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
    """Let devices offload through GATEWAY, or with `none` to the cloud again. Deploy anew to plan for it."""
    body = {"devices": list(targets), "gateway": gateway, "link": link}
    led = connect(data).post("/v1/devices/gateway", body)
    to = f"through {led['gateway']}" if led["gateway"] else "to the cloud"
    click.echo(f"{', '.join(led['devices'])}: offloads {to} from now on; `edgectl deploy` plans for it")


def device_table(every: list[dict[str, Any]]) -> Any:
    """All devices, a line each and model."""
    rows = [line for one in every for line in _lines(one)]
    columns = ("device", "state", "profile", "agent", "model", "cut")
    return table((*columns, ">p50 ms", ">p95 ms", ">uplink", ">round trip ms", "seen"), rows)


def _lines(one: dict[str, Any]) -> list[tuple[str | Text, ...]]:
    """The table's lines of one device; what is no longer true is not shown."""
    live = one["state"] == "online"
    telemetry = (one.get("telemetry") or {}) if live else {}
    windows = {window["model"]: window for window in telemetry.get("models", [])}
    made_up = "simulated" if one.get("simulated") else "emulated" if one.get("emulated") else ""
    kind = one["device_class"] + (f" ({made_up})" if made_up else "")
    lines: list[tuple[str | Text, ...]] = []
    for model in one.get("models") or [{"model": "-", "state": "", "release": ""}]:
        window = windows.get(model["model"], {})
        running = model["model"] + (f" {model['state']}" if model["state"] not in ("running", "") else "")
        lines.append(
            (
                one["name"],
                _state(one),
                kind,
                one.get("agent_version") or "-",
                running,
                window.get("row", "-"),
                ms(window.get("latency_p50_s") or None),
                ms(window.get("latency_p95_s") or None),
                rate(telemetry.get("up_bytes_per_s")),
                ms(telemetry.get("rtt_s")),
                _ago(one.get("last_seen")),
            )
        )
    return lines


def _windows(one: dict[str, Any]) -> list[tuple[str, ...]]:
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
            joules(window),
        )
        for window in (one.get("telemetry") or one.get("last_telemetry") or {}).get("models", [])
    ]


def joules(window: dict[str, Any]) -> str:
    """Per answer, marked where no rail measured it."""
    basis = window.get("joules_basis")
    return f"{window['joules']:.3g}{' (predicted)' if basis == 'predicted' else ''}" if basis else "-"


def log_lines(content: dict[str, Any]) -> list[str]:
    """A bundle's log for people, oldest first; a line that is none of ours as it is."""
    lines = [f"versions: {plain(content.get('versions'))}"]
    for line in content.get("log") or []:
        try:
            one = plain(json.loads(line))
            lines.append(f"{one['at']} {one['level'].upper()} {one['logger']}: {one['message']}")
        except (ValueError, KeyError, TypeError, AttributeError):
            lines.append(str(plain(str(line))))
    return lines


def condition_line(condition: dict[str, Any]) -> Text:
    """What is wrong, since when, and what to do about it."""
    now = condition.get("current", True)
    when = f"since {_ago(condition['since'])}" if now else f"when it was last heard (since {_ago(condition['since'])})"
    told = f": {condition['text']}, {when}. {condition['do'][:1].upper()}{condition['do'][1:]}."
    return Text.assemble((condition["kind"], "red" if now else "yellow"), told)


def model_lines(one: dict[str, Any]) -> list[Text]:
    """What it runs, what it shall run, and why that is not the same."""
    reported = (one.get("facts") or {}).get("reported") or {}
    models = {model["model"]: model for model in one.get("models") or []}
    differences = {found["model"]: found for found in one.get("differences") or []}
    lines = []
    for name in sorted({*models, *differences}):
        model, found = models.get(name, {}), differences.get(name, {})
        runs = found.get("runs") or model.get("release") or ""
        state = model.get("state", "unknown")
        told: list[str | tuple[str, str]] = [
            f"  {name}: ",
            (state, "green" if state == "running" else "yellow"),
            f" {runs[:16] or 'nothing'}",
        ]
        if model and not model.get("current", True):
            told.append(f" (said {_ago(reported.get('at'))}: {model.get('last_state')})")
        if found.get("reason") not in (None, "as wanted"):
            why = f" ({found['why']})" if found.get("why") else ""
            wanted = f"; shall run {found['wanted'][:16]}" if found["wanted"] not in ("", runs) else ""
            told.append(f"{wanted}: {found['reason']}{why}")
        lines.append(Text.assemble(*told))
    return lines


def health_line(health: dict[str, Any]) -> Text:
    """How a release has done on it since it was activated: what the gates of a rollout judge."""
    parts = [f"{health['requests']} requests", f"{health['failed']} failed", f"{health['fallbacks']} fallbacks"]
    if (p95 := health.get("latency_p95_s")) is not None:
        parts.append(f"p95 {ms(p95)} ms")
    if (memory := health.get("memory_bytes")) is not None:
        parts.append(f"{size(memory)} of memory")
    if (drift := health.get("drift")) is not None:
        top = {True: ", the same first place", False: ", another first place", None: ""}[health.get("top_agrees")]
        parts.append(f"drift {share(drift)}{top}")
    if health.get("golden_ok"):
        parts.append("golden inputs answered")
    told = f"  {health['model']} {health['release'][:12]} for {_long(health['since_s'])}: {', '.join(parts)}"
    return Text(told, "" if health.get("current", True) else "yellow")


def heard_line(heard: dict[str, Any]) -> str:
    """The order of its messages, where it was not perfect."""
    words = (("missing", "lost"), ("again", "twice"), ("earlier", "out of order"), ("older", "of older sessions"))
    odd = [f"{heard[name]} {word}" for name, word in words if heard.get(name)]
    late = f", {heard['late']} came late" if heard.get("late") else ""
    return f"telemetry {max(0, heard['sequence'])} of session {heard['session']}; {', '.join(odd) or 'none lost'}{late}"


def power_line(power: dict[str, Any]) -> str:
    """Battery, power and heat on one line; what is unknown is left out."""
    parts = ["power: " + power.get("mode", "performance") + (f" ({power['why']})" if power.get("why") else "")]
    if (percent := power.get("battery_percent")) is not None:
        parts.append(f"battery {percent:.0f} %{' and falling' if power.get('discharging') else ''}")
    if (watts := power.get("watts")) is not None:
        budget = power.get("budget_watts")
        parts.append(f"{watts:.2f} W by its {power.get('watts_from', '')}{f' of {budget:g} W' if budget else ''}")
    elif power.get("budget_watts"):
        parts.append(f"budget {power['budget_watts']:g} W, by the plan's figures")
    if (celsius := power.get("celsius")) is not None:
        parts.append(f"{celsius:.0f} °C")
    if (speed := power.get("speed")) is not None and speed < 1:
        parts.append(f"clock capped at {speed:.0%}")
    if power.get("under_voltage"):
        parts.append("UNDER-VOLTAGE: check its supply and cable")
    if power.get("updates_wait"):
        parts.append(f"updates wait: {power['updates_wait']}")
    return ", ".join(parts)


def _state(one: dict[str, Any]) -> Text:
    style = STATE_STYLE.get(one["state"], "white")
    copied = (" copied", "red") if one.get("copied") else ""
    safe = (" safe mode", "red") if one.get("safe_mode") else ""
    held = (" held off", "red") if _is_held(one.get("flooded")) else ""
    return Text.assemble((one["state"], style), copied, safe, held)


def _is_held(flooded: dict[str, Any] | None) -> bool:
    return bool(flooded) and float((flooded or {}).get("held_until", 0.0)) > time.time()


def _flood(name: str, flooded: dict[str, Any]) -> str:
    """What is said of a device that sent more than any correct agent does."""
    left_s = flooded["held_until"] - time.time()
    held = f"held off for {left_s:.0f} s more" if left_s > 0 else "let in again"
    times = "once" if flooded["times"] == 1 else f"{flooded['times']} times"
    return (
        f"it flooded the broker ({times}, last {_ago(flooded['at'])}): {held}. "
        f"If that is no fault of its own: `edgectl device revoke {name}`"
    )


def _ago(seen: float | None) -> str:
    return ago(seen, time.time())


def ago(seen: float | None, now: float) -> str:
    """How long ago, for people."""
    if not seen:
        return "never"
    return f"{_long(max(0.0, now - seen))} ago"


def _long(seconds: float) -> str:
    for unit, long_s in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * long_s:
            return f"{seconds / long_s:.0f} {unit}"
    return f"{seconds:.0f} s"
