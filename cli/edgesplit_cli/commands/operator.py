"""`edgectl operator`: who may ask the controller for what."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from edgesplit.controller_client import credentials
from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import UsageError
from edgesplit_cli.commands.login import expiry
from edgesplit_cli.output import can_write, console, json_option, plain, print_json, table
from edgesplit_cli.quantities import LIFE
from edgesplit_cli.settings import chosen_credentials, connect

ROLES = ("viewer", "operator", "admin")
COLUMNS = ("operator", "role", "groups", "state", "expires", "seen")
out_option = click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Write the credentials to this file (0600). [default: NAME.credentials.json]",
)


@click.group()
def operator() -> None:
    """Let people and programs use the controller: viewers read, operators deploy, admins change keys and operators."""


@operator.command()
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), required=True, help="What they may; each role may what the last may.")
@click.option("--group", "groups", multiple=True, help="Only for devices of this group; may be given several times.")
@click.option("--expires", type=LIFE, default="90d", show_default=True, help="For how long, as in 12h, 90d or 1y.")
@out_option
@click.pass_obj
def add(data: Path, name: str, role: str, groups: tuple[str, ...], expires: float, out: Path | None) -> None:
    """Let NAME use this controller. Hand them the file that is written: `edgectl login FILE` reads it."""
    body = {"name": name, "role": role, "groups": list(groups), "expires_s": int(expires)}
    given = _equip(connect(data), "/v1/operators", body, _file(name, out))
    scope = f" of {', '.join(groups)}" if groups else ""
    click.echo(f"{name} is {role}{scope}{expiry(given.expires)}; their credentials are in {_file(name, out)}")
    click.echo("It is the only copy. Hand it over safely; with it they run `edgectl login FILE`.")


@operator.command("list")
@json_option
@click.pass_obj
def list_operators(data: Path, as_json: bool) -> None:
    """Every operator that you may change."""
    every = connect(data).get("/v1/operators")
    if as_json:
        print_json(every)
        return
    console().print(
        table(("operator", "role", "groups", "state", "expires", "seen"), [_line(one) for one in plain(every)])
    )


@operator.command()
@click.argument("name", required=False)
@click.option("--expires", type=LIFE, default=None, help="For how long from now. [default: as it was]")
@out_option
@click.pass_obj
def rotate(data: Path, name: str | None, expires: float | None, out: Path | None) -> None:
    """Give NAME a new token and certificate. The old ones, and their sessions, end now.

    Without NAME: your own, in place of the credentials that you use here; you last no longer for it.
    """
    mine = chosen_credentials(data)
    if name is None and (mine is None or expires is not None):
        raise UsageError(
            "the data folder's owner gets a new token by deleting operator.token there and starting again"
            if mine is None
            else "only an admin says for how long, with your name before --expires"
        )
    file = out or mine if name is None else _file(name, out)
    assert file is not None
    path = "/v1/operator/token" if name is None else f"/v1/operators/{quote(name, safe='')}/rotate"
    given = _equip(connect(data), path, {"expires_s": int(expires or 0)}, file)
    click.echo(f"{given.operator}'s old credentials are void{expiry(given.expires)}; the new ones are in {file}")


@operator.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def revoke(data: Path, name: str, yes: bool) -> None:
    """Take NAME's right away: token, certificate and sessions end now."""
    if not yes:
        click.confirm(f"Revoke the operator {name}?", abort=True)
    connect(data).delete(f"/v1/operators/{quote(name, safe='')}")
    click.echo(f"{name} is revoked: nothing of theirs opens anything from now on")


def _equip(api: ControllerClient, path: str, body: dict[str, Any], out: Path) -> credentials.Credentials:
    """Ask for it, and keep what an operator is told once."""
    can_write(out)  # before, for it is shown once
    key, csr = credentials.request()
    given = credentials.made(api.post(path, {**body, "csr_pem": csr}), key)
    credentials.write(given, out)
    return given


def _file(name: str, out: Path | None) -> Path:
    return out or Path(f"{name}.credentials.json")


def _line(one: dict[str, Any]) -> tuple[str, ...]:
    groups = ", ".join(one["groups"]) or "all"
    return one["name"], one["role"], groups, one["state"], _day(one["expires"]), _day(one["last_seen"])


def _day(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at)) if at else "never"
