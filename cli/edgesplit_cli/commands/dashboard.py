"""`edgectl dashboard`: opens the dashboard in a browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from edgesplit.controller_client.client import ControllerClient
from edgesplit_cli.output import json_option, print_json
from edgesplit_cli.settings import connect


def login_address(api: ControllerClient) -> tuple[str, float]:
    """An address that signs one browser in, once, and the Unix time until which it does."""
    code = api.post("/v1/session/codes")
    # Browsers do not send the fragment behind #, so the code appears in no log.
    return f"{api.url}/#login={code['code']}", float(code["expires"])


@click.command()
@click.option("--no-open", is_flag=True, help="Print the address only.")
@json_option
@click.pass_obj
def dashboard(data: Path, no_open: bool, as_json: bool) -> None:
    """Open the dashboard in a browser, as the operator that you are here.

    The address logs in one browser, once, within two minutes: keep it secret. The browser must trust the controller's
    CA (ca.pem in the data folder), or warns.
    """
    url, expires = login_address(connect(data))
    if as_json:
        print_json({"url": url, "expires": expires})
        return
    click.echo(url)
    if not no_open and sys.stdout.isatty() and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        click.launch(url)
