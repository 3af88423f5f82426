"""Builds a kit for a target: edgesplit's own wheel, the wheels that it needs, the installer, and a manifest.

The output is reproducible: the same wheels give the same bytes. Kits are kept in the cache, one folder per content; the
remains of a killed build are removed by the next.
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
    MANIFEST,
    WHEELS,
    Kit,
    KitManifest,
    encode,
    list_files,
    read_kit,
)
from edgesplit_provisioning.kit.target import Target, needed_glibc
from edgesplit_provisioning.kit.wheel_slimming import slim_wheel
from edgesplit_provisioning.kit.wheelhouse import OnProgress, collect_wheels

INSTALLED_SIZE_FACTOR = 1.4
"""Installed size as a multiple of a wheel's unpacked size, since compiled modules lie beside the sources."""
GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"


def build_kit(
    target: Target, *, extras: Sequence[str] = (), cache: Path, interpreter: Path | None = None,
    wheelhouse: Path | None = None, more: Mapping[str, Path] | None = None, slim: bool = True,
    progress: OnProgress = lambda text: None,
) -> Kit:  # fmt: skip
    """Build the kit for `target` in the cache. `extras` are added to `agent`, such as tflite. `interpreter` is an
    archive of a Python that the device lacks (python-build-standalone's install_only, .tar.gz or .tar.zst). `more` maps
    names to further files, such as coral.tar. `slim` removes what devices do not use (`wheel_slimming`)."""
    all_extras = tuple(sorted({"agent", *extras}))
    needed = own_wheel.requirements(all_extras)
    wheel_files = collect_wheels(target, needed, cache, wheelhouse=wheelhouse, on_progress=progress)
    if slim:
        progress("removing what no device uses")
        wheel_files = [slim_wheel(path, cache / "slim") for path in wheel_files]
    (cache / "kits").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=cache / "kits") as folder:
        work = Path(folder) / "kit"
        work.mkdir()
        progress("packing the kit")
        all_wheels = [*wheel_files, own_wheel.write(Path(folder))]
        shutil.copyfile(Path(__file__).with_name(INSTALLER), work / INSTALLER)
        _pack(all_wheels, work / WHEELS)
        if interpreter is not None:
            _store_interpreter(interpreter, work / INTERPRETER, target.python)
        for name, file in (more or {}).items():
            _copy(file, work / name)
        manifest = KitManifest(
            format=FORMAT, version=edgesplit.__version__, python=target.python, machine=target.machine,
            glibc=needed_glibc([path.name for path in all_wheels]), extras=all_extras,
            needs_bytes=_bytes_to_install(all_wheels), wheels=tuple(sorted(path.name for path in all_wheels)),
            files=list_files({path.name: path for path in work.iterdir()}),
        )  # fmt: skip
        (work / MANIFEST).write_bytes(encode(manifest))
        return _move_to_cache(work, cache / "kits")


def _pack(files: Sequence[Path], output: Path) -> None:
    """Write a reproducible tar of the files: ordered by name, without times and owners."""
    with tarfile.open(output, "w", format=tarfile.USTAR_FORMAT) as archive:
        for file in sorted(files, key=lambda path: path.name):
            entry = tarfile.TarInfo(file.name)
            entry.size = file.stat().st_size
            entry.mode = 0o644
            with file.open("rb") as opened:
                archive.addfile(entry, opened)


def _store_interpreter(archive: Path, output: Path, python: str) -> None:
    """Store the interpreter's archive as gzip, which every device can unpack. UsageError where it is damaged or of
    another version."""
    try:
        with archive.open("rb") as opened:
            head = opened.read(4)
    except OSError as error:
        raise UsageError(f"cannot read the interpreter {archive}: {error.strerror}") from error
    if head.startswith(GZIP):
        shutil.copyfile(archive, output)
    elif head == ZSTD:
        _recompress(archive, output)
    else:
        raise UsageError(f"{archive} is neither a .tar.gz nor a .tar.zst: take python-build-standalone's install_only")
    try:
        with tarfile.open(output, "r|gz") as opened_archive:
            names = {member.name for member in opened_archive}
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise UsageError(f"the interpreter {archive} is truncated or corrupt: {error}") from error
    if f"python/bin/python{python}" not in names:
        raise UsageError(f"{archive} holds no python/bin/python{python}: take the install_only archive of that version")


def _recompress(archive: Path, output: Path) -> None:
    try:
        with (
            archive.open("rb") as raw,
            zstandard.ZstdDecompressor().stream_reader(raw) as source,
            output.open("wb") as out,
            gzip.GzipFile("", "wb", 6, out, mtime=0) as packed,
        ):
            shutil.copyfileobj(source, packed, 1 << 20)
    except zstandard.ZstdError as error:
        raise UsageError(f"the interpreter {archive} is truncated or corrupt: {error}") from error


def _copy(file: Path, output: Path) -> None:
    try:
        shutil.copyfile(file, output)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error


def _bytes_to_install(wheels: Sequence[Path]) -> int:
    """Free bytes that installing takes: the wheels, and the files unpacked from them."""
    unpacked = 0
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            unpacked += sum(entry.file_size for entry in archive.infolist())
    return int(unpacked * INSTALLED_SIZE_FACTOR) + sum(wheel.stat().st_size for wheel in wheels)


def _move_to_cache(work: Path, kits: Path) -> Kit:
    """Move the kit into the cache; an identical kit that is already there is kept."""
    final = kits / hashlib.sha256((work / MANIFEST).read_bytes()).hexdigest()[:32]
    if final.exists():
        try:
            return read_kit(final)
        except EdgeError:
            shutil.rmtree(final, ignore_errors=True)
    try:
        os.rename(work, final)
    except OSError:  # another process built the same kit meanwhile
        if not final.exists():
            raise
    return read_kit(final)
