"""Coral's library: packages that a kit includes, and packages that are incompatible."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import zstandard

from edgesplit.errors import UsageError
from edgesplit_provisioning.kit.edgetpu_packages import CoralPackages, DebianPackage, check_compatible, read_package

GOOD = "16.0tf2.17.1-1"


def deb(folder: Path, name: str, version: str, architecture: str = "arm64", packed: str = "gz") -> Path:
    """A Debian package, as far as it is read."""
    control = f"Package: {name}\nVersion: {version}\nArchitecture: {architecture}\nDescription: x\n".encode()
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w" if packed in ("zst", "") else f"w:{packed}") as archive:  # type: ignore[call-overload]
        entry = tarfile.TarInfo("./control")
        entry.size = len(control)
        archive.addfile(entry, io.BytesIO(control))
    body = zstandard.ZstdCompressor().compress(raw.getvalue()) if packed == "zst" else raw.getvalue()
    path = folder / f"{name}_{version}_{architecture}.deb"
    members = (("debian-binary", b"2.0\n"), (f"control.tar.{packed}".rstrip("."), body), ("data.tar.xz", b"\xff" * 9))
    with path.open("wb") as file:
        file.write(b"!<arch>\n")
        for member, data in members:
            file.write(f"{member:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode() + data)
            file.write(b"\n" * (len(data) % 2))
    return path


@pytest.mark.parametrize("packed", ["gz", "xz", "zst", ""])
def test_deb_metadata_is_read_from_every_compression(tmp_path: Path, packed: str) -> None:
    """No part of a package is run or unpacked."""
    assert read_package(deb(tmp_path, "libedgetpu1-std", GOOD, packed=packed)) == DebianPackage(
        "libedgetpu1-std", GOOD, "arm64"
    )


def test_libedgetpu_is_added_with_its_dependencies(tmp_path: Path) -> None:
    """The same bytes for the same packages, under fixed names."""
    given = [deb(tmp_path, "libusb-1.0-0", "2:1.0.26-1"), deb(tmp_path, "libedgetpu1-std", GOOD)]
    first = CoralPackages(given).archive("aarch64", tmp_path).read_bytes()
    assert CoralPackages(given[::-1]).archive("aarch64", tmp_path).read_bytes() == first
    with tarfile.open(tmp_path / "coral-aarch64.tar") as archive:
        assert archive.getnames() == ["0.deb", "1.deb"]
    with pytest.raises(UsageError, match="amd64"):
        CoralPackages(given).archive("x86_64", tmp_path)


@pytest.mark.parametrize("version", ["16.0tf2.16.1", GOOD, "16.0TF2.17.1-1.bookworm", "16.0tf2.19.0-2~deb12"])
def test_libedgetpu_builds_with_a_matching_tensorflow_are_accepted(version: str) -> None:
    """The package names its TensorFlow commit."""
    check_compatible(DebianPackage("libedgetpu1-std", version, "arm64"))


@pytest.mark.parametrize("version", ["16.0", "15.0", "16.0tf2.15.1-1", "16.0tf1.99.1", "tf2.17.1", "16.0tf2.17", "x"])
def test_incompatible_libedgetpu_builds_are_refused(version: str) -> None:
    """Coral's own last one among them."""
    with pytest.raises(UsageError, match="TensorFlow"):
        check_compatible(DebianPackage("libedgetpu1-std", version, "arm64"))


def test_exactly_one_libedgetpu_is_required(tmp_path: Path) -> None:
    """None and two are refused."""
    two = [deb(tmp_path, name, GOOD) for name in ("libedgetpu1-std", "libedgetpu1-max")]
    for given in ([], [deb(tmp_path, "hello", "1.0")], two):
        with pytest.raises(UsageError, match="--coral-deb"):
            CoralPackages(given)


@pytest.mark.parametrize(
    "raw", [b"", b"!<arch>\n", b"PK\x03\x04", b"!<arch>\n" + b"control.tar.gz".ljust(48) + b"99999999  `\nxx"]
)
def test_an_invalid_package_is_refused(tmp_path: Path, raw: bytes) -> None:
    """The file is named."""
    file = tmp_path / "x.deb"
    file.write_bytes(raw)
    with pytest.raises(UsageError, match=r"x\.deb"):
        read_package(file)
