"""Release bundle: a folder (for example on a USB stick) or a tar file that brings releases to devices without a
network.

    bundle.json             `BundleIndex`, for display: it is not trusted, and written last
    metadata/…, targets/…   TUF metadata, by the same paths as over the network (`edgesplit.trust.store`)
    statements/{device}     the director's signed statement for each device
    chunks/aa/{sha256}      the chunks that these devices need
    edgesplit/…             the installation kit, if requested

Every name is valid on FAT. Signatures, expiry, counters and digests are verified by the same code as for data from the
network, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from edgesplit import identifiers
from edgesplit.decoding import decode_json
from edgesplit.errors import MalformedMessage
from edgesplit.msgspec_warmup import warm_up_structs

FORMAT = "edgesplit.bundle/1"
INDEX_FILE = "bundle.json"
KIT_FOLDER = "edgesplit"
FOLDERS = ("metadata", "targets", "statements", "chunks")
MAX_INDEX_BYTES = 4_000_000
"""Maximum size of the index file."""


class BundledRelease(msgspec.Struct, frozen=True, kw_only=True):
    """A release in a bundle."""

    release: str
    model: str
    """`name@version`."""
    bytes: int
    """Size of those of its chunks that the devices need."""


class BundleIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a bundle, for display."""

    format: str = FORMAT
    controller: str
    created: int
    """Unix seconds."""
    valid_until: int
    """Unix seconds; afterwards the bundle installs nothing."""
    limited_by: str
    """What expires at `valid_until`."""
    devices: Mapping[str, str]
    """Device classes by device name."""
    releases: tuple[BundledRelease, ...]
    kit: str = ""
    """Target of the installation kit in the bundle; empty where there is none."""


def statement_path(device: str) -> str:
    """Path of the device's statement in the bundle."""
    return f"statements/{identifiers.device_name(device)}"


def chunk_path(sha256: str) -> str:
    """Path of a chunk in the bundle."""
    return f"chunks/{identifiers.sha256_hex(sha256)[:2]}/{sha256}"


def encode_index(index: BundleIndex) -> bytes:
    """Encode the index file."""
    return msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n"


def decode_index(raw: bytes) -> BundleIndex:
    """Decode the index file; MalformedMessage where it is invalid or of another format."""
    index = decode_json(raw, BundleIndex, INDEX_FILE, MAX_INDEX_BYTES)
    if index.format != FORMAT:
        raise MalformedMessage(f"{INDEX_FILE}: of format {index.format[:40]!r}, and this reads {FORMAT}")
    return index


warm_up_structs(__name__)
