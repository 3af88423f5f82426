"""Coral's library for a kit: the Debian packages given, checked to be libedgetpu for that machine and of a build that
the LiteRT in the kit can talk to (docs/decisions/0037).

The delegate's interface is the one of the TensorFlow Lite that libedgetpu was built with. Coral's own last build (16.0,
of TensorFlow 2.5) is refused by every LiteRT that has wheels for Python 3.10 or newer; builds that name TensorFlow 2.16
or newer in their version, as in 16.0tf2.17.1-1, are the ones to take.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zstandard

from edgesplit.errors import UsageError

PACKAGES = ("libedgetpu1-std", "libedgetpu1-max")
BUILT_WITH = re.compile(r"^16\.0tf(\d{1,3})\.(\d{1,3})\.\d{1,3}(?:-\d{1,3})?(?:[.~+][a-z0-9.]{1,20})?$", re.IGNORECASE)
OLDEST_TENSORFLOW = (2, 16)
ARCHITECTURES: Mapping[str, str] = {"aarch64": "arm64", "x86_64": "amd64"}
MOST_BYTES = 64 << 20
_CONTROL_BYTES = 1 << 20
_AR, _HEAD = b"!<arch>\n", 60


@dataclass(frozen=True, slots=True)
class Package:
    """What a Debian package says of itself."""

    name: str
    version: str
    architecture: str


class CoralPackages:
    """Those given: libedgetpu, and what else it needs there (libusb-1.0-0, where the image has none)."""

    def __init__(self, files: Sequence[Path]) -> None:
        """UsageError where there is no libedgetpu among them that will do."""
        self._files = tuple(files)
        self._packages = [read_package(file) for file in files]
        found = [one for one in self._packages if one.name in PACKAGES]
        if len(found) != 1:
            raise UsageError(
                f"--coral needs one package of {' or '.join(PACKAGES)} (std: cooler, max: faster and hot), given with"
                " --coral-deb FILE"
            )
        check_pair(found[0])

    def archive(self, machine: str, folder: Path) -> Path:
        """The kit's `coral.tar` for that machine, made in `folder`: the same bytes for the same packages."""
        wanted = ARCHITECTURES[machine]
        for one, file in zip(self._packages, self._files, strict=True):
            if one.architecture not in (wanted, "all"):
                raise UsageError(f"{file.name} is for {one.architecture}, and the machine is {machine}: take {wanted}")
        made = folder / f"coral-{machine}.tar"
        with tarfile.open(made, "w", format=tarfile.USTAR_FORMAT) as archive:
            for number, file in enumerate(sorted(self._files, key=lambda one: one.name)):
                entry = tarfile.TarInfo(f"{number}.deb")
                entry.size, entry.mode = file.stat().st_size, 0o644
                with file.open("rb") as opened:
                    archive.addfile(entry, opened)
        return made


def check_pair(package: Package) -> None:
    """UsageError for a build that the kit's LiteRT cannot use."""
    built = BUILT_WITH.match(package.version)
    if built is None or (int(built[1]), int(built[2])) < OLDEST_TENSORFLOW:
        raise UsageError(
            f"{package.name} {package.version[:40]} was not built with TensorFlow 2.16 or newer, and LiteRT's wheels"
            " for Python 3.10 and newer cannot load it: take a build that names it, as in 16.0tf2.17.1-1"
        )


def read_package(file: Path) -> Package:
    """What that .deb says of itself; nothing in it is run or unpacked. UsageError where it is none."""
    try:
        if not 0 < file.stat().st_size <= MOST_BYTES:
            raise UsageError(f"{file}: {file.stat().st_size} bytes is no size of such a package")
        control = _control(file.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, EOFError, tarfile.TarError, zstandard.ZstdError) as error:
        raise UsageError(f"{file} is no Debian package: {error}") from error
    fields = dict(re.findall(r"^(Package|Version|Architecture): ([A-Za-z0-9.+~:-]{1,80})$", control, re.MULTILINE))
    if len(fields) != 3:
        raise UsageError(f"{file} does not say what package it is")
    return Package(fields["Package"], fields["Version"], fields["Architecture"])


def _control(raw: bytes) -> str:
    """The control file in an ar archive's control.tar, however that is compressed."""
    if not raw.startswith(_AR):
        raise ValueError("it is no ar archive")
    at = len(_AR)
    while at + _HEAD <= len(raw):
        head = raw[at : at + _HEAD]
        name, size = head[:16].decode("ascii", "replace").strip().rstrip("/"), int(head[48:58])
        body = raw[at + _HEAD : at + _HEAD + size]
        if name.startswith("control.tar"):
            if name.endswith(".zst"):
                body = zstandard.ZstdDecompressor().decompress(body, max_output_size=_CONTROL_BYTES)
            with tarfile.open(fileobj=io.BytesIO(body)) as archive:
                for member in archive:
                    if member.isreg() and member.name.removeprefix("./") == "control" and member.size < _CONTROL_BYTES:
                        opened = archive.extractfile(member)
                        return opened.read().decode("utf-8", "replace") if opened is not None else ""
        at += _HEAD + size + size % 2
    raise ValueError("it has no control file")
