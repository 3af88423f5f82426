"""`edgectl keys`: which keys must sign which metadata, where they are stored, and how they are replaced.

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
from edgesplit_cli.options.types import NEW_FOLDER
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
SHOWN_DIGITS = 8
"""Digits of a key id that are displayed."""
folder_option = click.option(
    "--folder",
    type=NEW_FOLDER,
    help="Where new keys are made: root-1.pem, … and release.pem (0600). Keys that it holds already are used.",
)
protect_option = click.option(
    "--protect", is_flag=True, help=f"Protect new key files by a passphrase (asked for, or ${PASSPHRASE_VARIABLE})."
)
root_key_option = click.option(
    "--root-key", "root_keys", multiple=True, metavar="URI|KEYID",
    help="A root key that exists: a file, a securesystemslib URI, or the id of one of the present root's.",
)  # fmt: skip
release_key_option = click.option(
    "--release-key",
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
    """For each role: its keys, where they are stored, how many must sign, version and expiry; pending changes and
    notices."""
    status = connect(data).get("/v1/keys")
    if as_json:
        print_json(status)
        return
    out = console()
    rows = [
        (role["role"], _threshold_text(role), _keys_text(role), str(role["version"] or "-"), _expiry_text(role))
        for role in status["roles"]
    ]
    out.print(table(("role", "must sign", "keys", ">version", "until"), rows))
    if pending := status["pending"]:
        _print_pending(pending)
    for notice in status["notices"]:
        out.print(Text.assemble(("! ", "yellow"), notice), soft_wrap=True)


@keys.command()
@folder_option
@click.option("--root-keys", "count", type=click.IntRange(0, 16), help="How many to make. [default: 3]")
@click.option("--threshold", type=click.IntRange(1, 16), help="How many of them must sign. [default: 2]")
@root_key_option
@release_key_option
@protect_option
@json_option
@click.pass_obj
def init(
    data: Path, folder: Path | None, count: int | None, threshold: int | None, root_keys: tuple[str, ...],
    release_key: str | None, protect: bool, as_json: bool,
) -> None:  # fmt: skip
    """Move the root, and if asked for the release key, away from the controller. Enrolled devices follow.

    Makes root keys here, has the controller's present root key sign the root that names them, publishes it, and has the
    controller destroy its own. May be repeated until it reports that it is done.
    """
    from edgesplit_cli.operator_keys import (
        CONTROLLER,
        apply_change,
        existing_keys,
        external_release_key,
        is_on_controller,
        make_root_keys,
        role_of,
    )
    from edgesplit_controller.tuf.key_change import KeyChange

    api = connect(data)
    present = api.get("/v1/keys")
    new_count = (0 if root_keys else 3) if count is None else count
    total = len(root_keys) + new_count
    if not total:
        raise UsageError("the root needs at least one key: --root-keys N --folder DIR, or --root-key URI")
    needed = threshold or min(2, total)
    if needed > total:
        raise UsageError(f"--threshold {needed}: there are {total} root keys")
    role, moved = (
        role_of(present, "root"),
        "the root keys are not on the controller: `edgectl keys rotate root` replaces them",
    )
    if new_count and not is_on_controller(role) and not (folder and (folder / "root-1.pem").exists()):
        raise UsageError(moved)  # before a key is made in vain
    root = [*existing_keys(root_keys, present), *make_root_keys(folder, new_count, protect)]
    if not is_on_controller(role) and {present_key["keyid"] for present_key in role["keys"]} != {
        key.keyid for _, key in root
    }:
        raise UsageError(moved)
    release = external_release_key(release_key, folder, protect)
    change = KeyChange(
        tuple(key for _, key in root), needed, release[1] if release else None,
        ("targets",) if release_key == CONTROLLER else (),
    )  # fmt: skip
    uris = [*(uri for uri, _ in root if uri), *([release[0]] if release else [])]
    result = apply_change(api, change, uris)
    _finish(result, folder, as_json)
    if result["done"] and folder is not None and not as_json:
        click.echo(
            f"the keys are in {folder}: keep each root key in another place, offline; {needed} of {len(root)} must sign"
        )
        if release:
            click.echo(f"releases are signed with `edgectl deploy … --sign-with {release[0]}` (or ${SIGN_VARIABLE})")
        click.echo("backups of the controller made before now still hold the old keys: destroy them")


@keys.command()
@click.argument("roles", nargs=-1, required=True, metavar="ROLE...")
@sign_with_option
@folder_option
@click.option("--root-keys", "count", type=click.IntRange(0, 16), default=0, help="How many new root keys to make.")
@click.option("--threshold", type=click.IntRange(1, 16), help="How many root keys must sign. [default: as now]")
@root_key_option
@release_key_option
@protect_option
@json_option
@click.pass_obj
def rotate(
    data: Path, roles: tuple[str, ...], sign_with: tuple[str, ...], folder: Path | None, count: int,
    threshold: int | None, root_keys: tuple[str, ...], release_key: str | None, protect: bool, as_json: bool,
) -> None:  # fmt: skip
    """Give roles new keys: root, targets (the release key), snapshot, timestamp, director, planner.

    The controller makes the online ones. For the root name all keys of the next one: those that stay by --root-key, new
    ones by --root-keys N --folder DIR. Keys that are not at hand sign later, by `edgectl keys sign`.
    """
    from edgesplit_cli.operator_keys import (
        CONTROLLER,
        NEW,
        apply_change,
        existing_keys,
        external_release_key,
        is_on_controller,
        make_root_keys,
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
        if not is_on_controller(role_of(present, "root")):
            raise UsageError(
                "the root keys are not on the controller: name the next ones with --root-key, or --root-keys N"
                " --folder DIR"
            )
        anew.append("root")
    if "targets" in roles and release_key in (None, CONTROLLER):
        if release_key != CONTROLLER and not is_on_controller(role_of(present, "targets")):
            raise UsageError(
                f"the release key is not on the controller: name the next one with --release-key URI|{NEW}|{CONTROLLER}"
            )
        anew.append("targets")
    root = [*existing_keys(root_keys, present), *make_root_keys(folder, count, protect, present)]
    release = external_release_key(release_key, folder, protect)
    change = KeyChange(
        tuple(key for _, key in root), threshold or 0, release[1] if release else None, tuple(dict.fromkeys(anew))
    )
    uris = [*sign_with, *(uri for uri, _ in root if uri), *([release[0]] if release else [])]
    result = apply_change(api, change, list(dict.fromkeys(map(signer_uri, uris))))
    _finish(result, folder, as_json)


@keys.command("sign")
@sign_with_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def sign_waiting(data: Path, sign_with: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Add signatures to the pending change of keys."""
    from edgesplit_cli.signing import signatures_for

    if not sign_with:
        raise UsageError("name the keys to sign with: --sign-with URI")
    api = connect(data)
    pending = api.get("/v1/keys/change")
    for line in pending["changes"]:
        click.echo(f"  {line}", err=True)
    if not yes:
        click.confirm("Sign this change of the keys?", abort=True, err=True)
    result = api.post("/v1/keys/signatures", signatures_for(pending, None, sign_with))
    _finish(result, None, as_json)


@keys.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def drop(data: Path, yes: bool) -> None:
    """Cancel the pending change of keys."""
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
    """Extend the expiry of the list of releases (ROLE targets), or of the root; the controller does it itself for keys
    it holds."""
    from edgesplit_cli.operator_keys import apply_change
    from edgesplit_cli.signing import sign_renewal
    from edgesplit_controller.tuf.key_change import KeyChange

    api = connect(data)
    if role == "root":
        result = apply_change(api, KeyChange(), list(sign_with))
    else:
        result = api.post("/v1/keys/renew")
        if not result["done"]:
            sign_with = sign_with or tuple(os.environ.get(SIGN_VARIABLE, "").split())
            if not sign_with:
                raise UsageError("the release key is not on the controller: give its file or URI with --sign-with URI")
            result = api.post("/v1/keys/renew/signed", {"next_targets": sign_renewal(result, sign_with)})
    if as_json:
        print_json(_to_dict(result, None))
        return
    if result["done"]:
        click.echo(f"{role}: renewed")
    else:
        _print_result(result)


def _finish(result: dict[str, Any], folder: Path | None, as_json: bool) -> None:
    """Save the root now in force beside the operator's keys, and print the outcome of the change."""
    from edgesplit_cli.operator_keys import save_root

    if folder is not None and result["done"]:
        save_root(folder, result["root"])
    if as_json:
        print_json(_to_dict(result, folder))
    else:
        _print_result(result)


def _to_dict(result: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """The outcome of a change as JSON-serialisable values."""
    if result["done"]:
        return {"done": True, "folder": str(folder) if folder else None}
    return {"done": False, "changes": result["changes"], "missing": result["missing"]}


def _print_result(result: Mapping[str, Any]) -> None:
    if result["done"]:
        click.echo("done: the new keys are in force, and devices adopt them")
    else:
        _print_pending(result)


def _print_pending(pending: Mapping[str, Any]) -> None:
    out = console()
    out.print("a change waits for signatures:", *pending["changes"], sep="\n  ", soft_wrap=True)
    for missing in pending["missing"]:
        ids = ", ".join(keyid[:SHOWN_DIGITS] for keyid in missing["keyids"])
        out.print(f"  {missing['count']} more by {missing['whose']}: any of {ids}", soft_wrap=True)
    out.print("`edgectl keys sign --sign-with URI` adds one; `edgectl keys drop` gives it up.")


def _threshold_text(role: Mapping[str, Any]) -> str:
    return f"{role['threshold']} of {len(role['keys'])}"


def _keys_text(role: Mapping[str, Any]) -> str:
    here = [key["keyid"][:SHOWN_DIGITS] for key in role["keys"] if key["on_controller"]]
    elsewhere = [key["keyid"][:SHOWN_DIGITS] for key in role["keys"] if not key["on_controller"]]
    parts = [f"{', '.join(here)} on the controller"] if here else []
    return "; ".join([*parts, *([f"{', '.join(elsewhere)} elsewhere"] if elsewhere else [])])


def _expiry_text(role: Mapping[str, Any]) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(role["expires"])) if role["expires"] else "-"
