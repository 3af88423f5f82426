"""`edgectl dashboard`: let a browser in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from edgesplit_cli.output import json_option, print_json
from edgesplit_cli.settings import connect


@click.command()
@click.option("--no-open", is_flag=True, help="Print the address only.")
@json_option
@click.pass_obj
def dashboard(data: Path, no_open: bool, as_json: bool) -> None:
    """Open the dashboard in a browser, as the operator that you are here.

    The address lets in one browser, once, within two minutes: show it to nobody. The browser must believe the
    controller's authority (ca.pem in the data folder), or asks.
    """
    api = connect(data)
    made = api.post("/v1/session/codes")
    url = f"{api.url}/#login={made['code']}"  # behind the #: browsers send it nowhere, and it is in no log
    if as_json:
        print_json({"url": url, "expires": made["expires"]})
        return
    click.echo(url)
    if not no_open and sys.stdout.isatty() and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        click.launch(url)
