"""Keys on the operator's machine: key files are made or found, signers are named by URI, and a change of keys is
applied.

The controller receives public keys and signatures, never a private key.
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
from edgesplit_controller.tuf.key_change import KeyChange, PublicKey, short_id
from edgesplit_controller.tuf.signers import make_key_file, public_key, signer_uri

NEW, CONTROLLER = "new", "controller"
"""Values of `--release-key`: a key made in the operator's folder, or one that the controller makes and keeps."""


def apply_change(api: ControllerClient, change: KeyChange, uris: Sequence[str]) -> dict[str, Any]:
    """Request the change, verify what the controller prepared, and sign it with the available keys."""
    result: dict[str, Any] = api.post("/v1/keys/change", msgspec.to_builtins(change))
    if not result["done"] and uris:
        result = api.post("/v1/keys/signatures", signatures_for(result, change, uris))
    return result


def existing_keys(names: Sequence[str], present: Mapping[str, Any]) -> list[tuple[str, PublicKey]]:
    """Existing root keys, each with its URI, or with an empty one where only the key id was given."""
    return [_key_by_id(name, present) or _key_by_uri(name) for name in names]


def _key_by_id(prefix: str, present: Mapping[str, Any]) -> tuple[str, PublicKey] | None:
    keys = [key for key in role_of(present, "root")["keys"] if len(prefix) >= 8 and key["keyid"].startswith(prefix)]
    return ("", PublicKey(keys[0]["keyid"], keys[0]["public"])) if len(keys) == 1 else None


def _key_by_uri(name: str) -> tuple[str, PublicKey]:
    uri = signer_uri(name)
    return uri, PublicKey.from_key(public_key(uri, ask_secret))


def make_root_keys(
    folder: Path | None, count: int, protect: bool, present: Mapping[str, Any] | None = None
) -> list[tuple[str, PublicKey]]:
    """Root keys in `folder`; files that exist are reused, so that an interrupted command continues."""
    if not count:
        return []
    if folder is None:
        raise UsageError("missing option --folder DIR: the folder for the new root keys")
    root_keys = [_key_in_file(folder / f"root-{number}.pem", protect) for number in range(1, count + 1)]
    known = {present_key["keyid"] for present_key in role_of(present, "root")["keys"]} if present else set()
    if reused := [short_id(key.keyid) for _, key in root_keys if key.keyid in known]:
        raise UsageError(f"{folder} holds root key {reused[0]} already: give an empty folder for new ones")
    return root_keys


def external_release_key(name: str | None, folder: Path | None, protect: bool) -> tuple[str, PublicKey] | None:
    """The release key outside the controller; None where it stays on, or moves to, the controller."""
    if name is None or name == CONTROLLER:
        return None
    if name != NEW:
        return _key_by_uri(name)
    if folder is None:
        raise UsageError("missing option --folder DIR: the folder for the new release key")
    return _key_in_file(folder / "release.pem", protect)


def _key_in_file(path: Path, protect: bool) -> tuple[str, PublicKey]:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        make_key_file(path, ask_secret(f"passphrase of {path}", new=True) if protect else "")
    return _key_by_uri(str(path))


def save_root(folder: Path, text: str) -> None:
    """Save the root beside the keys that it names: a controller restored from an old backup lacks it."""
    version = msgspec.json.decode(text.encode())["signed"]["version"]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(folder / f"{version}.root.json", text.encode())


def role_of(present: Mapping[str, Any], name: str) -> dict[str, Any]:
    """That role in the answer of `GET /v1/keys`."""
    role: dict[str, Any] = next(candidate for candidate in present["roles"] if candidate["role"] == name)
    return role


def is_on_controller(role: Mapping[str, Any]) -> bool:
    """True where enough of the role's keys are on the controller to sign."""
    return sum(bool(key["on_controller"]) for key in role["keys"]) >= int(role["threshold"])
