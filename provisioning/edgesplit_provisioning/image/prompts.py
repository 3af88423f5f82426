"""What `edgectl flash` asks its user: whether to go on, once, and the passphrase of a network."""

from __future__ import annotations

from pathlib import Path

import click

from edgesplit.errors import UsageError
from edgesplit_provisioning.image.target_checks import Target
from edgesplit_provisioning.image.wifi import Wifi, wifi

PASSPHRASE_BYTES = 1_000


def confirm(image: str, to: Target | str, is_checked: bool, yes: bool) -> None:
    """Everything that may be regretted, and one question; click.Abort for a no. `yes`: it is said and not asked."""
    click.echo(f"write {image} to {to if isinstance(to, str) else to.described}", err=True)
    if not is_checked:
        click.echo(f"NOBODY CHECKED THE IMAGE: there is no --sha256, no {image}.sha256, no SHA256SUMS", err=True)
    if isinstance(to, Target) and to.warning:
        click.echo(to.warning, err=True)
    if not yes:
        click.confirm("Go on?", abort=True, err=True)


def network(ssid: str | None, password_file: Path | None, country: str) -> Wifi | None:
    """The wireless network that was named, with its passphrase from the file or asked for."""
    if ssid is None:
        if password_file is not None:
            raise UsageError("--wifi-password-file goes with --wifi SSID")
        return None
    if not country:
        raise UsageError("--wifi needs --wifi-country: until a radio knows where it is, it may not send")
    return wifi(ssid, _passphrase(password_file), country)


def _passphrase(file: Path | None) -> str:
    if file is None:
        return str(click.prompt("passphrase of the network", hide_input=True, err=True))
    try:
        return file.read_bytes()[:PASSPHRASE_BYTES].decode("utf-8", "surrogateescape")
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
