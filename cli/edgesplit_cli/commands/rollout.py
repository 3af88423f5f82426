"""`edgectl rollout`: how far releases have come, and what operators ask of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import UsageError
from edgesplit_cli.commands.replan import accept, dismiss, proposals
from edgesplit_cli.output import console, json_option, print_json
from edgesplit_cli.settings import connect
from edgesplit_cli.views.rollout import exit_code, rollout_shown, rollout_table, watch

NUMBER = click.IntRange(1, 2**31 - 1)


@click.group()
def rollout() -> None:
    """See how releases reach their devices; pause, approve, stop them, take them back."""


for command in (proposals, accept, dismiss):
    rollout.add_command(command)


@rollout.command("list")
@click.option("--newest", type=click.IntRange(1, 1_000), default=20, show_default=True, help="How many.")
@json_option
@click.pass_obj
def list_rollouts(data: Path, newest: int, as_json: bool) -> None:
    """Rollouts, newest last."""
    found = connect(data).get("/v1/rollouts", newest=newest)
    if as_json:
        return print_json(found)
    console().print(rollout_table(found))


@rollout.command()
@click.argument("number", type=NUMBER, required=False, metavar="[ID]")
@click.option("--watch", "live", is_flag=True, help="Show it live until it ends, and exit by how it ended.")
@click.option("--devices", is_flag=True, help="With --json: every device of it, too.")
@json_option
@click.pass_context
def status(context: click.Context, number: int | None, live: bool, devices: bool, as_json: bool) -> None:
    """One rollout (the newest, if none is named): stages, what it waits for, failures by cause.

    With --watch it exits when the rollout ends: 0 finished, 11 failed, 12 aborted, 13 rolled back, 14 superseded.
    """
    api = connect(context.obj)
    chosen = number or _newest(api)
    if live:
        context.exit(exit_code(watch(api, chosen, as_json=as_json)))
    one = api.get(f"/v1/rollouts/{chosen}")
    if as_json:
        return print_json({**one, "members": all_devices(api, chosen)} if devices else one)
    console().print(rollout_shown(one))


def all_devices(api: ControllerClient, number: int) -> list[dict[str, Any]]:
    """Every device of a rollout, in the order in which they are told."""
    found: list[dict[str, Any]] = []
    while True:
        after = found[-1]["position"] if found else -1
        page = api.get(f"/v1/rollouts/{number}/devices", after=after, most=1_000)
        if not page:
            return found
        found += page


def _newest(api: ControllerClient) -> int:
    found = api.get("/v1/rollouts", newest=1)
    if not found:
        raise UsageError("there is no rollout yet: `edgectl deploy MODEL --to ...` makes one")
    return int(found[-1]["id"])


def _asking(verb: str, help_text: str) -> click.Command:
    """A command that says one word to a rollout."""

    @click.command(verb, help=help_text)
    @click.argument("number", type=NUMBER, metavar="ID")
    @json_option
    @click.pass_obj
    def ask(data: Path, number: int, as_json: bool) -> None:
        one = connect(data).post(f"/v1/rollouts/{number}/{verb}")
        if as_json:
            return print_json(one)
        console().print(rollout_shown(one))

    return ask


for _verb, _help in (
    ("pause", "Tell no further device; those on their way go on."),
    ("resume", "Go on, also where evidence was missing."),
    ("approve", "Let the stage begin that waits for approval."),
    ("abort", "Tell no further device, and take back those on their way; those that succeeded stay."),
    ("rollback", "Take every device back to what it ran before, also after the rollout has ended."),
):
    rollout.add_command(_asking(_verb, _help))
