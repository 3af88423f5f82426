"""Keys on the operator's machine: files made or found, signers named by URI, and a change carried through.

The controller is told public keys and signatures, never a private key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgesplit.atomic_files import write_durably
from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import UsageError
from edgesplit_cli.signing import ask_secret, signatures_for
from edgesplit_controller.tuf.key_change import KeyChange, PublicKey, short
from edgesplit_controller.tuf.signers import make_key_file, public_key, signer_uri

NEW, CONTROLLER = "new", "controller"
"""For a release key: one that is made in the operator's folder; one that the controller makes and keeps."""


def carry_out(api: ControllerClient, change: KeyChange, uris: Sequence[str]) -> dict[str, Any]:
    """Ask for the change, check what the controller made of it, and sign that with what is at hand."""
    done: dict[str, Any] = api.post("/v1/keys/change", msgspec.to_builtins(change))
    if not done["done"] and uris:
        done = api.post("/v1/keys/signatures", signatures_for(done, change, uris))
    return done


def chosen_keys(words: Sequence[str], present: Mapping[str, Any]) -> list[tuple[str, PublicKey]]:
    """Root keys that exist: with their URI, or without one where only the id was given."""
    return [_of_present(word, present) or _by_uri(word) for word in words]


def _of_present(word: str, present: Mapping[str, Any]) -> tuple[str, PublicKey] | None:
    found = [one for one in role_of(present, "root")["keys"] if len(word) >= 8 and one["keyid"].startswith(word)]
    return ("", PublicKey(found[0]["keyid"], found[0]["public"])) if len(found) == 1 else None


def _by_uri(word: str) -> tuple[str, PublicKey]:
    uri = signer_uri(word)
    return uri, PublicKey.of(public_key(uri, ask_secret))


def made_keys(
    folder: Path | None, count: int, protect: bool, present: Mapping[str, Any] | None = None
) -> list[tuple[str, PublicKey]]:
    """Root keys in `folder`: made where they are not there yet, so that a command that was cut short goes on."""
    if not count:
        return []
    if folder is None:
        raise UsageError("say where the new root keys shall lie: --folder DIR")
    found = [_file_key(folder / f"root-{number}.pem", protect) for number in range(1, count + 1)]
    known = {one["keyid"] for one in role_of(present, "root")["keys"]} if present else set()
    if old := [short(key.keyid) for _, key in found if key.keyid in known]:
        raise UsageError(f"{folder} holds root key {old[0]} already: give an empty folder for new ones")
    return found


def release_key_of(word: str | None, folder: Path | None, protect: bool) -> tuple[str, PublicKey] | None:
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


def keep_root(folder: Path, text: str) -> None:
    """Beside the keys lies the root that names them: what a controller restored from an old backup lacks."""
    version = msgspec.json.decode(text.encode())["signed"]["version"]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(folder / f"{version}.root.json", text.encode())


def role_of(present: Mapping[str, Any], name: str) -> dict[str, Any]:
    """That role, as `GET /v1/keys` shows it."""
    found: dict[str, Any] = next(one for one in present["roles"] if one["role"] == name)
    return found


def lies_here(role: Mapping[str, Any]) -> bool:
    """Do enough of its keys lie on the controller?"""
    return sum(bool(one["here"]) for one in role["keys"]) >= int(role["threshold"])
