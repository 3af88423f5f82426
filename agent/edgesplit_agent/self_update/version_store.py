"""The agent's versions on disk, and the check that a version still is what was installed.

    versions.json            which one runs (`version_slots`)
    versions/{release}/      a complete virtual environment; it appears by one rename
        installed.json       every file in it by its SHA-256, every link by its target

`VersionStore.damage` returns an empty text only where the folder holds exactly what was installed. The list is not
signed: it detects power cuts and failing cards, not an attacker with the agent's own rights. The signatures belong to
the release from which the version was installed, and are verified at installation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from edgesplit.atomic_files import make_folders, remove, sync_folder, write_durably
from edgesplit.file_hash import file_sha256
from edgesplit.identifiers import SHA256, sha256_hex
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit_agent.self_update.version_slots import Versions

log = logging.getLogger(__name__)
LIST_FILE = "installed.json"


class InstalledFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `installed.json`: what a version consists of."""

    version: str
    files: dict[str, str]
    """By relative path the SHA-256 of a file, or `-> ` and the target of a link."""


class VersionStore:
    """The versions in one data folder."""

    def __init__(self, data: Path) -> None:
        self._state_file = data / "versions.json"
        self.folder = data / "versions"

    def read(self) -> Versions:
        """The state of the versions. Empty where the file is missing or damaged, so that the installed version runs."""
        try:
            return msgspec.json.decode(self._state_file.read_bytes(), type=Versions)
        except FileNotFoundError:
            return Versions()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.error("%s cannot be read, the installed version runs: %s", self._state_file, error)
            return Versions()

    def write(self, versions: Versions) -> None:
        """Replace `versions.json` atomically: after a power cut it holds the old state or the new one. OSError where
        the disk refuses."""
        write_durably(self._state_file, msgspec.json.format(msgspec.json.encode(versions)))

    def version_folder(self, release: str) -> Path:
        """Folder of that release's version."""
        return self.folder / sha256_hex(release)

    def python(self, release: str) -> Path:
        """Path of that version's Python interpreter."""
        return self.version_folder(release) / "bin" / "python"

    def new_part_folder(self, release: str) -> Path:
        """An empty folder to install that release into; the remains of an earlier attempt are removed."""
        make_folders(self.folder)
        part = self.folder / f".{sha256_hex(release)}.part"
        remove(part)
        part.mkdir()
        return part

    def adopt(self, part: Path, release: str, version: str) -> None:
        """Make the environment installed in `part` that release's version: everything is synced to disk, then one
        rename activates it."""
        manifest = InstalledFiles(version=version, files=_fingerprints(part))
        (part / LIST_FILE).write_bytes(msgspec.json.encode(manifest))
        os.sync()  # one wait for thousands of files; what is lost in spite of it is detected by `damage`
        home, removed = self.version_folder(release), self.folder / f".{release}.removed"
        # A folder cannot be replaced by one rename: the damaged version is moved away first. A power cut in between
        # leaves no version, which `damage` reports, and the version is installed again.
        if os.path.lexists(home):
            remove(removed)
            os.rename(home, removed)
        os.rename(part, home)
        sync_folder(self.folder)
        remove(removed)

    def damage(self, release: str) -> str:
        """How the version on disk differs from what was installed, for people; empty where it does not."""
        home = self.version_folder(release)
        if not self.python(release).exists():  # a link to the system's Python, which may have been replaced
            return "its interpreter is missing"
        try:
            expected = msgspec.json.decode((home / LIST_FILE).read_bytes(), type=InstalledFiles).files
            actual = _fingerprints(home)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            return f"its files cannot be read: {error}"
        differing = sorted(name for name in {*expected, *actual} if expected.get(name) != actual.get(name))
        return f"{len(differing)} files differ from what was installed, such as {differing[0]}" if differing else ""

    def remove_others(self, releases: Collection[str]) -> None:
        """Remove every version that is not in `releases`, and what interrupted installations and removals left."""
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else ():
            if path.name in releases or not (SHA256.fullmatch(path.name) or path.name.startswith(".")):
                continue
            removed = self.folder / f".{path.name.strip('.')}.removed"
            if path != removed:
                remove(removed)
                os.rename(path, removed)
            remove(removed)


def _fingerprints(home: Path) -> dict[str, str]:
    """The fingerprint of every file and link below `home` by relative path, without `installed.json` itself."""
    fingerprints: dict[str, str] = {}
    for folder, folders, files in os.walk(home):
        parent = Path(folder)
        for name in (*files, *(folder_name for folder_name in folders if (parent / folder_name).is_symlink())):
            path = parent / name
            fingerprints[path.relative_to(home).as_posix()] = _fingerprint(path)
    fingerprints.pop(LIST_FILE, None)
    return fingerprints


def _fingerprint(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, or `-> ` and the target of a link."""
    if path.is_symlink():
        return f"-> {os.readlink(path)}"
    return file_sha256(path)


warm_up_structs(__name__)
