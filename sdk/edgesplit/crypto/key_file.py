"""Keys beside a release, outside of what is signed: each is checked against the manifest before it is used.

    releases/<digest>/keys.json      an offload server's: content keys in clear, 0600, written by the controller, or by
                                     the agent of a gateway
    releases/<digest>/keys.wrapped   a device's: as its statement brought them, wrapped to its own key

They go when the release goes. A device keeps its own here because the newest statement may want another release
already while this one still runs, and must start again without a network.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgesplit.atomic_files import write_durably
from edgesplit.crypto.slice_encryption import Keys
from edgesplit.errors import TrustError

IN_CLEAR, WRAPPED = "keys.json", "keys.wrapped"


def write_keys(release_folder: Path, keys: Keys) -> None:
    """Give an offload server the content keys of its halves."""
    write_durably(release_folder / IN_CLEAR, msgspec.json.encode(dict(keys), order="deterministic"), mode=0o600)


def has_keys(release_folder: Path) -> bool:
    """Do content keys lie in clear beside a release?"""
    return (release_folder / IN_CLEAR).is_file()


def read_keys(release_folder: Path) -> dict[str, bytes]:
    """The content keys that lie in clear beside a release; TrustError says what to do where they do not."""
    path = release_folder / IN_CLEAR
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, bytes])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TrustError(
            f"release {release_folder.name[:12]} is encrypted, and {path} cannot be read ({error}): deploy it again,"
            " and let this server's user read that file"
        ) from error


def write_wrapped(release_folder: Path, wrapped: bytes) -> None:
    """Keep what a device was given, for its next start."""
    write_durably(release_folder / WRAPPED, wrapped, mode=0o600)


def read_wrapped(release_folder: Path) -> bytes:
    """What was kept; empty where nothing is, or it cannot be read."""
    try:
        return (release_folder / WRAPPED).read_bytes()
    except OSError:
        return b""
