"""`edgectl rollout`: shows and controls rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import UsageError
from edgesplit_cli.commands.replan import accept, dismiss, proposals
from edgesplit_cli.output import json_option, print_result
from edgesplit_cli.settings import connect
from edgesplit_cli.views.rollout import exit_code, rollout_table, rollout_view, watch

NUMBER = click.IntRange(1, 2**31 - 1)


@click.group()
def rollout() -> None:
    """See how releases reach their devices; pause, approve, abort or roll back."""


for command in (proposals, accept, dismiss):
    rollout.add_command(command)


@rollout.command("list")
@click.option("--newest", type=click.IntRange(1, 1_000), default=20, show_default=True, help="Number of devices.")
@json_option
@click.pass_obj
def list_rollouts(data: Path, newest: int, as_json: bool) -> None:
    """List rollouts, newest last."""
    rollouts = connect(data).get("/v1/rollouts", newest=newest)
    print_result(rollouts, as_json, rollout_table(rollouts))


@rollout.command()
@click.argument("number", type=NUMBER, required=False, metavar="[ID]")
@click.option("--watch", "live", is_flag=True, help="Refresh until the rollout ends; the exit code says how it ended.")
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
    rollout_ = api.get(f"/v1/rollouts/{chosen}")
    members = {"members": all_devices(api, chosen)} if devices and as_json else {}
    print_result({**rollout_, **members}, as_json, rollout_view(rollout_))


def all_devices(api: ControllerClient, number: int) -> list[dict[str, Any]]:
    """Every device of a rollout, in the order in which it reaches them."""
    devices: list[dict[str, Any]] = []
    while True:
        after = devices[-1]["position"] if devices else -1
        page = api.get(f"/v1/rollouts/{number}/devices", after=after, most=1_000)
        if not page:
            return devices
        devices += page


def _newest(api: ControllerClient) -> int:
    rollouts = api.get("/v1/rollouts", newest=1)
    if not rollouts:
        raise UsageError("there is no rollout yet: `edgectl deploy MODEL --to ...` creates one")
    return int(rollouts[-1]["id"])


def _action_command(verb: str, help_text: str) -> click.Command:
    """A command that sends one action to a rollout."""

    @click.command(verb, help=help_text)
    @click.argument("number", type=NUMBER, metavar="ID")
    @json_option
    @click.pass_obj
    def ask(data: Path, number: int, as_json: bool) -> None:
        answer = connect(data).post(f"/v1/rollouts/{number}/{verb}")
        print_result(answer, as_json, rollout_view(answer))

    return ask


for _verb, _help in (
    ("pause", "Start no further device; those in progress go on."),
    ("resume", "Continue, also where evidence for a gate was missing."),
    ("approve", "Start the stage that waits for approval."),
    ("abort", "Start no further device, and roll back those in progress; those that succeeded stay."),
    (
        "rollback",
        "Roll every device back to what it ran before (nothing, if the release was its first), also after the rollout"
        " has ended.",
    ),
):
    rollout.add_command(_action_command(_verb, _help))
