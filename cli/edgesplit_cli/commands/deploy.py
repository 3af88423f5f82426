"""`edgectl deploy`: plans, cuts and signs a model, and starts its rollout."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import DeadlineExceeded
from edgesplit.terminal_text import printable
from edgesplit_cli.commands.replan import replan_option, set_policy
from edgesplit_cli.commands.rollout import all_devices
from edgesplit_cli.options.cascade import NAMES as CASCADE
from edgesplit_cli.options.cascade import cascade_body, cascade_options
from edgesplit_cli.options.completion import complete_models
from edgesplit_cli.options.plan_limits import answer_option, build_limits, limit_options, offload_option
from edgesplit_cli.options.rollout import NAMES as ROLLOUT
from edgesplit_cli.options.rollout import (
    now_option,
    rollout_body,
    rollout_options,
    sign_with_option,
    to_option,
    wait_option,
    yes_option,
)
from edgesplit_cli.output import console, counted, json_option, print_json, print_result, table
from edgesplit_cli.progress import controller_progress, progress_text
from edgesplit_cli.settings import connect
from edgesplit_cli.views.device import offline_lines
from edgesplit_cli.views.exit_plan import print_exit
from edgesplit_cli.views.family_plan import print_cascade
from edgesplit_cli.views.plan import changed_text, loss_text
from edgesplit_cli.views.rollout import exit_code, is_awaited_offline, is_settled, poll, progress_line

POLL_S = 0.3
MAX_NAMED = 10


@click.command()
@click.argument("model", shell_complete=complete_models)
@click.option(
    "--partition", default="auto", show_default=True,
    help="auto, device, cloud, or a cut by its name in `edgectl plan`: the last LAYER on the device, 'LAYER + LAYER'"
    " through branches; for devices behind a gateway also edge.",
)  # fmt: skip
@click.option(
    "--edge-after",
    metavar="LAYER",
    help="With --partition LAYER, behind a gateway: the last layer that runs on the gateway.",
)
@to_option
@rollout_options
@limit_options
@cascade_options
@answer_option
@offload_option
@now_option
@click.option(
    "--encrypt",
    is_flag=True,
    help="Encrypt every slice: only the devices that run it, and the offload server for its half, get the keys.",
)
@click.option(
    "--recut", is_flag=True, help="Sign with the planner's key: only another cut of a model that was released before."
)
@replan_option
@wait_option
@sign_with_option
@yes_option
@json_option
@click.pass_obj
def deploy(
    data: Path, /, model: str, partition: str, edge_after: str | None, targets: tuple[str, ...],
    objective: str | dict[str, float] | None, least_accuracy: float | None, codecs: tuple[str, ...] | None, answer: str,
    offload: str, now: bool, encrypt: bool, recut: bool, replan: str | None, wait_s: float,
    sign_with: tuple[str, ...], yes: bool, as_json: bool, **limits: Any,
) -> None:  # fmt: skip
    """Split MODEL for each target, sign it as one release, and roll it out to the devices.

    Without further options all devices get it at once. `edgectl rollout` shows and controls a rollout in stages.
    """
    terms = rollout_body(**{name: limits.pop(name) for name in ROLLOUT})
    cascade = cascade_body(**{name: limits.pop(name) for name in CASCADE})
    api = connect(data)
    body: dict[str, Any] = {
        "model": model,
        "partition": partition,
        "to": list(targets),
        "limits": {**build_limits(**limits), **({"edge_after": edge_after} if edge_after else {})},
        **({"objective": objective} if objective else {}),
        **({"least_accuracy": least_accuracy} if least_accuracy else {}),
        **({"cascade": cascade} if cascade else {}),
        "now": now,
        "encrypt": encrypt,
        "recut": recut,
        "rollout": terms,
        **({"codecs": list(codecs)} if codecs else {}),
        **({"answer": answer} if answer else {}),
        **({"offload": offload} if offload else {}),
    }
    deployment = _create_deployment(api, body, sign_with, yes, quiet=as_json)
    if replan:
        set_policy(api, model, targets, replan)
    if not as_json:
        _print_deployment(deployment)
    if wait_s:
        wait_for_rollout(api, deployment["rollout"], wait_s, quiet=as_json)
    elif not as_json:
        click.echo(
            f"Rollout {deployment['rollout']}: `edgectl rollout status --watch` follows it, `edgectl device"
            " list` shows the"
            " release of each device."
        )
    if as_json:
        print_json(deployment)


def _create_deployment(
    api: ControllerClient, body: dict[str, Any], sign_with: tuple[str, ...], yes: bool, *, quiet: bool
) -> dict[str, Any]:
    """Create the deployment; the release is signed here where the key is here."""
    path = "/v1/deployments"
    with controller_progress(api, path, f"deploying {body['model']}", quiet=quiet):
        deployment: dict[str, Any] = api.post(path, {**body, "elsewhere": bool(sign_with)})
    if "next_targets" in deployment:
        prices = deployment["prices"]
        deployment = api.post("/v1/deployments/signed", {**body, **sign_release(deployment, sign_with, yes)})
        deployment["prices"] = prices
    elif sign_with:
        click.echo(
            "nothing had to be signed here: the controller has the release key, or has this signed release already",
            err=True,
        )
    return deployment


def _print_deployment(deployment: dict[str, Any]) -> None:
    """Print the release, its plans, and the rollouts that it supersedes."""
    encrypted = "  encrypted" if deployment["encrypted"] else ""
    console().print(
        f"release {deployment['release'][:16]}…  of {deployment['model']}{encrypted}  to"
        f" {', '.join(deployment['devices'])}"
    )
    console().print(f"  {_signature(deployment)}")
    for plan in deployment["plans"]:
        rows = ", ".join(_row(row, through_gateway=bool(plan.get("tiers"))) for row in plan["rows"])
        console().print(f"  {plan['device_class']}: {rows}", soft_wrap=True, markup=False)
        for row in plan["rows"]:
            if loss := loss_text(row):
                console().print(f"    {row['name']}: {loss}")
            if changed := row.get("changed"):
                console().print(f"    {row['name']}: {changed_text(changed)}")
        if price := deployment["prices"].get(plan["device_class"]):
            (print_exit if price["cascade"].get("exit_output") else print_cascade)(price)
    for line in device_lines(deployment):
        console().print(line)


def device_lines(deployment: dict[str, Any]) -> list[str]:
    """The rollouts that a deployment takes devices over from, and its devices that are offline, as lines of text."""
    others = deployment["supersedes"]
    lines = [f"  takes {counted(other['devices'], 'device')} over from rollout {other['rollout']}" for other in others]
    return [*lines, *offline_lines(deployment.get("offline", []))]


def _row(row: dict[str, Any], *, through_gateway: bool) -> str:
    """A row of a plan and where it cuts."""
    after = f" (after {row['split_after']})" if row.get("split_after") and row["name"] != "local" else ""
    return str(row["name"]) + after + (_tier_counts(row) if through_gateway else "")


def sign_release(prepared: dict[str, Any], uris: tuple[str, ...], yes: bool) -> dict[str, Any]:
    """Show the operator what was prepared, ask for confirmation, and sign it here."""
    from edgesplit_cli.signing import release_summary, sign_release_list

    for line in release_summary(prepared):
        click.echo(line, err=True)
    if not yes:
        click.confirm("Sign this release?", abort=True, err=True)
    return {"release": prepared["release"], "next_targets": sign_release_list(prepared, uris)}


@click.command()
@json_option
@click.pass_obj
def deployments(data: Path, as_json: bool) -> None:
    """List all deployments, newest last."""
    found_deployments = connect(data).get("/v1/deployments")
    rows = [
        (
            str(deployment["id"]),
            deployment["model"],
            deployment["partition"],
            deployment["release"][:16] + (" encrypted" if deployment.get("encrypt") else ""),
            ", ".join(deployment["devices"]),
        )
        for deployment in found_deployments
    ]
    print_result(
        found_deployments, as_json, table((">id", "model", "partition", "release", "devices"), rows, newest_last=True)
    )


def _signature(deployment: dict[str, Any]) -> str:
    """Which key signed the release, as text."""
    if "recut_of" not in deployment:
        return "signed by the release key"
    return f"signed by the planner: another cut of release {deployment['recut_of'][:16]}…"


def wait_for_rollout(
    api: ControllerClient, number: int, seconds: float, *, done: str = "run it", quiet: bool = False
) -> None:
    """Wait until the rollout has ended and has succeeded on every device. DeadlineExceeded names those on which it has
    not and why, those that are offline apart; a rollout that ended otherwise exits with its exit code. `done`: what
    the other devices do then."""
    rollout: dict[str, Any] = {}
    with progress_text(f"rollout {number}", quiet=quiet) as report:
        for rollout in poll(api, number, time.monotonic() + seconds, POLL_S):
            report(progress_line(rollout))
    devices = all_devices(api, number)
    behind = [device for device in devices if device["state"] != "succeeded"]
    if is_settled(rollout) and (rollout["state"] == "finished" or rollout["following"]) and not behind:
        return
    offline = [device for device in behind if is_awaited_offline(device)]
    online = [device for device in behind if not is_awaited_offline(device)]
    parts = [f"{device['device']}: {device['state']} {device['cause']}".strip() for device in online[:MAX_NAMED]]
    parts += [f"and {len(online) - MAX_NAMED} more"] if len(online) > MAX_NAMED else []
    parts += [line.strip() for line in offline_lines(offline)]
    reason = f" ({rollout['reason']})" if rollout["reason"] else ""
    counts = f"{len(devices) - len(behind)} of {len(devices)} devices {done}, {len(offline)} offline"
    text = f"{counts}: rollout {number} is {rollout['state']}{reason}. {printable('; '.join(parts))}"
    if code := exit_code(rollout):
        click.echo(f"edgectl: {text}", err=True)
        click.get_current_context().exit(code)
    raise DeadlineExceeded(text)


def _tier_counts(row: dict[str, Any]) -> str:
    """How many slices of a row run on the gateway and in the cloud."""
    remote, hops = row.get("remote", []), row.get("hops", [])
    cloud = len(hops[0]["remote"]) if hops else 0
    return f" [gateway {len(remote) - cloud}, cloud {cloud}]" if remote else ""
