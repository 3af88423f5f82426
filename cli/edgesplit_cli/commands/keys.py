"""`edgectl keys`: who must sign what, where those keys lie, and how they are changed.

Private keys are made, read and used on the machine where this runs; the controller gets public keys and signatures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from edgesplit.durable import write_durably
from edgesplit.errors import UsageError
from edgesplit_cli.api import Api
from edgesplit_cli.show import console, json_option, print_json, table
from edgesplit_cli.signing import (
    PASSPHRASE_VARIABLE,
    SIGN_VARIABLE,
    ask_secret,
    sign_with_option,
    signatures_for,
    signed_renewal,
)
from edgesplit_controller.key_changes import CHANGEABLE, KeyChange, PublicKey, short
from edgesplit_controller.signers import make_key_file, public_key, signer_uri

NEW, CONTROLLER = "new", "controller"
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
    metavar=f"URI|{NEW}|{CONTROLLER}",
    help=f"The release key: a file or URI, `{NEW}` for one in the folder, `{CONTROLLER}` for one that the controller "
    "makes and keeps.",
)


@click.group()
def keys() -> None:
    """The keys that releases and everything else are signed with."""


@keys.command()
@json_option
@click.pass_obj
def show(data: Path, as_json: bool) -> None:
    """For each role: its keys, where they lie, how many must sign, version and end; what waits and what is due."""
    told = Api.of(data).get("/v1/keys")
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
    api = Api.of(data)
    present = api.get("/v1/keys")
    makes = (0 if root_keys else 3) if count is None else count
    root = [*_chosen(root_keys, present), *_made(folder, makes, protect)]
    if not root:
        raise UsageError("the root needs at least one key: --root-keys N --folder DIR, or --root-key URI")
    least = threshold or min(2, len(root))
    if least > len(root):
        raise UsageError(f"--threshold {least}: there are {len(root)} root keys")
    release = _release_key(release_key, folder, protect)
    role = _role(present, "root")
    ids = {key.keyid for _, key in root}
    if not _here(role) and {one["keyid"] for one in role["keys"]} != ids:
        raise UsageError("the root lies elsewhere already: `edgectl keys rotate root` replaces its keys")
    change = KeyChange(
        tuple(key for _, key in root),
        least,
        release[1] if release else None,
        ("targets",) if release_key == CONTROLLER else (),
    )
    uris = [*(uri for uri, _ in root if uri), *([release[0]] if release else [])]
    done = _carry_out(api, change, uris)
    if folder is not None and done["done"]:
        _keep_root(folder, done["root"])
    if as_json:
        print_json(_outcome(done, folder))
        return
    _tell(done)
    if done["done"] and folder is not None:
        click.echo(
            f"the keys are in {folder}: keep each root key in another place, offline; {least} of {len(root)} must sign"
        )
        if release:
            click.echo(f"releases are signed with `edgectl deploy … --sign-with {release[0]}` (or ${SIGN_VARIABLE})")
        click.echo("backups of the controller made before now still hold the old keys: destroy them")


@keys.command()
@click.argument("roles", nargs=-1, required=True, type=click.Choice(CHANGEABLE), metavar="ROLE...")
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
    """Give roles new keys: root, targets (the release key), snapshot, timestamp, director.

    The controller makes the online ones. For the root name all keys of the next one: those that stay by --root-key, new
    ones by --root-keys N --folder DIR. Keys that are not at hand sign later, by `edgectl keys sign`.
    """
    api = Api.of(data)
    present = api.get("/v1/keys")
    if (root_keys or count or threshold) and "root" not in roles:
        raise UsageError("--root-key, --root-keys and --threshold are of the root: name the role root too")
    if release_key and "targets" not in roles:
        raise UsageError("--release-key is of the role targets: name that too")
    root = [*_chosen(root_keys, present), *_made(folder, count, protect, present)]
    release = _release_key(release_key, folder, protect) if "targets" in roles else None
    anew = [role for role in roles if role not in ("root", "targets")]
    if "root" in roles and not root and not threshold:
        if not _here(_role(present, "root")):
            raise UsageError(
                "the root lies elsewhere: name its next keys with --root-key, or --root-keys N --folder DIR"
            )
        anew.append("root")
    if "targets" in roles and release is None:
        if release_key != CONTROLLER and not _here(_role(present, "targets")):
            raise UsageError(f"the release key lies elsewhere: name the next with --release-key URI|{NEW}|{CONTROLLER}")
        anew.append("targets")
    change = KeyChange(
        tuple(key for _, key in root), threshold or 0, release[1] if release else None, tuple(dict.fromkeys(anew))
    )
    uris = [*sign_with, *(uri for uri, _ in root if uri), *([release[0]] if release else [])]
    done = _carry_out(api, change, list(dict.fromkeys(map(signer_uri, uris))))
    if folder is not None and done["done"]:
        _keep_root(folder, done["root"])
    if as_json:
        print_json(_outcome(done, folder))
        return
    _tell(done)


@keys.command("sign")
@sign_with_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def sign_waiting(data: Path, sign_with: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Add signatures to the change of keys that waits for them."""
    if not sign_with:
        raise UsageError("say with which keys: --sign-with URI")
    api = Api.of(data)
    waiting = api.get("/v1/keys/change")
    for line in waiting["changes"]:
        click.echo(f"  {line}", err=True)
    if not yes:
        click.confirm("Sign this change of the keys?", abort=True, err=True)
    done = api.post("/v1/keys/signatures", signatures_for(waiting, None, sign_with))
    if as_json:
        print_json(_outcome(done, None))
        return
    _tell(done)


@keys.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def drop(data: Path, yes: bool) -> None:
    """Give up the change of keys that waits for signatures."""
    if not yes:
        click.confirm("Give up the change of keys that waits?", abort=True)
    Api.of(data).delete("/v1/keys/change")
    click.echo("given up: the keys are as they were")


@keys.command()
@click.argument("role", default="targets", type=click.Choice(("targets", "root")))
@sign_with_option
@json_option
@click.pass_obj
def renew(data: Path, role: str, sign_with: tuple[str, ...], as_json: bool) -> None:
    """Give the list of releases (ROLE targets), or the root, a later end; the controller does it for keys it holds."""
    api = Api.of(data)
    if role == "root":
        done = _carry_out(api, KeyChange(), list(sign_with))
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


def _carry_out(api: Api, change: KeyChange, uris: Sequence[str]) -> dict[str, Any]:
    """Ask for the change, check what the controller made of it, and sign that with what is at hand."""
    done: dict[str, Any] = api.post("/v1/keys/change", msgspec.to_builtins(change))
    if not done["done"] and uris:
        done = api.post("/v1/keys/signatures", signatures_for(done, change, uris))
    return done


def _chosen(words: Sequence[str], present: Mapping[str, Any]) -> list[tuple[str, PublicKey]]:
    """Root keys that exist: with their URI, or without one where only the id was given."""
    return [_of_present(word, present) or _by_uri(word) for word in words]


def _of_present(word: str, present: Mapping[str, Any]) -> tuple[str, PublicKey] | None:
    found = [one for one in _role(present, "root")["keys"] if len(word) >= 8 and one["keyid"].startswith(word)]
    return ("", PublicKey(found[0]["keyid"], found[0]["public"])) if len(found) == 1 else None


def _by_uri(word: str) -> tuple[str, PublicKey]:
    uri = signer_uri(word)
    return uri, PublicKey.of(public_key(uri, ask_secret))


def _made(
    folder: Path | None, count: int, protect: bool, present: Mapping[str, Any] | None = None
) -> list[tuple[str, PublicKey]]:
    """Root keys in `folder`: made where they are not there yet, so that a command that was cut short goes on."""
    if not count:
        return []
    if folder is None:
        raise UsageError("say where the new root keys shall lie: --folder DIR")
    found = [_file_key(folder / f"root-{number}.pem", protect) for number in range(1, count + 1)]
    known = {one["keyid"] for one in _role(present, "root")["keys"]} if present else set()
    if old := [short(key.keyid) for _, key in found if key.keyid in known]:
        raise UsageError(f"{folder} holds root key {old[0]} already: give an empty folder for new ones")
    return found


def _release_key(word: str | None, folder: Path | None, protect: bool) -> tuple[str, PublicKey] | None:
    """The release key that lies elsewhere; None where it stays, or becomes, the controller's."""
    if word is None or word == CONTROLLER:
        return None
    if word != NEW:
        return _by_uri(word)
    if folder is None:
        raise UsageError("say where the new release key shall lie: --folder DIR")
    return _file_key(folder / "release.pem", protect)


def _file_key(path: Path, protect: bool) -> tuple[str, PublicKey]:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        make_key_file(path, ask_secret(f"passphrase of {path}", new=True) if protect else "")
    return _by_uri(str(path))


def _keep_root(folder: Path, text: str) -> None:
    """Beside the keys lies the root that names them: what a controller restored from an old backup lacks."""
    version = msgspec.json.decode(text.encode())["signed"]["version"]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(folder / f"{version}.root.json", text.encode())


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
        ids = ", ".join(map(short, one["keyids"]))
        out.print(f"  {one['count']} more by {one['whose']}: any of {ids}", soft_wrap=True)
    out.print("`edgectl keys sign --sign-with URI` adds one; `edgectl keys drop` gives it up.")


def _role(present: Mapping[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in present["roles"] if one["role"] == name)
    return found


def _here(role: Mapping[str, Any]) -> bool:
    """Do enough of its keys lie on the controller?"""
    return sum(bool(one["here"]) for one in role["keys"]) >= int(role["threshold"])


def _needed(role: Mapping[str, Any]) -> str:
    return f"{role['threshold']} of {len(role['keys'])}"


def _keys_told(role: Mapping[str, Any]) -> str:
    here = [short(one["keyid"]) for one in role["keys"] if one["here"]]
    elsewhere = [short(one["keyid"]) for one in role["keys"] if not one["here"]]
    told = [f"{', '.join(here)} on the controller"] if here else []
    return "; ".join([*told, *([f"{', '.join(elsewhere)} elsewhere"] if elsewhere else [])])


def _end(role: Mapping[str, Any]) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(role["expires"])) if role["expires"] else "-"
