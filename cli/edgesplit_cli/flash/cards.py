"""One run of `edgectl flash` for cards: write them, print the result, wait for the devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import click

from edgesplit.controller_client.client import ControllerClient
from edgesplit_cli.flash.output import show_plan
from edgesplit_cli.flash.prompts import TerminalUser
from edgesplit_cli.output import print_json
from edgesplit_cli.progress import progress_text
from edgesplit_provisioning.flash_options import CardOptions
from edgesplit_provisioning.image.session import FlashPlan, FlashSession
from edgesplit_provisioning.image.wait_online import WaitProgress, wait_online


def flash_cards(
    connect: Callable[[], ControllerClient], flash: CardOptions, *, as_json: bool, yes: bool, wait_s: float
) -> None:
    """Run the whole command."""
    session = FlashSession(connect, flash, TerminalUser(as_json, yes))
    if not session.devices:
        click.echo(f"every device of {flash.batch} has its card ({flash.batch}.journal)")
        return
    result = session.run()
    if isinstance(result, FlashPlan):
        show_plan(result, as_json)
        return
    if as_json:
        cards = [asdict(written) for written in result]
        print_json(cards if flash.batch is not None else cards[0])
    if flash.wait:
        _wait(session, wait_s, as_json)
    elif not as_json:
        click.echo(f"Start the device with it; `edgectl device show {session.devices[-1]}` says when it is online.")


def _wait(session: FlashSession, wait_s: float, as_json: bool) -> None:
    with progress_text("waiting for the devices", quiet=as_json) as report:

        def on_progress(now: WaitProgress) -> None:
            states = ", ".join(f"{name} {state}" for name, state in list(now.states.items())[:6])
            report(f"{len(now.online)} of {len(now.states)} online: {states}")

        progress = wait_online(session.client, session.devices, wait_s, on_progress)
    if not as_json:
        click.echo(f"online: {', '.join(progress.online)}")
