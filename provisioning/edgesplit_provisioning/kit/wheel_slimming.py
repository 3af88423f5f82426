"""Wheels without what no device uses: tests, headers, compilers' leavings, formats that no camera sends.

A third of what an agent's wheels unpack to is read by nobody there (docs/footprint.md). What is left away is named
here; a library that something which stays needs stays too. RECORD says what is in the wheel now, so pip's checks hold.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
import tempfile
import zipfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.utils import parse_wheel_filename

LEFT_AWAY: Mapping[str, tuple[str, ...]] = {
    "numpy": (
        "numpy/tests/*", "numpy/*/tests/*", "numpy/f2py/*", "numpy/distutils/*", "numpy/_core/include/*",
        "numpy/_core/lib/*", "numpy/random/lib/*", "numpy/random/_examples/*", "numpy/polynomial/*", "numpy/testing/*",
        "numpy/ma/*", "numpy/fft/*", "numpy/_core/_simd.*.so", "numpy/_core/_*_tests.*.so",
    ),
    "pillow": (
        "PIL/_avif.*", "PIL/_webp.*", "PIL/_imagingft.*", "PIL/_imagingcms.*", "PIL/_imagingtk.*",
        "pillow.libs/libavif*", "pillow.libs/libwebp*", "pillow.libs/libsharpyuv*", "pillow.libs/libfreetype*",
        "pillow.libs/libharfbuzz*", "pillow.libs/liblcms2*", "pillow.libs/libpng*", "pillow.libs/libbrotli*",
    ),
    "securesystemslib": ("securesystemslib/_vendor/ed25519/test_data/*",),
    "zstandard": ("zstandard/_cffi.*.so",),
    "onnxruntime": (
        "onnxruntime/transformers/*", "onnxruntime/tools/*", "onnxruntime/quantization/*", "onnxruntime/datasets/*",
    ),
}  # fmt: skip
"""By distribution: tests, build tools and parts that load by themselves where used; text, colour profiles and newer
picture formats; test vectors; the second of two backends; what makes models."""
EVERYWHERE = ("*.pyi", "*.exe")
"""What only type checkers read, and programs of another system."""
SINCE = {"numpy": 2}
"""Before that version, importing it loads all of its parts."""
RECIPE = hashlib.sha256(json.dumps([3, EVERYWHERE, sorted(LEFT_AWAY.items())]).encode()).hexdigest()[:16]
"""Changes with what is done to a wheel."""


def slimmed(wheel: Path, cache: Path) -> Path:
    """The same wheel with less in it, under the same name, in the cache."""
    with wheel.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    made = cache / f"{digest[:32]}-{RECIPE}" / wheel.name
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=".part-", dir=made.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            _rewrite(wheel, out)
        os.replace(part, made)
    finally:
        Path(part).unlink(missing_ok=True)
    return made


def _rewrite(wheel: Path, out: object) -> None:
    with zipfile.ZipFile(wheel) as whole:
        entries = {one.filename: one for one in whole.infolist() if not one.is_dir()}
        content = {name: whole.read(name) for name in entries}
    distribution, version, _, _ = parse_wheel_filename(wheel.name)
    named = LEFT_AWAY.get(distribution, ()) if version.major >= SINCE.get(distribution, 0) else ()
    kept = {name: loadable(content[name]) for name in sorted(staying(content, (*EVERYWHERE, *named)))}
    record = next(name for name in kept if name.endswith(".dist-info/RECORD"))
    kept[record] = _record(kept, record)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as made:  # type: ignore[call-overload]
        for name, data in kept.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = entries[name].external_attr
            entry.create_system = 3
            made.writestr(entry, data, zipfile.ZIP_DEFLATED)


def staying(content: Mapping[str, bytes], patterns: tuple[str, ...]) -> set[str]:
    """What is kept: all that no pattern names, and libraries among the rest that something kept loads by name."""
    away = {name for name in content if any(fnmatchcase(name, pattern) for pattern in patterns)}
    kept = set(content) - away
    while True:
        objects = [content[name] for name in kept if ".so" in name]
        needed = {name for name in away if ".libs/" in name and any(_file(name) in one for one in objects)}
        if not needed:
            return kept
        kept |= needed
        away -= needed


def loadable(data: bytes) -> bytes:
    """A shared object without what only debuggers and linkers read, which lies behind all that is loaded; anything else
    as it is. 64 bit, little-endian."""
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64 or struct.unpack_from("<H", data, 16)[0] != 3:
        return data
    table, size, count = (*struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54))
    end = table + size * count
    for number in range(count):
        offset, length = struct.unpack_from("<8xQ16xQ", data, table + size * number)
        end = max(end, offset + length)
    if end >= len(data):
        return data
    short = bytearray(data[:end])
    struct.pack_into("<Q", short, 40, 0)  # no section headers any more
    struct.pack_into("<HH", short, 60, 0, 0)
    return bytes(short)


def _file(name: str) -> bytes:
    return name.rsplit("/", 1)[-1].encode() + b"\0"


def _record(kept: Mapping[str, bytes], record: str) -> bytes:
    lines = []
    for name, data in kept.items():
        if name != record:
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f'"{name}"' if "," in name else name)
            lines[-1] += f",sha256={digest},{len(data)}\n"
    return "".join([*lines, f"{record},,\n"]).encode()
