"""`edgectl keys`: who must sign what, where those keys lie, and how they are changed.

Private keys are made, read and used on the machine where this runs; the controller gets public keys and signatures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from edgesplit.errors import UsageError
from edgesplit_cli.output import console, json_option, print_json, table
from edgesplit_cli.settings import PASSPHRASE_VARIABLE, PIN_VARIABLE, SIGN_VARIABLE, connect

sign_with_option = click.option(
    "--sign-with",
    "sign_with",
    multiple=True,
    metavar="URI",
    help=f"The key to sign with: a file or any securesystemslib URI (hsm:, gcpkms:, awskms:, …); several times for "
    f"several keys. A file's passphrase is asked for, or ${PASSPHRASE_VARIABLE}; a token's PIN, or ${PIN_VARIABLE}.",
)
SHOWN = 8
"""Digits of a key id that people compare."""
folder_option = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Where new keys are made: root-1.pem, … and release.pem (0600). Keys that it holds already are used.",
)
protect_option = click.option(
    "--protect", is_flag=True, help=f"Protect new key files by a passphrase (asked for, or ${PASSPHRASE_VARIABLE})."
)
root_key_option = click.option(
    "--root-key",
    "root_keys",
    multiple=True,
    metavar="URI|KEYID",
    help="A root key that exists: a file, a securesystemslib URI, or the id of one of the present root's.",
)
release_key_option = click.option(
    "--release-key",
    default=None,
    metavar="URI|new|controller",
    help="The release key: a file or URI, `new` for one in the folder, `controller` for one that the controller makes "
    "and keeps.",
)


@click.group()
def keys() -> None:
    """The keys that releases and everything else are signed with."""


@keys.command()
@json_option
@click.pass_obj
def show(data: Path, as_json: bool) -> None:
    """For each role: its keys, where they lie, how many must sign, version and end; what waits and what is due."""
    told = connect(data).get("/v1/keys")
    if as_json:
        print_json(told)
        return
    out = console()
    rows = [
        (one["role"], _needed(one), _keys_told(one), str(one["version"] or "-"), _end(one)) for one in told["roles"]
    ]
    out.print(table(("role", "must sign", "keys", ">version", "until"), rows))
    if pending := told["pending"]:
        _tell_waiting(pending)
    for notice in told["notices"]:
        out.print(Text.assemble(("! ", "yellow"), notice), soft_wrap=True)


@keys.command()
@folder_option
@click.option("--root-keys", "count", type=click.IntRange(0, 16), default=None, help="How many to make. [default: 3]")
@click.option("--threshold", type=click.IntRange(1, 16), default=None, help="How many of them must sign. [default: 2]")
@root_key_option
@release_key_option
@protect_option
@json_option
@click.pass_obj
def init(
    data: Path,
    folder: Path | None,
    count: int | None,
    threshold: int | None,
    root_keys: tuple[str, ...],
    release_key: str | None,
    protect: bool,
    as_json: bool,
) -> None:
    """Move the root, and if asked for the release key, away from the controller. Enrolled devices follow.

    Makes root keys here, has the controller's present root key sign the root that names them, publishes it, and has the
    controller destroy its own. May be repeated until it says that it is done.
    """
    from edgesplit_cli.operator_keys import (
        CONTROLLER,
        carry_out,
        chosen_keys,
        lies_here,
        made_keys,
        release_key_of,
        role_of,
    )
    from edgesplit_controller.tuf.key_change import KeyChange

    api = connect(data)
    present = api.get("/v1/keys")
    makes = (0 if root_keys else 3) if count is None else count
    total = len(root_keys) + makes
    if not total:
        raise UsageError("the root needs at least one key: --root-keys N --folder DIR, or --root-key URI")
    least = threshold or min(2, total)
    if least > total:
        raise UsageError(f"--threshold {least}: there are {total} root keys")
    role, moved = (
        role_of(present, "root"),
        "the root lies elsewhere already: `edgectl keys rotate root` replaces its keys",
    )
    if makes and not lies_here(role) and not (folder and (folder / "root-1.pem").exists()):
        raise UsageError(moved)  # before a key is made for nothing
    root = [*chosen_keys(root_keys, present), *made_keys(folder, makes, protect)]
    if not lies_here(role) and {one["keyid"] for one in role["keys"]} != {key.keyid for _, key in root}:
        raise UsageError(moved)
    release = release_key_of(release_key, folder, protect)
    change = KeyChange(
        tuple(key for _, key in root),
        least,
        release[1] if release else None,
        ("targets",) if release_key == CONTROLLER else (),
    )
    uris = [*(uri for uri, _ in root if uri), *([release[0]] if release else [])]
    done = carry_out(api, change, uris)
    _finish(done, folder, as_json)
    if done["done"] and folder is not None and not as_json:
        click.echo(
            f"the keys are in {folder}: keep each root key in another place, offline; {least} of {len(root)} must sign"
        )
        if release:
            click.echo(f"releases are signed with `edgectl deploy … --sign-with {release[0]}` (or ${SIGN_VARIABLE})")
        click.echo("backups of the controller made before now still hold the old keys: destroy them")


@keys.command()
@click.argument("roles", nargs=-1, required=True, metavar="ROLE...")
@sign_with_option
@folder_option
@click.option("--root-keys", "count", type=click.IntRange(0, 16), default=0, help="How many new root keys to make.")
@click.option(
    "--threshold", type=click.IntRange(1, 16), default=None, help="How many root keys must sign. [default: as now]"
)
@root_key_option
@release_key_option
@protect_option
@json_option
@click.pass_obj
def rotate(
    data: Path,
    roles: tuple[str, ...],
    sign_with: tuple[str, ...],
    folder: Path | None,
    count: int,
    threshold: int | None,
    root_keys: tuple[str, ...],
    release_key: str | None,
    protect: bool,
    as_json: bool,
) -> None:
    """Give roles new keys: root, targets (the release key), snapshot, timestamp, director, planner.

    The controller makes the online ones. For the root name all keys of the next one: those that stay by --root-key, new
    ones by --root-keys N --folder DIR. Keys that are not at hand sign later, by `edgectl keys sign`.
    """
    from edgesplit_cli.operator_keys import (
        CONTROLLER,
        NEW,
        carry_out,
        chosen_keys,
        lies_here,
        made_keys,
        release_key_of,
        role_of,
    )
    from edgesplit_controller.tuf.key_change import KeyChange
    from edgesplit_controller.tuf.signers import signer_uri

    api = connect(data)
    present = api.get("/v1/keys")
    if (root_keys or count or threshold) and "root" not in roles:
        raise UsageError("--root-key, --root-keys and --threshold are of the root: name the role root too")
    if release_key and "targets" not in roles:
        raise UsageError("--release-key is of the role targets: name that too")
    anew = [role for role in roles if role not in ("root", "targets")]
    if "root" in roles and not root_keys and not count and not threshold:
        if not lies_here(role_of(present, "root")):
            raise UsageError(
                "the root lies elsewhere: name its next keys with --root-key, or --root-keys N --folder DIR"
            )
        anew.append("root")
    if "targets" in roles and release_key in (None, CONTROLLER):
        if release_key != CONTROLLER and not lies_here(role_of(present, "targets")):
            raise UsageError(f"the release key lies elsewhere: name the next with --release-key URI|{NEW}|{CONTROLLER}")
        anew.append("targets")
    root = [*chosen_keys(root_keys, present), *made_keys(folder, count, protect, present)]
    release = release_key_of(release_key, folder, protect)
    change = KeyChange(
        tuple(key for _, key in root), threshold or 0, release[1] if release else None, tuple(dict.fromkeys(anew))
    )
    uris = [*sign_with, *(uri for uri, _ in root if uri), *([release[0]] if release else [])]
    done = carry_out(api, change, list(dict.fromkeys(map(signer_uri, uris))))
    _finish(done, folder, as_json)


@keys.command("sign")
@sign_with_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def sign_waiting(data: Path, sign_with: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Add signatures to the change of keys that waits for them."""
    from edgesplit_cli.signing import signatures_for

    if not sign_with:
        raise UsageError("say with which keys: --sign-with URI")
    api = connect(data)
    waiting = api.get("/v1/keys/change")
    for line in waiting["changes"]:
        click.echo(f"  {line}", err=True)
    if not yes:
        click.confirm("Sign this change of the keys?", abort=True, err=True)
    done = api.post("/v1/keys/signatures", signatures_for(waiting, None, sign_with))
    _finish(done, None, as_json)


@keys.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def drop(data: Path, yes: bool) -> None:
    """Give up the change of keys that waits for signatures."""
    if not yes:
        click.confirm("Give up the change of keys that waits?", abort=True)
    connect(data).delete("/v1/keys/change")
    click.echo("given up: the keys are as they were")


@keys.command()
@click.argument("role", default="targets", type=click.Choice(("targets", "root")))
@sign_with_option
@json_option
@click.pass_obj
def renew(data: Path, role: str, sign_with: tuple[str, ...], as_json: bool) -> None:
    """Give the list of releases (ROLE targets), or the root, a later end; the controller does it for keys it holds."""
    from edgesplit_cli.operator_keys import carry_out
    from edgesplit_cli.signing import signed_renewal
    from edgesplit_controller.tuf.key_change import KeyChange

    api = connect(data)
    if role == "root":
        done = carry_out(api, KeyChange(), list(sign_with))
    else:
        done = api.post("/v1/keys/renew")
        if not done["done"]:
            sign_with = sign_with or tuple(os.environ.get(SIGN_VARIABLE, "").split())
            if not sign_with:
                raise UsageError("the release key does not lie on the controller: say where with --sign-with URI")
            done = api.post("/v1/keys/renewed", {"next_targets": signed_renewal(done, sign_with)})
    if as_json:
        print_json(_outcome(done, None))
        return
    if done["done"]:
        click.echo(f"{role}: renewed")
    else:
        _tell(done)


def _finish(done: dict[str, Any], folder: Path | None, as_json: bool) -> None:
    """Keep the root that counts now beside the operator's keys, and tell what has come of the change."""
    from edgesplit_cli.operator_keys import keep_root

    if folder is not None and done["done"]:
        keep_root(folder, done["root"])
    if as_json:
        print_json(_outcome(done, folder))
    else:
        _tell(done)


def _outcome(done: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """What `--json` says of a change."""
    if done["done"]:
        return {"done": True, "folder": str(folder) if folder else None}
    return {"done": False, "changes": done["changes"], "missing": done["missing"]}


def _tell(done: Mapping[str, Any]) -> None:
    if done["done"]:
        click.echo("done: the new keys count, and devices follow")
    else:
        _tell_waiting(done)


def _tell_waiting(pending: Mapping[str, Any]) -> None:
    out = console()
    out.print("a change waits for signatures:", *pending["changes"], sep="\n  ", soft_wrap=True)
    for one in pending["missing"]:
        ids = ", ".join(keyid[:SHOWN] for keyid in one["keyids"])
        out.print(f"  {one['count']} more by {one['whose']}: any of {ids}", soft_wrap=True)
    out.print("`edgectl keys sign --sign-with URI` adds one; `edgectl keys drop` gives it up.")


def _needed(role: Mapping[str, Any]) -> str:
    return f"{role['threshold']} of {len(role['keys'])}"


def _keys_told(role: Mapping[str, Any]) -> str:
    here = [one["keyid"][:SHOWN] for one in role["keys"] if one["here"]]
    elsewhere = [one["keyid"][:SHOWN] for one in role["keys"] if not one["here"]]
    told = [f"{', '.join(here)} on the controller"] if here else []
    return "; ".join([*told, *([f"{', '.join(elsewhere)} elsewhere"] if elsewhere else [])])


def _end(role: Mapping[str, Any]) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(role["expires"])) if role["expires"] else "-"
