"""Where the agent's versions lie in the data folder, and whether one is still what was installed.

    versions.json            which one runs (`slots`)
    versions/{release}/      a virtual environment, whole; it appears by one rename
        installed.json       every file in it by its SHA-256, every link by where it leads

Promises: `damage` is empty only where the folder holds exactly what was put there. It is no signature: it finds what a
power cut or a failing card has done, not what somebody with the agent's own rights has; the signatures lie with the
release that the version was installed from, and are verified when it is.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from edgesplit.atomic_files import make_folders, remove, sync_folder, write_durably
from edgesplit.identifiers import SHA256, sha256_hex
from edgesplit.msgspec_warmup import settle
from edgesplit_agent.self_update.slots import Versions

log = logging.getLogger(__name__)
LIST_FILE = "installed.json"
_READ_BYTES = 1 << 20


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """What a version consists of."""

    version: str
    files: dict[str, str]
    """SHA-256 by path; of a link where it leads, after `-> `."""


class Shelf:
    """The versions in one data folder."""

    def __init__(self, data: Path) -> None:
        self._file = data / "versions.json"
        self.folder = data / "versions"

    def read(self) -> Versions:
        """What is known; nothing where the file is lost or spoilt: then the installed version runs."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Versions)
        except FileNotFoundError:
            return Versions()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.error("%s cannot be read, the installed version runs: %s", self._file, error)
            return Versions()

    def write(self, versions: Versions) -> None:
        """Old or new after a power cut, never anything between. OSError where the disk does not take it."""
        write_durably(self._file, msgspec.json.format(msgspec.json.encode(versions)))

    def home(self, release: str) -> Path:
        """Where that release's version lies."""
        return self.folder / sha256_hex(release)

    def python(self, release: str) -> Path:
        """Its interpreter."""
        return self.home(release) / "bin" / "python"

    def fresh(self, release: str) -> Path:
        """An empty folder to install that release into; what an earlier try left is gone."""
        make_folders(self.folder)
        part = self.folder / f".{sha256_hex(release)}.part"
        remove(part)
        part.mkdir()
        return part

    def adopt(self, part: Path, release: str, version: str) -> None:
        """Make what was installed in `part` that release's version: one rename, after everything is on disk."""
        listed = Installed(version=version, files=_listed(part))
        (part / LIST_FILE).write_bytes(msgspec.json.encode(listed))
        os.sync()  # thousands of files: one wait for the disk, and what it lost all the same `damage` finds
        home, grave = self.home(release), self.folder / f".{release}.removed"
        if os.path.lexists(home):
            remove(grave)
            os.rename(home, grave)
        os.rename(part, home)
        sync_folder(self.folder)
        remove(grave)

    def damage(self, release: str) -> str:
        """How the version on disk differs from what was installed; empty where it does not."""
        home = self.home(release)
        if not self.python(release).exists():  # a link into the system, which may have another Python by now
            return "its interpreter is gone"
        try:
            listed = msgspec.json.decode((home / LIST_FILE).read_bytes(), type=Installed).files
            there = _listed(home)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            return f"its files cannot be read: {error}"
        differ = sorted(name for name in {*listed, *there} if listed.get(name) != there.get(name))
        return f"{len(differ)} files are not as they were installed, as {differ[0]}" if differ else ""

    def keep(self, releases: Collection[str]) -> None:
        """Drop every other version, and what was cut off on its way in or out."""
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else ():
            if path.name in releases or not (SHA256.fullmatch(path.name) or path.name.startswith(".")):
                continue
            grave = self.folder / f".{path.name.strip('.')}.removed"
            if path != grave:
                remove(grave)
                os.rename(path, grave)
            remove(grave)


def _listed(home: Path) -> dict[str, str]:
    """Every file and link below a folder, but the list itself."""
    found: dict[str, str] = {}
    for folder, below, files in os.walk(home):
        at = Path(folder)
        for name in (*files, *(one for one in below if (at / one).is_symlink())):
            path = at / name
            found[path.relative_to(home).as_posix()] = _word_for(path)
    found.pop(LIST_FILE, None)
    return found


def _word_for(path: Path) -> str:
    if path.is_symlink():
        return f"-> {os.readlink(path)}"
    with path.open("rb") as file:
        whole = hashlib.sha256()
        while piece := file.read(_READ_BYTES):
            whole.update(piece)
    return whole.hexdigest()


settle(__name__)
