"""`edgectl login`, `logout`, `whoami`: the operator's credentials for a controller on another machine."""

from __future__ import annotations

import time
from pathlib import Path

import click

from edgesplit.controller_client import credentials
from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.settings import saved_credentials
from edgesplit_cli.options.types import FILE
from edgesplit_cli.output import json_option, print_result
from edgesplit_cli.settings import connect


@click.command()
@click.argument("file", type=FILE)
def login(file: Path) -> None:
    """Use the credentials in FILE from now on, unless --data or --credentials names others."""
    login_data = credentials.read(file)
    session = ControllerClient.from_credentials(login_data).get("/v1/session")
    saved = saved_credentials()
    credentials.write(login_data, saved)
    click.echo(
        f"you are {_operator_text(session)} at {login_data.url}{expiry_text(login_data.expires)}; kept in {saved}"
    )


@click.command()
def logout() -> None:
    """Delete the credentials that `edgectl login` saved. They stay valid until an admin revokes them."""
    saved = saved_credentials()
    existed = saved.exists()
    saved.unlink(missing_ok=True)
    click.echo(f"{saved} is deleted" if existed else "not logged in: there are no saved credentials")


@click.command()
@json_option
@click.pass_obj
def whoami(data: Path, as_json: bool) -> None:
    """Show the operator and the controller of the credentials in use."""
    api = connect(data)
    session = api.get("/v1/session")
    result = {"url": api.url, **{name: session[name] for name in ("operator", "role", "groups")}}
    print_result(result, as_json, f"you are {_operator_text(session)} at {api.url}")


def expiry_text(expires: float | None) -> str:
    """The expiry as text; empty where there is none."""
    return f" until {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(expires))}" if expires else ""


def _operator_text(session: dict[str, object]) -> str:
    groups = session["groups"]
    scope = f" of {', '.join(groups)}" if isinstance(groups, list) else ""
    return f"{session['operator']} ({session['role']}{scope})"
