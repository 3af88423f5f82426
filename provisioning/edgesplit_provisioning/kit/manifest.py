"""`kit.json`: what a kit is for and what lies in it, each file with its digest.

`install.sh` reads it with sed on a machine that has no Python yet, so each file has a line of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgesplit.errors import MalformedMessage, UsageError
from edgesplit.release.agent_release import WHEELS_FILE

FORMAT = "edgesplit.kit/1"
NAME = "kit.json"
INSTALLER = "install.sh"
WHEELS = WHEELS_FILE
INTERPRETER = "python.tar.gz"
CORAL = "coral.tar"
FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}(\.[a-z0-9]{1,8}){1,2}")
"""Of a file in a kit: no two differ in case only, and FAT keeps each as it is."""
DESCRIPTION_BYTES = 65_536


class KitFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a kit."""

    name: str
    bytes: int
    sha256: str


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `kit.json`."""

    format: str
    version: str
    python: str
    machine: str
    glibc: str
    """The oldest C library that everything in it runs on."""
    extras: tuple[str, ...]
    needs_bytes: int
    """Free space that installing takes at its peak."""
    wheels: tuple[str, ...]
    files: tuple[KitFile, ...]


@dataclass(frozen=True)
class Kit:
    """A folder that installs the agent offline: name on the partition -> file here."""

    described: Described
    files: Mapping[str, Path]

    @property
    def bytes(self) -> int:
        """That all its files take."""
        return sum(one.stat().st_size for one in self.files.values())

    def check(self, folder: Path) -> None:
        """This kit lies in `folder`, every file as it is here; MalformedMessage names the first that does not."""
        for name, file in self.files.items():
            if not (folder / name).is_file():
                raise MalformedMessage(f"{folder / name} is missing")
            if digest(folder / name) != digest(file):
                raise MalformedMessage(f"{folder / name} is not what was written: write it again, elsewhere")


def encode(described: Described) -> bytes:
    """As `install.sh` reads it: a line for each value and for each file."""
    plain = msgspec.to_builtins(described)
    files = ",\n".join("  " + json.dumps(one) for one in plain.pop("files"))
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in plain.items()]
    return ("{\n" + ",\n".join(lines) + f',\n "files": [\n{files}\n ]\n}}\n').encode()


def decode(raw: bytes) -> Described:
    """The description in `raw`; MalformedMessage for anything else."""
    if len(raw) > DESCRIPTION_BYTES:
        raise MalformedMessage(f"{NAME}: {len(raw)} bytes, at most {DESCRIPTION_BYTES}")
    try:
        found = msgspec.json.decode(raw, type=Described)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"{NAME}: {error}") from error
    if found.format != FORMAT:
        raise MalformedMessage(f"{NAME}: of format {found.format[:40]!r}, not {FORMAT}")
    for one in found.files:
        if not FILE_NAME.fullmatch(one.name):
            raise MalformedMessage(f"{NAME}: {one.name[:80]!r} is no name of a file in a kit")
    return found


def read_kit(folder: Path) -> Kit:
    """The kit that lies in `folder`, checked; UsageError where there is none."""
    try:
        raw = (folder / NAME).read_bytes()
    except OSError as error:
        raise UsageError(f"no kit in {folder}: {error.strerror}") from error
    described = decode(raw)
    for one in described.files:
        file = folder / one.name
        if not file.is_file() or file.stat().st_size != one.bytes or digest(file) != one.sha256:
            raise MalformedMessage(f"{file} is missing or spoilt: make the kit again")
    return Kit(described, {NAME: folder / NAME, **{one.name: folder / one.name for one in described.files}})


def listed(files: Mapping[str, Path]) -> tuple[KitFile, ...]:
    """How files are described; UsageError for a name that FAT would not keep."""
    for name in files:
        if not FILE_NAME.fullmatch(name):
            raise UsageError(f"{name!r} is no name for a file in a kit: small letters, digits and one ending")
    return tuple(KitFile(name, file.stat().st_size, digest(file)) for name, file in sorted(files.items()))


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
