"""The operator of `edgectl flash` at a terminal: a confirmation, a passphrase, cards to put in, and a line for
each card that was written."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

import click
from rich.text import Text

from edgesplit_cli.flash.output import progress_bars
from edgesplit_cli.output import console
from edgesplit_provisioning.image.card import Stages
from edgesplit_provisioning.image.session import WrittenCard
from edgesplit_provisioning.image.target_checks import FlashTarget


class TerminalUser:
    """`FlashUser` at a terminal. Questions and warnings go to standard error."""

    def __init__(self, as_json: bool, yes: bool) -> None:
        """With `yes` nothing is asked; with `as_json` nothing but JSON is printed on standard output."""
        self._as_json, self._yes = as_json, yes

    def confirm(self, image: str, target: FlashTarget | str, is_checked: bool) -> None:
        """Print what will be overwritten and any warnings, then ask once; click.Abort on a no."""
        click.echo(f"write {image} to {target if isinstance(target, str) else target.description}", err=True)
        if not is_checked:
            click.echo(f"THE IMAGE IS NOT VERIFIED: there is no --sha256, no {image}.sha256, no SHA256SUMS", err=True)
        if isinstance(target, FlashTarget) and target.warning:
            click.echo(target.warning, err=True)
        if not self._yes:
            click.confirm("Go on?", abort=True, err=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        click.echo(f"edgectl: {text}", err=True)

    def ask_passphrase(self) -> str:
        """The passphrase as typed; it is not shown."""
        return str(click.prompt("passphrase of the network", hide_input=True, err=True))

    def wait_for_card(self, text: str) -> None:
        """Wait for Enter; click.Abort at the end of the input."""
        click.echo(f"{text} and press Enter", err=True)
        if not sys.stdin.readline():
            raise click.Abort

    def stages(self) -> AbstractContextManager[Stages]:
        """Progress bars."""
        return progress_bars(self._as_json)

    def card_written(self, written: WrittenCard) -> None:
        """Print one line."""
        if not self._as_json:
            checked = f"image as {written.digest} says" if written.digest else "image not verified"
            details = f": {written.target} is written and read back, {checked}, first boot by {written.format}."
            console().print(Text.assemble((written.device, "bold"), details), soft_wrap=True)
