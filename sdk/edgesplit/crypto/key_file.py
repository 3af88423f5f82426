"""Content keys stored beside a release, outside of what is signed: each is checked against the manifest before it is
used.

    releases/<digest>/keys.json      offload server: content keys in clear, mode 0600, written by the controller, or by
                                     the agent of a gateway
    releases/<digest>/keys.wrapped   device: as they came in its statement, wrapped to its own key

They are deleted with the release. A device stores its keys here because the newest statement may already contain
another release while this one still runs, and this one must be able to start again without a network.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgesplit.atomic_files import write_durably
from edgesplit.crypto.slice_encryption import Keys
from edgesplit.errors import TrustError

CLEAR_KEYS_FILE, WRAPPED_KEYS_FILE = "keys.json", "keys.wrapped"


def write_keys(release_folder: Path, keys: Keys) -> None:
    """Store the content keys of an offload server's slices in clear."""
    write_durably(release_folder / CLEAR_KEYS_FILE, msgspec.json.encode(dict(keys), order="deterministic"), mode=0o600)


def has_keys(release_folder: Path) -> bool:
    """True if content keys are stored in clear beside the release."""
    return (release_folder / CLEAR_KEYS_FILE).is_file()


def read_keys(release_folder: Path) -> dict[str, bytes]:
    """The content keys stored in clear beside a release. TrustError, with instructions, where they cannot be read."""
    path = release_folder / CLEAR_KEYS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, bytes])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TrustError(
            f"release {release_folder.name[:12]} is encrypted, and {path} cannot be read ({error}): deploy it again,"
            " and let this server's user read that file"
        ) from error


def write_wrapped_keys(release_folder: Path, wrapped: bytes) -> None:
    """Store the wrapped content keys of a device for its next start."""
    write_durably(release_folder / WRAPPED_KEYS_FILE, wrapped, mode=0o600)


def read_wrapped_keys(release_folder: Path) -> bytes:
    """The stored wrapped keys; empty where there are none, or they cannot be read."""
    try:
        return (release_folder / WRAPPED_KEYS_FILE).read_bytes()
    except OSError:
        return b""
