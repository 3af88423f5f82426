"""Coral's Edge TPU library for a kit: the given Debian packages, checked to be libedgetpu for the machine and of a
build that the kit's LiteRT can load (docs/decisions/0037).

The delegate's interface is that of the TensorFlow Lite that libedgetpu was built with. Coral's own last build (16.0, of
TensorFlow 2.5) is refused by every LiteRT that has wheels for Python 3.10 or newer; builds that name TensorFlow 2.16 or
newer in their version, such as 16.0tf2.17.1-1, work.
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
MAX_BYTES = 64 << 20
_CONTROL_BYTES = 1 << 20
_AR, _HEAD = b"!<arch>\n", 60


@dataclass(frozen=True, slots=True)
class DebianPackage:
    """Name, version and architecture of a Debian package."""

    name: str
    version: str
    architecture: str


class CoralPackages:
    """The given packages: libedgetpu, and its dependencies that the image lacks (libusb-1.0-0)."""

    def __init__(self, files: Sequence[Path]) -> None:
        """UsageError unless exactly one suitable libedgetpu is among them."""
        self._files = tuple(files)
        self._packages = [read_package(file) for file in files]
        libraries = [package for package in self._packages if package.name in PACKAGES]
        if len(libraries) != 1:
            raise UsageError(
                f"--coral needs one package of {' or '.join(PACKAGES)} (std: cooler, max: faster and hot), given with"
                " --coral-deb FILE"
            )
        check_compatible(libraries[0])

    def archive(self, machine: str, folder: Path) -> Path:
        """Write the kit's `coral.tar` for that machine into `folder`; reproducible."""
        architecture = ARCHITECTURES[machine]
        for package, file in zip(self._packages, self._files, strict=True):
            if package.architecture not in (architecture, "all"):
                raise UsageError(
                    f"{file.name} is for {package.architecture}, and the machine is {machine}: take {architecture}"
                )
        output = folder / f"coral-{machine}.tar"
        with tarfile.open(output, "w", format=tarfile.USTAR_FORMAT) as archive:
            for number, file in enumerate(sorted(self._files, key=lambda package: package.name)):
                entry = tarfile.TarInfo(f"{number}.deb")
                entry.size, entry.mode = file.stat().st_size, 0o644
                with file.open("rb") as opened:
                    archive.addfile(entry, opened)
        return output


def check_compatible(package: DebianPackage) -> None:
    """UsageError for a build of libedgetpu that the kit's LiteRT cannot load."""
    built = BUILT_WITH.match(package.version)
    if built is None or (int(built[1]), int(built[2])) < OLDEST_TENSORFLOW:
        raise UsageError(
            f"{package.name} {package.version[:40]} was not built with TensorFlow 2.16 or newer, and LiteRT's wheels"
            " for Python 3.10 and newer cannot load it: take a build that names it, as in 16.0tf2.17.1-1"
        )


def read_package(file: Path) -> DebianPackage:
    """Read a .deb's control file; nothing in it is executed or unpacked. UsageError for any other file."""
    try:
        if not 0 < file.stat().st_size <= MAX_BYTES:
            raise UsageError(f"{file}: {file.stat().st_size} bytes are too few or too many for such a package")
        control = _control_file(file.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, EOFError, tarfile.TarError, zstandard.ZstdError) as error:
        raise UsageError(f"{file} is not a Debian package: {error}") from error
    fields = dict(re.findall(r"^(Package|Version|Architecture): ([A-Za-z0-9.+~:-]{1,80})$", control, re.MULTILINE))
    if len(fields) != 3:
        raise UsageError(f"{file} has no package name in its control file")
    return DebianPackage(fields["Package"], fields["Version"], fields["Architecture"])


def _control_file(raw: bytes) -> str:
    """The control file in the control.tar of an ar archive, whatever its compression."""
    if not raw.startswith(_AR):
        raise ValueError("it is not an ar archive")
    offset = len(_AR)
    while offset + _HEAD <= len(raw):
        head = raw[offset : offset + _HEAD]
        name, size = head[:16].decode("ascii", "replace").strip().rstrip("/"), int(head[48:58])
        body = raw[offset + _HEAD : offset + _HEAD + size]
        if name.startswith("control.tar"):
            if name.endswith(".zst"):
                body = zstandard.ZstdDecompressor().decompress(body, max_output_size=_CONTROL_BYTES)
            with tarfile.open(fileobj=io.BytesIO(body)) as archive:
                for member in archive:
                    if member.isreg() and member.name.removeprefix("./") == "control" and member.size < _CONTROL_BYTES:
                        opened = archive.extractfile(member)
                        return opened.read().decode("utf-8", "replace") if opened is not None else ""
        offset += _HEAD + size + size % 2
    raise ValueError("it has no control file")
