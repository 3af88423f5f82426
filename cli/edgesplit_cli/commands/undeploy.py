"""`edgectl undeploy`: removes a model from devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgesplit.errors import UsageError
from edgesplit_cli.commands.deploy import device_lines, wait_for_rollout
from edgesplit_cli.options.rollout import STAGING_NAMES, rollout_body, staging_options, wait_option
from edgesplit_cli.output import console, counted, json_option, print_json, print_result, table
from edgesplit_cli.settings import connect


@click.command()
@click.argument("model")
@click.option(
    "--from", "targets", multiple=True, metavar="DEVICE|group=NAME|EXPRESSION",
    help="Devices, as in 'site=oslo and not kind=lab'; repeatable.",
)  # fmt: skip
@click.option("--group", "groups", multiple=True, metavar="NAME", help="Every device of this group; repeatable.")
@click.option("--all", "everywhere", is_flag=True, help="Every device.")
@staging_options
@click.option("--dry-run", is_flag=True, help="Only show which devices run it.")
@wait_option
@json_option
@click.pass_obj
def undeploy(
    data: Path, /, model: str, targets: tuple[str, ...], groups: tuple[str, ...], everywhere: bool, dry_run: bool,
    wait_s: float, as_json: bool, **terms: Any,
) -> None:  # fmt: skip
    """Remove MODEL from devices: they get a signed statement that no longer names it, stop it and free its files.

    MODEL is a name, or NAME@VERSION for the devices that run this version. It is a rollout: `edgectl rollout` shows it,
    and rolls it back as long as the release is there.
    """
    selectors = [*targets, *(f"group={group}" for group in groups), *(["all"] if everywhere else [])]
    if not selectors:
        raise UsageError("say from which devices: --from DEVICE, --group NAME or --all")
    api = connect(data)
    rollout = rollout_body(**{name: terms[name] for name in STAGING_NAMES})
    body = {"model": model, "targets": selectors, "rollout": rollout, "dry_run": dry_run}
    undeployed = api.post("/v1/undeployments", body)
    if dry_run:
        rows = [(device["device"], device["state"], device["model"], device["release"][:16] or "not yet")
                for device in undeployed["devices"]]  # fmt: skip
        head = f"would be removed from {counted(len(rows), 'device')}; nothing was changed"
        print_result(undeployed, as_json, table(("device", "state", "model", "release"), rows), head)
        return
    if not as_json:
        _print_undeployment(undeployed)
    if wait_s:
        wait_for_rollout(api, undeployed["rollout"], wait_s, done="removed it")
    if as_json:
        print_json(undeployed)
    elif wait_s:
        click.echo(f"{undeployed['model']} is removed from {counted(len(undeployed['devices']), 'device')}")
    else:
        click.echo(f"Rollout {undeployed['rollout']}: `edgectl rollout status --watch` follows it.")


def _print_undeployment(undeployed: dict[str, Any]) -> None:
    """Print which devices lose the model, and which of them hear of it only later."""
    names = [device["device"] for device in undeployed["devices"]]
    console().print(f"{undeployed['model']} is removed from {', '.join(names)}")
    if away := [device["device"] for device in undeployed["devices"] if device["state"] != "online"]:
        console().print(f"  not online now, and told when they are back: {', '.join(away)}")
    for line in device_lines(undeployed):
        console().print(line)
