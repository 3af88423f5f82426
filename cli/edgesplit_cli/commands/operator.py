"""`edgectl operator`: adds, lists, rotates and revokes operators of a controller."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from edgesplit.controller_client import credentials
from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import UsageError
from edgesplit.terminal_text import printable
from edgesplit_cli.commands.login import expiry_text
from edgesplit_cli.options.types import DURATION, NEW_FILE
from edgesplit_cli.output import check_writable, json_option, print_result, table
from edgesplit_cli.settings import chosen_credentials, connect, segment

ROLES = ("viewer", "operator", "admin")
COLUMNS = ("operator", "role", "groups", "state", "expires", "seen")
out_option = click.option(
    "--out", type=NEW_FILE, help="Write the credentials to this file (0600). [default: NAME.credentials.json]"
)


@click.group()
def operator() -> None:
    """Let people and programs use the controller: viewers read, operators deploy, admins change keys and operators."""


@operator.command()
@click.argument("name")
@click.option(
    "--role", type=click.Choice(ROLES), required=True, help="Role; each includes the rights of the one before."
)
@click.option("--group", "groups", multiple=True, help="Only for devices of this group; may be given several times.")
@click.option(
    "--expires", type=DURATION, default="90d", show_default=True,
    help="How long the credentials are valid, as in 12h, 90d or 1y.",
)  # fmt: skip
@out_option
@click.pass_obj
def add(data: Path, name: str, role: str, groups: tuple[str, ...], expires: float, out: Path | None) -> None:
    """Let NAME use this controller. Give them the file that is written: `edgectl login FILE` reads it."""
    body = {"name": name, "role": role, "groups": list(groups), "expires_s": int(expires)}
    issued = _request_credentials(connect(data), "/v1/operators", body, _credentials_file(name, out))
    scope = f" of {', '.join(groups)}" if groups else ""
    click.echo(
        f"{name} is {role}{scope}{expiry_text(issued.expires)}; their credentials are in {_credentials_file(name, out)}"
    )
    click.echo("It is the only copy. Hand it over safely; `edgectl login FILE` then uses it.")


@operator.command("list")
@json_option
@click.pass_obj
def list_operators(data: Path, as_json: bool) -> None:
    """Every operator that you may change."""
    operators = connect(data).get("/v1/operators")
    print_result(operators, as_json, table(COLUMNS, [_row(entry) for entry in printable(operators)]))


@operator.command()
@click.argument("name", required=False)
@click.option("--expires", type=DURATION, help="For how long from now. [default: as it was]")
@out_option
@click.pass_obj
def rotate(data: Path, name: str | None, expires: float | None, out: Path | None) -> None:
    """Give NAME a new token and certificate. The old ones, and their sessions, end now.

    Without NAME: your own, in place of the credentials that you use here; their expiry is not extended.
    """
    own_file = chosen_credentials(data)
    if name is None and (own_file is None or expires is not None):
        raise UsageError(
            "the data folder's owner gets a new token by deleting operator.token there and starting again"
            if own_file is None
            else "only an admin says for how long, with your name before --expires"
        )
    file = out or own_file if name is None else _credentials_file(name, out)
    assert file is not None
    path = "/v1/operator/token" if name is None else f"/v1/operators/{segment(name)}/rotate"
    issued = _request_credentials(connect(data), path, {"expires_s": int(expires or 0)}, file)
    click.echo(f"{issued.operator}'s old credentials are void{expiry_text(issued.expires)}; the new ones are in {file}")


@operator.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def revoke(data: Path, name: str, yes: bool) -> None:
    """Revoke NAME: token, certificate and sessions end now."""
    if not yes:
        click.confirm(f"Revoke the operator {name}?", abort=True)
    connect(data).delete(f"/v1/operators/{segment(name)}")
    click.echo(f"{name} is revoked: its credentials are not accepted any more")


def _request_credentials(api: ControllerClient, path: str, body: dict[str, Any], out: Path) -> credentials.Credentials:
    """Request credentials, which the controller returns once, and write them to `out`."""
    check_writable(out)  # before the request: the controller returns the credentials once
    key, csr = credentials.new_certificate_request()
    issued = credentials.from_reply(api.post(path, {**body, "csr_pem": csr}), key)
    credentials.write(issued, out)
    return issued


def _credentials_file(name: str, out: Path | None) -> Path:
    return out or Path(f"{name}.credentials.json")


def _row(operator: dict[str, Any]) -> tuple[str, ...]:
    times = _day_text(operator["expires"]), _day_text(operator["last_seen"])
    return (operator["name"], operator["role"], ", ".join(operator["groups"]) or "all", operator["state"], *times)


def _day_text(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at)) if at else "never"
