"""Wheels that tests make: of a few lines, of these sources under another version number, and of nothing but a path to
what is installed here already."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import site
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from edgesplit_provisioning.kit import own_wheel

FITNESS = """
import json
print(json.dumps({{"version": "{version}", "problem": "{problem}"}}))
"""


def wheel(name: str, version: str, files: Mapping[str, str], *, lie: bool = False) -> tuple[str, bytes]:
    """A pure wheel's file name and bytes; with `lie` its record is of other files."""
    info = f"{name}-{version}.dist-info"
    content = {path: text.encode() for path, text in files.items()}
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{path},sha256={_digest(b'x' if lie else data)},{len(data)}\n" for path, data in content.items())
    content[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for path, data in content.items():
            archive.writestr(zipfile.ZipInfo(path), data)
    return f"{name}-{version}-py3-none-any.whl", made.getvalue()


def small_agent(version: str, *, says: str = "", problem: str = "", body: str = "") -> tuple[str, bytes]:
    """A wheel of an agent that can do nothing but say whether it could run; `body`: what its module is instead."""
    fitness = body or FITNESS.format(version=says or f"{version}+device", problem=problem)
    package = {"edgesplit_agent/__init__.py": ""}
    return wheel("edgesplit", version, {**package, "edgesplit_agent/version_check.py": fitness})


def archive(*wheels: tuple[str, bytes]) -> bytes:
    """`wheels.tar`."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in wheels:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return made.getvalue()


def these_sources(
    version: str, change: Callable[[str, bytes], bytes] = lambda name, data: data, tree: Path | None = None
) -> bytes:
    """`wheels.tar` of the agent as it is here, or as it is in another source tree, under another version number and
    with some files changed. What it needs beside itself is what is installed here."""
    real = own_wheel._sources if tree is None else lambda: _sources_in(tree)

    def changed():  # type: ignore[no-untyped-def]
        for name, data in real():
            if name == "edgesplit/__init__.py":
                numbered = re.sub(rb'(?m)^__version__ = ".*"$', f'__version__ = "{version}+device"'.encode(), data)
                assert numbered != data
                data = numbered
            yield name, change(name, data)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_wheel, "_sources", changed)
        patch.setattr(own_wheel, "version", lambda: f"{version}+device")
        made = own_wheel.write(Path(folder))
        own = made.name, made.read_bytes()
    return archive(own, wheel("surroundings", "1.0", {"surroundings.pth": "\n".join(site.getsitepackages()) + "\n"}))


def _sources_in(tree: Path) -> Iterator[tuple[str, bytes]]:
    """Files of the packages that run on devices, in a source tree."""
    for room in ("sdk/edgesplit", "agent/edgesplit_agent", "offload/edgesplit_offload"):
        for path in sorted((tree / room).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(tree / room.partition("/")[0])), path.read_bytes()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
