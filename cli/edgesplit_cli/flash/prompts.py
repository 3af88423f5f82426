"""Prompts of `edgectl flash`: one confirmation, and the passphrase of a wireless network."""

from __future__ import annotations

from pathlib import Path

import click

from edgesplit.errors import UsageError
from edgesplit_provisioning.image.target_checks import FlashTarget
from edgesplit_provisioning.wifi import Wifi, make_wifi

PASSPHRASE_BYTES = 1_000
"""At most this much of a passphrase file is read."""


def confirm(image: str, target: FlashTarget | str, is_checked: bool, yes: bool) -> None:
    """Print what will be overwritten and any warnings, then ask once; click.Abort on a no. With `yes` the question is
    skipped."""
    click.echo(f"write {image} to {target if isinstance(target, str) else target.description}", err=True)
    if not is_checked:
        click.echo(f"NOBODY CHECKED THE IMAGE: there is no --sha256, no {image}.sha256, no SHA256SUMS", err=True)
    if isinstance(target, FlashTarget) and target.warning:
        click.echo(target.warning, err=True)
    if not yes:
        click.confirm("Go on?", abort=True, err=True)


def prompt_network(ssid: str | None, password_file: Path | None, country: str) -> Wifi | None:
    """The wireless network of the options, with its passphrase from the file or a prompt; None without `--wifi`."""
    if ssid is None:
        if password_file is not None:
            raise UsageError("--wifi-password-file goes with --wifi SSID")
        return None
    if not country:
        raise UsageError("--wifi needs --wifi-country: until a radio knows where it is, it may not send")
    return make_wifi(ssid, _passphrase(password_file), country)


def _passphrase(file: Path | None) -> str:
    if file is None:
        return str(click.prompt("passphrase of the network", hide_input=True, err=True))
    try:
        return file.read_bytes()[:PASSPHRASE_BYTES].decode("utf-8", "surrogateescape")
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
