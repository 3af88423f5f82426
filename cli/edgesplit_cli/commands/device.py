"""`edgectl device`: claims, lists, shows, labels, revokes and removes devices."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
from rich.text import Text

from edgesplit.controller_client.claims import ClaimRequest, create_claim
from edgesplit.errors import LinkError, UsageError
from edgesplit.identifiers import parse_label
from edgesplit.terminal_text import printable
from edgesplit_cli.options.completion import complete_devices, complete_profiles
from edgesplit_cli.options.types import NEW_FILE
from edgesplit_cli.output import check_writable, console, json_option, print_json, table
from edgesplit_cli.settings import connect, segment
from edgesplit_cli.views.device import (
    COLUMNS,
    STATE_STYLE,
    ago_text,
    audit_lines,
    condition_line,
    device_table,
    flood_text,
    health_line,
    log_lines,
    model_lines,
    offline_lines,
    power_line,
    reason_lines,
    sequence_line,
    state_text,
    window_rows,
)
from edgesplit_cli.views.timeline import mean_bars


@click.group()
def device() -> None:
    """Enrol devices, see what they do, revoke and remove them."""


@device.command()
@click.argument("name")
@click.option(
    "--profile", required=True, help="Its device profile (see `edgectl profiles`).", shell_complete=complete_profiles
)
@click.option(
    "--link", default="wifi", show_default=True,
    help="Link that plans assume: wifi, lte, 3g, or UP/RTT as in 8mbit/40ms.",
)  # fmt: skip
@click.option("--group", help="Group, for `--to group=NAME`.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="A label; may be given several times.")
@click.option(
    "--expires", "expires_s", type=click.IntRange(60), default=3600, show_default=True,
    help="Validity of the claim, in seconds.",
)  # fmt: skip
@click.option(
    "--replace",
    is_flag=True,
    help="NAME is an existing device: its name goes to other hardware, and the old one is revoked.",
)
@click.option(
    "--gateway", default="", metavar="HOST:PORT",
    help="It is a gateway: devices reach it there, and it finishes inferences for them. --link is then its own to the"
    " cloud.",
)  # fmt: skip
@click.option("--out", type=NEW_FILE, help="Write the claim to this file (0600).")
@click.pass_obj
def claim(
    data: Path, name: str, profile: str, link: str, group: str | None, labels: tuple[str, ...], expires_s: int,
    replace: bool, gateway: str, out: Path | None,
) -> None:  # fmt: skip
    """Make a one-time claim with which the device NAME enrols."""
    if out is not None:
        check_writable(out)  # request a claim only if it can be saved
    request = ClaimRequest(
        device=name, device_class=profile, link=link, group=group, labels=dict(parse_label(label) for label in labels),
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


@device.command("list")
@json_option
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--group", help="Only devices of this group.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="Only devices with this label; repeatable.")
@click.option("--state", type=click.Choice(tuple(STATE_STYLE)), help="Only devices in this state.")
@click.option("--condition", metavar="KIND", help="Only devices with this condition (see `edgectl fleet`).")
@click.pass_obj
def list_devices(
    data: Path, as_json: bool, watch: bool, group: str | None, labels: tuple[str, ...], state: str | None,
    condition: str | None,
) -> None:  # fmt: skip
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
            if not devices and any(filters.values()):
                console().print("no device matches this: `edgectl device list` has all of them", markup=False)
        if not watch:
            return
        time.sleep(1.0)


@device.command()
@click.argument("name", shell_complete=complete_devices)
@json_option
@click.pass_obj
def show(data: Path, name: str, as_json: bool) -> None:
    """One device: identity, desired and reported state, its latest telemetry."""
    record = connect(data).get(f"/v1/devices/{segment(name)}")
    if as_json:
        print_json(record)
        return
    record = printable(record)
    out = console()
    belongs = f"link {record.get('link') or '-'}  group {record.get('group') or '-'}"
    out.print(
        Text.assemble((record["name"], "bold"), "  ", state_text(record), f"  {record['device_class']}  {belongs}")
    )
    for label, value in (record.get("labels") or {}).items():
        out.print(f"  {label}={value}")
    if record["state"] == "claimed":
        out.print("not enrolled yet: start its agent with the claim that was made for it")
        return
    for condition in record.get("conditions") or []:
        out.print(condition_line(condition))
    if flooded := record.get("flooded"):
        out.print(Text(flood_text(record["name"], flooded), "red"))
    last_seen = f"last seen {ago_text(record.get('last_seen'))}; session {record.get('session') or '-'}"
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
        here = "complete" if held["release"] else held["state"]
        out.print(
            f"  stores {held['model']} {held['desired_release'][:16]} for devices behind it: {here} {held['detail']}"
        )
    if sequence := record.get("message_sequence"):
        out.print(sequence_line(sequence))
    if power := (record.get("telemetry") or {}).get("power"):
        out.print(Text(power_line(power), "red" if power.get("under_voltage") else ""))
    for line in model_lines(record):
        out.print(line)
    for health in record.get("health") or []:
        out.print(health_line(health))
    for audits in record.get("audits") or []:
        for told in audit_lines(audits):
            out.print(told, soft_wrap=True, markup=False)
    if (old := record.get("last_telemetry")) and not record.get("telemetry"):
        out.print(Text(f"no telemetry since {ago_text(old.get('at'))}: the figures below are out of date", "yellow"))
    out.print(table(("model", "cut", *(">" + name for name in COLUMNS)), window_rows(record)))
    for line in reason_lines(record):
        out.print(line)
    for window in (record.get("telemetry") or {}).get("models", []):
        if window.get("phases") and window["requests"]:
            made_up = "simulated" if record.get("simulated") else "emulated"
            emulated = f", {made_up}" if record["telemetry"].get("emulated") else ""
            requests = window["requests"]
            out.print(f"{window['model']}: where the time of the latest {requests} requests went (mean{emulated})")
            for line in mean_bars(window["phases"], requests):
                out.print(line)


@device.command("logs")
@click.argument("name", shell_complete=complete_devices)
@click.option("--out", type=NEW_FILE, help="Write the log bundle to this file.")
@click.option(
    "--wait", "wait_s", type=click.IntRange(1, 3_600), default=60, show_default=True,
    help="Seconds to wait for the device.",
)  # fmt: skip
@json_option
@click.pass_obj
def logs(data: Path, name: str, out: Path | None, wait_s: int, as_json: bool) -> None:
    """Request the recent log, versions and state of NAME, without secrets, and show them."""
    if out is not None:
        check_writable(out)
    api = connect(data)
    path = f"/v1/devices/{segment(name)}/logs"
    requested = api.post(path)
    until = time.monotonic() + wait_s
    while (log := api.get(f"{path}/{requested['id']}"))["state"] in ("requested", "receiving"):
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
@click.argument("name", shell_complete=complete_devices)
@click.argument("labels", nargs=-1, metavar="[K=V|K-]...")
@click.option("--group", help="Put it into this group.")
@click.pass_obj
def label(data: Path, name: str, labels: tuple[str, ...], group: str | None) -> None:
    """Give NAME labels (K=V), remove labels (K-), or put it into another group. What it runs stays unchanged."""
    if not labels and group is None:
        raise UsageError(
            f"no change is given: write it as in `edgectl device label {name} room=kitchen` or --group NAME"
        )
    removed = {text[:-1]: None for text in labels if text.endswith("-") and "=" not in text}
    added = dict(parse_label(text) for text in labels if "=" in text or not text.endswith("-"))
    updated = connect(data).patch(f"/v1/devices/{segment(name)}", {"group": group, "labels": {**added, **removed}})
    labels_text = "  ".join(f"{key}={value}" for key, value in updated["labels"].items())
    click.echo(f"{name}: group {updated['group'] or '-'}  {labels_text}".rstrip())


@device.command()
@click.argument("name", shell_complete=complete_devices)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def revoke(data: Path, name: str, yes: bool) -> None:
    """Revoke a device's right to connect."""
    if not yes:
        click.confirm(f"Revoke {name}? It will need a new claim.", abort=True)
    connect(data).delete(f"/v1/devices/{segment(name)}")
    click.echo(
        f"{name} is revoked: its session ends now, and its certificate is not accepted again;"
        f" `edgectl device remove {name}` deletes what is stored of it"
    )


@device.command()
@click.argument("name", shell_complete=complete_devices)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Revoke it first if it is not revoked.")
@click.pass_obj
def remove(data: Path, name: str, yes: bool, force: bool) -> None:
    """Remove NAME for good: a revoked device with its history and logs, or an unused claim."""
    if not yes:
        revoked_first = " It is revoked first if it is enrolled." if force else ""
        click.confirm(f"Remove {name}, and delete its history and logs?{revoked_first}", abort=True)
    connect(data).delete(f"/v1/devices/{segment(name)}/record{'?force=true' if force else ''}")
    click.echo(f"{name} is removed; its name can be claimed again")


@device.command()
@click.argument("targets", nargs=-1, required=True, metavar="DEVICE|group=NAME|all...", shell_complete=complete_devices)
@click.argument("gateway", metavar="GATEWAY|none", shell_complete=complete_devices)
@click.option("--link", default="", help="Their link from now on: to the gateway, or with none to the cloud.")
@click.pass_obj
def gateway(data: Path, targets: tuple[str, ...], gateway: str, link: str) -> None:
    """Let devices offload through GATEWAY, or with `none` to the cloud again. Deploy again to plan for it."""
    body = {"devices": list(targets), "gateway": gateway, "link": link}
    answer = connect(data).post("/v1/devices/gateway", body)
    route = f"through {answer['gateway']}" if answer["gateway"] else "to the cloud"
    click.echo(f"{', '.join(answer['devices'])}: offloads {route} from now on; `edgectl deploy` plans for it")
    for line in offline_lines(answer.get("offline", [])):
        click.echo(line)
