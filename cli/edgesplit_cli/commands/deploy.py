"""`edgectl deploy`: plan, cut, sign and tell devices to run it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import DeadlineExceeded
from edgesplit_cli.commands.options.plan_limits import limit_options, limits_of, offload_option
from edgesplit_cli.commands.options.rollout import NAMES as ROLLOUT
from edgesplit_cli.commands.options.rollout import (
    now_option,
    rollout_body,
    rollout_options,
    sign_with_option,
    to_option,
    wait_option,
    yes_option,
)
from edgesplit_cli.commands.replan import replan_option, set_policy
from edgesplit_cli.commands.rollout import all_devices
from edgesplit_cli.output import console, json_option, plain, print_json, table
from edgesplit_cli.settings import connect
from edgesplit_cli.views.plan import loss_told
from edgesplit_cli.views.rollout import exit_code, has_settled, looks

POLL_S = 0.3
MOST_NAMED = 10


@click.command()
@click.argument("model")
@click.option(
    "--partition",
    default="auto",
    show_default=True,
    help="auto, device, cloud, or the last LAYER that runs on the device; for devices behind a gateway also edge.",
)
@click.option(
    "--edge-after",
    default=None,
    metavar="LAYER",
    help="With --partition LAYER, behind a gateway: the last layer that runs on the gateway.",
)
@to_option
@rollout_options
@limit_options
@offload_option
@now_option
@click.option(
    "--encrypt",
    is_flag=True,
    help="Encrypt every slice: only the devices that run it, and the offload server for its half, get the keys.",
)
@click.option(
    "--recut",
    is_flag=True,
    help="Sign with the planner's key: only another cut of a model that was released before.",
)
@replan_option
@wait_option
@sign_with_option
@yes_option
@json_option
@click.pass_obj
def deploy(
    data: Path,
    /,
    model: str,
    partition: str,
    edge_after: str | None,
    targets: tuple[str, ...],
    objective: str | dict[str, float],
    codecs: tuple[str, ...] | None,
    offload: str,
    now: bool,
    encrypt: bool,
    recut: bool,
    replan: str | None,
    wait_s: float,
    sign_with: tuple[str, ...],
    yes: bool,
    as_json: bool,
    **limits: Any,
) -> None:
    """Split MODEL for each target, sign it as one release, and bring it to the devices.

    Without further options they are all told at once. `edgectl rollout` shows and steers what goes out in stages.
    """
    terms = rollout_body(**{name: limits.pop(name) for name in ROLLOUT})
    api = connect(data)
    body: dict[str, Any] = {
        "model": model,
        "partition": partition,
        "to": list(targets),
        "limits": {**limits_of(**limits), **({"edge_after": edge_after} if edge_after else {})},
        "objective": objective,
        "now": now,
        "encrypt": encrypt,
        "recut": recut,
        "rollout": terms,
        **({"codecs": list(codecs)} if codecs else {}),
        **({"offload": offload} if offload else {}),
    }
    made = _made(api, body, sign_with, yes, quiet=as_json)
    if replan:
        set_policy(api, model, targets, replan)
    if as_json:
        if wait_s:
            wait_for(api, made["rollout"], wait_s)
        print_json(made)
        return
    _print(made)
    if wait_s:
        wait_for(api, made["rollout"], wait_s)
        return
    console().print(
        f"Rollout {made['rollout']}: `edgectl rollout status --watch` follows it, `edgectl device list` shows"
        " who runs what."
    )


def _made(
    api: ControllerClient, body: dict[str, Any], sign_with: tuple[str, ...], yes: bool, *, quiet: bool
) -> dict[str, Any]:
    """What the controller made of it, signed here where the key is here."""
    with nullcontext() if quiet else console().status(Text(f"planning, cutting and signing {body['model']}")):
        made: dict[str, Any] = api.post("/v1/deployments", {**body, "elsewhere": bool(sign_with)})
    if "next_targets" in made:
        made = api.post("/v1/deployments/signed", {**body, **sign_release(made, sign_with, yes)})
    elif sign_with:
        click.echo("nothing was to be signed here: the controller has the release key, or knew the release", err=True)
    return made


def _print(made: dict[str, Any]) -> None:
    """The release, its plans, and what the rollout takes over."""
    encrypted = "  encrypted" if made["encrypted"] else ""
    console().print(f"release {made['release'][:16]}…  of {made['model']}{encrypted}  to {', '.join(made['devices'])}")
    console().print(f"  {_signature(made)}")
    for plan in made["plans"]:
        rows = ", ".join(_row(row, through_gateway=bool(plan.get("tiers"))) for row in plan["rows"])
        console().print(f"  {plan['device_class']}: {rows}", soft_wrap=True, markup=False)
        for row in plan["rows"]:
            if told := loss_told(row):
                console().print(f"    {row['name']}: {told}")
    for other in made["supersedes"]:
        console().print(f"  takes {other['devices']} devices over from rollout {other['rollout']}")


def _row(row: dict[str, Any], *, through_gateway: bool) -> str:
    """A row of a plan, and where it cuts."""
    after = f" (after {row['after']})" if row.get("after") and row["name"] != "local" else ""
    return str(row["name"]) + after + (_beyond(row) if through_gateway else "")


def sign_release(prepared: dict[str, Any], uris: tuple[str, ...], yes: bool) -> dict[str, Any]:
    """Show the operator what was prepared, and sign it here."""
    from edgesplit_cli.signing import release_told, signed_release

    for line in release_told(prepared):
        click.echo(line, err=True)
    if not yes:
        click.confirm("Sign this release?", abort=True, err=True)
    return {"release": prepared["release"], "next_targets": signed_release(prepared, uris)}


@click.command()
@json_option
@click.pass_obj
def deployments(data: Path, as_json: bool) -> None:
    """What was deployed, newest last."""
    made = connect(data).get("/v1/deployments")
    if as_json:
        print_json(made)
        return
    rows = [
        (
            str(one["id"]),
            one["model"],
            one["partition"],
            one["release"][:16] + (" encrypted" if one.get("encrypt") else ""),
            ", ".join(one["devices"]),
        )
        for one in made
    ]
    console().print(table((">id", "model", "partition", "release", "devices"), rows))


def _signature(made: dict[str, Any]) -> str:
    """Who signed a release, for people."""
    if "recut_of" not in made:
        return "signed by the release key"
    return f"signed by the planner: another cut of release {made['recut_of'][:16]}…"


def wait_for(api: ControllerClient, number: int, seconds: float) -> None:
    """Until the rollout has ended and every device of it runs the release. DeadlineExceeded names those that do not,
    and why; one that ended otherwise exits by how it ended."""
    *_, one = looks(api, number, time.monotonic() + seconds, POLL_S)
    behind = [device for device in all_devices(api, number) if device["state"] != "succeeded"]
    if has_settled(one) and (one["state"] == "finished" or one["following"]) and not behind:
        return
    told = "; ".join(
        f"{device['device']}: {device['state']} {device['cause']}".strip() for device in behind[:MOST_NAMED]
    )
    more = f"; and {len(behind) - MOST_NAMED} more" if len(behind) > MOST_NAMED else ""
    why = f" ({one['why']})" if one["why"] else ""
    text = f"not every device runs it: rollout {number} is {one['state']}{why}. {plain(told)}{more}"
    if code := exit_code(one):
        click.echo(f"edgectl: {text}", err=True)
        click.get_current_context().exit(code)
    raise DeadlineExceeded(text)


def _beyond(row: dict[str, Any]) -> str:
    """How many slices of a row run on which tier beyond the device, behind a gateway."""
    remote, hops = row.get("remote", []), row.get("hops", [])
    cloud = len(hops[0]["remote"]) if hops else 0
    return f" [gateway {len(remote) - cloud}, cloud {cloud}]" if remote else ""
