"""What lies in a bundle: a folder (on a USB stick, say) or a tar file that brings releases to devices without a
network.

    bundle.json             `Index`, for people: nothing in it is believed, and it is written last
    metadata/…, targets/…   what a device would fetch, by the same paths (`edgesplit.trust.store`)
    statements/{device}     the director's signed word for each device
    chunks/aa/{sha256}      the chunks that these devices need
    edgesplit/…             the kit, where it was asked for

Every name is safe on FAT. Signatures, expiry, counters and digests are looked at by the code that looks at them when
they come over the network, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from edgesplit import identifiers
from edgesplit.errors import MalformedMessage
from edgesplit.msgspec_warmup import settle

FORMAT = "edgesplit.bundle/1"
INDEX = "bundle.json"
KIT = "edgesplit"
FOLDERS = ("metadata", "targets", "statements", "chunks")
INDEX_BYTES = 4_000_000


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """A release in a bundle."""

    release: str
    model: str
    """`name@version`."""
    bytes: int
    """Of the chunks of it that the devices need."""


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """What a bundle says of itself."""

    format: str = FORMAT
    controller: str
    made: int
    """Unix seconds."""
    valid_until: int
    """Unix seconds: afterwards it installs nothing."""
    limited_by: str
    """What ends then."""
    devices: Mapping[str, str]
    """Their classes, by name."""
    releases: tuple[Carried, ...]
    kit: str = ""
    """What the kit in it is for; empty where there is none."""


def statement_path(device: str) -> str:
    """Where that device's statement lies."""
    return f"statements/{identifiers.device_name(device)}"


def chunk_path(sha256: str) -> str:
    """Where that chunk lies."""
    return f"chunks/{identifiers.sha256_hex(sha256)[:2]}/{sha256}"


def encode_index(index: Index) -> bytes:
    """The file."""
    return msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n"


def decode_index(raw: bytes) -> Index:
    """MalformedMessage for anything else."""
    if len(raw) > INDEX_BYTES:
        raise MalformedMessage(f"{INDEX}: {len(raw)} bytes, at most {INDEX_BYTES}")
    try:
        index = msgspec.json.decode(raw, type=Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"{INDEX}: {error}") from error
    if index.format != FORMAT:
        raise MalformedMessage(f"{INDEX}: of format {index.format[:40]!r}, and this reads {FORMAT}")
    return index


settle(__name__)
