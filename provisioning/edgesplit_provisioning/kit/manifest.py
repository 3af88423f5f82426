"""`kit.json`: the manifest of a kit: what it is for, and each of its files with its digest.

`install.sh` reads it with sed on a machine that has no Python yet, so each value and each file has a line of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgesplit.errors import MalformedMessage, UsageError
from edgesplit.file_hash import file_sha256
from edgesplit.release.agent_release import WHEELS_FILE

FORMAT = "edgesplit.kit/1"
MANIFEST = "kit.json"
INSTALLER = "install.sh"
WHEELS = WHEELS_FILE
INTERPRETER = "python.tar.gz"
CORAL = "coral.tar"
FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}(\.[a-z0-9]{1,8}){1,2}")
"""Valid file names in a kit: no two differ in case only, and FAT keeps each unchanged."""
MAX_MANIFEST_BYTES = 65_536
"""Longest manifest that is read."""


class KitFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a kit."""

    name: str
    bytes: int
    sha256: str


class KitManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `kit.json`."""

    format: str
    version: str
    python: str
    machine: str
    glibc: str
    """The oldest glibc that everything in the kit runs on."""
    extras: tuple[str, ...]
    needs_bytes: int
    """Free space that installing takes at its peak."""
    wheels: tuple[str, ...]
    files: tuple[KitFile, ...]


@dataclass(frozen=True)
class Kit:
    """A kit in a folder: its manifest, and its files by their names on the device."""

    manifest: KitManifest
    files: Mapping[str, Path]

    @property
    def bytes(self) -> int:
        """Total size of its files."""
        return sum(path.stat().st_size for path in self.files.values())

    @property
    def mark(self) -> str:
        """Name of the version folder that install.sh makes."""
        return f"{self.manifest.version}-{file_sha256(self.files[MANIFEST])[:8]}"

    def check(self, folder: Path) -> None:
        """Compare the copy in `folder` with this kit; MalformedMessage names the first file that is missing or
        different."""
        for name, file in self.files.items():
            if not (folder / name).is_file():
                raise MalformedMessage(f"{folder / name} is missing")
            if file_sha256(folder / name) != file_sha256(file):
                raise MalformedMessage(f"{folder / name} is not what was written: write it again, elsewhere")


def encode(manifest: KitManifest) -> bytes:
    """Encode the manifest for `install.sh`: one line for each value and for each file."""
    values = msgspec.to_builtins(manifest)
    files = ",\n".join("  " + json.dumps(entry) for entry in values.pop("files"))
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    return ("{\n" + ",\n".join(lines) + f',\n "files": [\n{files}\n ]\n}}\n').encode()


def decode(raw: bytes) -> KitManifest:
    """Decode a manifest; MalformedMessage where it is invalid or of another format."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise MalformedMessage(f"{MANIFEST}: {len(raw)} bytes, at most {MAX_MANIFEST_BYTES}")
    try:
        manifest = msgspec.json.decode(raw, type=KitManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"{MANIFEST}: {error}") from error
    if manifest.format != FORMAT:
        raise MalformedMessage(f"{MANIFEST}: of format {manifest.format[:40]!r}, not {FORMAT}")
    for entry in manifest.files:
        if not FILE_NAME.fullmatch(entry.name):
            raise MalformedMessage(f"{MANIFEST}: {entry.name[:80]!r} is not a valid file name in a kit")
    return manifest


def read_kit(folder: Path) -> Kit:
    """Read a kit and check every file's size and digest; UsageError where there is none, MalformedMessage where it is
    damaged."""
    try:
        raw = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise UsageError(f"no kit in {folder}: {error.strerror}") from error
    manifest = decode(raw)
    for entry in manifest.files:
        file = folder / entry.name
        if not file.is_file() or file.stat().st_size != entry.bytes or file_sha256(file) != entry.sha256:
            raise MalformedMessage(f"{file} is missing or corrupt: make the kit again")
    return Kit(manifest, {MANIFEST: folder / MANIFEST, **{entry.name: folder / entry.name for entry in manifest.files}})


def list_files(files: Mapping[str, Path]) -> tuple[KitFile, ...]:
    """Entries of the manifest for these files; UsageError for a name that FAT would not keep."""
    for name in files:
        if not FILE_NAME.fullmatch(name):
            raise UsageError(f"{name!r} is not a valid file name in a kit: lower-case letters, digits and one suffix")
    return tuple(KitFile(name, file.stat().st_size, file_sha256(file)) for name, file in sorted(files.items()))
