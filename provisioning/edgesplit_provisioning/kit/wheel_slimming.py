"""Removes from wheels what devices never use: tests, headers, build tools, unused image formats, symbols for debuggers.

About a third of the unpacked wheels of an agent is never read on a device (docs/footprint.md). What is removed is
listed here; a shared library that a remaining file needs stays. RECORD is rewritten, so that pip's checks pass.
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

from edgesplit.file_hash import file_sha256

REMOVED_FILES: Mapping[str, tuple[str, ...]] = {
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
"""Patterns of files to remove, by distribution: tests, build tools and lazily loaded subpackages of numpy; text, colour
profiles and newer picture formats of pillow; test vectors; the second zstandard backend; onnxruntime's model tools."""
REMOVED_EVERYWHERE = ("*.pyi", "*.exe")
"""Patterns of files to remove from every wheel: type stubs, and programs for Windows."""
OLDEST_SLIMMED = {"numpy": 2}
"""Oldest major version that is slimmed: importing an older numpy loads all of its subpackages."""
_RULES = json.dumps([3, REMOVED_EVERYWHERE, sorted(REMOVED_FILES.items())])
RULES_HASH = hashlib.sha256(_RULES.encode()).hexdigest()[:16]
"""Hash of the removal rules, part of the cache key."""


def slim_wheel(wheel: Path, cache: Path) -> Path:
    """The slimmed wheel, under the same file name, in the cache."""
    output = cache / f"{file_sha256(wheel)[:32]}-{RULES_HASH}" / wheel.name
    if output.exists():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=".part-", dir=output.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            _rewrite(wheel, out)
        os.replace(part, output)
    finally:
        Path(part).unlink(missing_ok=True)
    return output


def _rewrite(wheel: Path, out: object) -> None:
    with zipfile.ZipFile(wheel) as whole:
        entries = {entry_info.filename: entry_info for entry_info in whole.infolist() if not entry_info.is_dir()}
        content = {name: whole.read(name) for name in entries}
    distribution, version, _, _ = parse_wheel_filename(wheel.name)
    patterns = REMOVED_FILES.get(distribution, ()) if version.major >= OLDEST_SLIMMED.get(distribution, 0) else ()
    kept = {name: strip_elf(content[name]) for name in sorted(files_to_keep(content, (*REMOVED_EVERYWHERE, *patterns)))}
    record = next(name for name in kept if name.endswith(".dist-info/RECORD"))
    kept[record] = _record(kept, record)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as output:  # type: ignore[call-overload]
        for name, data in kept.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = entries[name].external_attr
            entry.create_system = 3
            output.writestr(entry, data, zipfile.ZIP_DEFLATED)


def files_to_keep(content: Mapping[str, bytes], patterns: tuple[str, ...]) -> set[str]:
    """Names of the files to keep: all that match no pattern, and bundled libraries that a kept file loads by name."""
    removed = {name for name in content if any(fnmatchcase(name, pattern) for pattern in patterns)}
    kept = set(content) - removed
    # Libraries in `.libs` are loaded by name: keep those whose name occurs in a kept object, and repeat, since a
    # library that was added may load others.
    while True:
        objects = [content[name] for name in kept if ".so" in name]
        needed = {
            name for name in removed if ".libs/" in name and any(_c_string(name) in library for library in objects)
        }
        if not needed:
            return kept
        kept |= needed
        removed -= needed


def strip_elf(data: bytes) -> bytes:
    """A 64-bit little-endian shared object without the trailing data that only debuggers and linkers read; other data
    is returned unchanged."""
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64 or struct.unpack_from("<H", data, 16)[0] != 3:
        return data
    # ELF-64 header: e_phoff at 32, e_phentsize and e_phnum at 54. The loader reads only the program headers and the
    # segments that they name (p_offset at 8, p_filesz at 32 of each); section headers and debug data lie behind.
    table, size, count = (*struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54))
    end = table + size * count
    for number in range(count):
        offset, length = struct.unpack_from("<8xQ16xQ", data, table + size * number)
        end = max(end, offset + length)
    if end >= len(data):
        return data
    short = bytearray(data[:end])
    struct.pack_into("<Q", short, 40, 0)  # offset of the section headers: there are none any more
    struct.pack_into("<HH", short, 60, 0, 0)
    return bytes(short)


def _c_string(name: str) -> bytes:
    return name.rsplit("/", 1)[-1].encode() + b"\0"


def _record(kept: Mapping[str, bytes], record: str) -> bytes:
    lines = []
    for name, data in kept.items():
        if name != record:
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f'"{name}"' if "," in name else name)
            lines[-1] += f",sha256={digest},{len(data)}\n"
    return "".join([*lines, f"{record},,\n"]).encode()
