"""`edgectl login`, `logout`, `whoami`: which operator this is, for a controller that runs elsewhere."""

from __future__ import annotations

import time
from pathlib import Path

import click

from edgesplit.controller_client import credentials
from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.settings import saved_credentials
from edgesplit_cli.output import json_option, print_json
from edgesplit_cli.settings import connect


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def login(file: Path) -> None:
    """Use the credentials in FILE from now on, wherever no --data or --credentials says otherwise."""
    held = credentials.read(file)
    you = ControllerClient.by(held).get("/v1/session")
    kept = saved_credentials()
    credentials.write(held, kept)
    click.echo(f"you are {_described(you)} at {held.url}{expiry(held.expires)}; kept in {kept}")


@click.command()
def logout() -> None:
    """Forget the credentials that `edgectl login` kept. They stay good: an admin revokes them."""
    kept = saved_credentials()
    there = kept.exists()
    kept.unlink(missing_ok=True)
    click.echo(f"{kept} is deleted" if there else "nobody is logged in here")


@click.command()
@json_option
@click.pass_obj
def whoami(data: Path, as_json: bool) -> None:
    """As whom you use which controller."""
    api = connect(data)
    you = api.get("/v1/session")
    if as_json:
        print_json({"url": api.url, **{name: you[name] for name in ("operator", "role", "groups")}})
        return
    click.echo(f"you are {_described(you)} at {api.url}")


def expiry(expires: float | None) -> str:
    """Until when, for people; nothing for what does not end."""
    return f" until {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(expires))}" if expires else ""


def _described(you: dict[str, object]) -> str:
    groups = you["groups"]
    scope = f" of {', '.join(groups)}" if isinstance(groups, list) else ""
    return f"{you['operator']} ({you['role']}{scope})"
