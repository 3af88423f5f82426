"""From a target to a kit: edgesplit's own wheel, the wheels that it needs, the installer, and a page that says so.

The same wheels give the same bytes. Kits lie in the cache, one folder for each content; what a killed build left is
cleared by the next.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import zstandard

import edgesplit
from edgesplit.errors import EdgeError, UsageError
from edgesplit_provisioning.kit import own_wheel
from edgesplit_provisioning.kit.manifest import (
    FORMAT,
    INSTALLER,
    INTERPRETER,
    NAME,
    WHEELS,
    Described,
    Kit,
    encode,
    listed,
    read_kit,
)
from edgesplit_provisioning.kit.target import Target, needed_glibc
from edgesplit_provisioning.kit.wheel_slimming import slimmed
from edgesplit_provisioning.kit.wheelhouse import Told, wheels

COMPILED = 1.4
"""What is installed takes so many times a wheel's unpacked bytes: compiled modules lie beside sources."""
GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"


def build_kit(
    target: Target,
    *,
    extras: Sequence[str] = (),
    cache: Path,
    interpreter: Path | None = None,
    wheelhouse: Path | None = None,
    more: Mapping[str, Path] | None = None,
    slim: bool = True,
    progress: Told = lambda text: None,
) -> Kit:
    """The kit for `target`, in the cache. `extras`: beside `agent`, as in tflite. `interpreter`: an archive of a Python
    that the device does not have (python-build-standalone's install_only, .tar.gz or .tar.zst). `more`: further files,
    as coral.tar. `slim`: leave away what no device uses (`slimming`)."""
    chosen = tuple(sorted({"agent", *extras}))
    needed = own_wheel.requirements(chosen)
    gathered = wheels(target, needed, cache, wheelhouse=wheelhouse, told=progress)
    if slim:
        progress("leaving away what no device uses")
        gathered = [slimmed(one, cache / "slim") for one in gathered]
    (cache / "kits").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=cache / "kits") as folder:
        work = Path(folder) / "kit"
        work.mkdir()
        progress("packing the kit")
        everything = [*gathered, own_wheel.write(Path(folder))]
        shutil.copyfile(Path(__file__).with_name(INSTALLER), work / INSTALLER)
        _pack(everything, work / WHEELS)
        if interpreter is not None:
            _interpreter(interpreter, work / INTERPRETER, target.python)
        for name, file in (more or {}).items():
            _copy(file, work / name)
        described = Described(
            format=FORMAT,
            version=edgesplit.__version__,
            python=target.python,
            machine=target.machine,
            glibc=needed_glibc([one.name for one in everything]),
            extras=chosen,
            needs_bytes=_needs(everything),
            wheels=tuple(sorted(one.name for one in everything)),
            files=listed({one.name: one for one in work.iterdir()}),
        )
        (work / NAME).write_bytes(encode(described))
        return _keep(work, cache / "kits")


def _pack(files: Sequence[Path], made: Path) -> None:
    """A tar of the files, in order of their names, with nothing in it of when and by whom."""
    with tarfile.open(made, "w", format=tarfile.USTAR_FORMAT) as archive:
        for file in sorted(files, key=lambda one: one.name):
            entry = tarfile.TarInfo(file.name)
            entry.size = file.stat().st_size
            entry.mode = 0o644
            with file.open("rb") as opened:
                archive.addfile(entry, opened)


def _interpreter(archive: Path, made: Path, python: str) -> None:
    """As gzip, which every device can unpack, whichever of the two it came as; UsageError where it is not whole or of
    another version."""
    try:
        with archive.open("rb") as opened:
            head = opened.read(4)
    except OSError as error:
        raise UsageError(f"cannot read the interpreter {archive}: {error.strerror}") from error
    if head.startswith(GZIP):
        shutil.copyfile(archive, made)
    elif head == ZSTD:
        _recompress(archive, made)
    else:
        raise UsageError(f"{archive} is neither a .tar.gz nor a .tar.zst: take python-build-standalone's install_only")
    try:
        with tarfile.open(made, "r|gz") as opened_archive:
            names = {member.name for member in opened_archive}
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise UsageError(f"the interpreter {archive} is cut off or spoilt: {error}") from error
    if f"python/bin/python{python}" not in names:
        raise UsageError(f"{archive} holds no python/bin/python{python}: take the install_only archive of that version")


def _recompress(archive: Path, made: Path) -> None:
    try:
        with (
            archive.open("rb") as raw,
            zstandard.ZstdDecompressor().stream_reader(raw) as source,
            made.open("wb") as out,
            gzip.GzipFile("", "wb", 6, out, mtime=0) as packed,
        ):
            shutil.copyfileobj(source, packed, 1 << 20)
    except zstandard.ZstdError as error:
        raise UsageError(f"the interpreter {archive} is cut off or spoilt: {error}") from error


def _copy(file: Path, made: Path) -> None:
    try:
        shutil.copyfile(file, made)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error


def _needs(wheels: Sequence[Path]) -> int:
    """Free bytes that installing takes: the wheels, unpacked beside what comes of them."""
    unpacked = 0
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            unpacked += sum(one.file_size for one in archive.infolist())
    return int(unpacked * COMPILED) + sum(wheel.stat().st_size for wheel in wheels)


def _keep(work: Path, kits: Path) -> Kit:
    """The kit in its place; the one that is there, where it is the same."""
    place = kits / hashlib.sha256((work / NAME).read_bytes()).hexdigest()[:32]
    if place.exists():
        try:
            return read_kit(place)
        except EdgeError:
            shutil.rmtree(place, ignore_errors=True)
    try:
        os.rename(work, place)
    except OSError:  # somebody else made the same at the same time
        if not place.exists():
            raise
    return read_kit(place)
