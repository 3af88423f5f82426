"""Files that a device does not need are removed from a kit's wheels, and the rest works."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edgesplit_provisioning.kit.wheel_slimming import REMOVED_FILES, files_to_keep, slim_wheel, strip_elf
from support.kits import made_up_wheel, repacked

TRIED = """
import io, sys
sys.path.insert(0, sys.argv[1])
from PIL import Image, features
assert Image.__file__.startswith(sys.argv[1])
held = io.BytesIO()
Image.new("RGB", (64, 48), (200, 30, 30)).save(held, "JPEG")
seen = Image.open(io.BytesIO(held.getvalue()))
seen.draft("RGB", (32, 24))
seen.load()
assert seen.resize((16, 12)).getpixel((3, 3))[0] > 150
"""


def test_libraries_needed_by_kept_ones_are_kept() -> None:
    """By the names in the kept files, and transitively."""
    content = {
        "p/kept.so": b"..libone-1.so\0..",
        "p/away.so": b"..libthree.so\0",
        "p.libs/libone-1.so": b"..libtwo.so.6\0",
        "p.libs/libtwo.so.6": b"",
        "p.libs/libthree.so": b"",
        "p/tests/test.py": b"libone-1.so\0",
    }
    kept = files_to_keep(content, ("p/away.*", "p.libs/*", "p/tests/*"))
    assert kept == {"p/kept.so", "p.libs/libone-1.so", "p.libs/libtwo.so.6"}


@pytest.mark.parametrize("data", [b"", b"text", b"\x7fELF\x02\x01", b"\x7fELF\x01\x01" + bytes(60), bytes(200)])
def test_files_other_than_shared_objects_are_unchanged(data: bytes) -> None:
    """A truncated shared object is not stripped either."""
    assert strip_elf(data) == data


def test_a_wheel_without_removable_files_keeps_its_metadata(tmp_path: Path) -> None:
    """Same name, same files, a matching RECORD; created once, and the same bytes again."""
    wheel = made_up_wheel(tmp_path, "plain", files={"plain/__init__.py": "x = 1", "plain/a,b.txt": "odd"})
    made = slim_wheel(wheel, tmp_path / "cache")
    assert made.name == wheel.name and slim_wheel(wheel, tmp_path / "cache") == made
    assert slim_wheel(wheel, tmp_path / "other").read_bytes() == made.read_bytes()
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(made) as after:
        assert sorted(before.namelist()) == sorted(after.namelist())
        assert '"plain/a,b.txt",sha256=' in after.read("plain-1.0.dist-info/RECORD").decode()


def test_slimmed_pillow_still_decodes_camera_formats(tmp_path: Path) -> None:
    """The one that is installed here, slimmed, in a process of its own: its libraries load without section tables."""
    whole = repacked(tmp_path, "pillow")
    made = slim_wheel(whole, tmp_path / "cache")
    with zipfile.ZipFile(made) as archive:
        names = archive.namelist()
        assert not [name for name in names if "avif" in name.lower() and ".so" in name]
        archive.extractall(tmp_path / "unpacked")
        slim = sum(entry.file_size for entry in archive.infolist())
    with zipfile.ZipFile(whole) as archive:
        assert slim < 0.8 * sum(entry.file_size for entry in archive.infolist())
    subprocess.run([sys.executable, "-I", "-c", TRIED, str(tmp_path / "unpacked")], check=True, timeout=120)


def test_only_listed_distributions_are_slimmed() -> None:
    """Patterns belong to one distribution each, and remove no whole one."""
    assert not [pattern for value in REMOVED_FILES.values() for pattern in value if pattern.startswith("*")]


def test_numpy_1_keeps_the_parts_it_imports(tmp_path: Path) -> None:
    """Importing numpy 1 loads parts that numpy 2 loads on their first use."""
    for version, kept in (("1.26.4", True), ("2.4.6", False)):
        wheel = made_up_wheel(tmp_path, "numpy", version, files={"numpy/ma/core.py": "", "numpy/__init__.py": ""})
        with zipfile.ZipFile(slim_wheel(wheel, tmp_path / "cache")) as made:
            assert ("numpy/ma/core.py" in made.namelist()) is kept
