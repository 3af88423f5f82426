"""Kits: their content per device; corrupt, missing or incompatible parts are reported before a card is written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import zstandard

import edgesplit
from edgesplit.errors import MalformedMessage, TrustError, UsageError
from edgesplit_provisioning.kit import Target, build_kit, own_wheel, read_kit
from edgesplit_provisioning.kit.manifest import FILE_NAME, decode, encode, list_files
from edgesplit_provisioning.kit.target import needed_glibc
from edgesplit_provisioning.kit.wheelhouse import collect_wheels, constraints, missing_requirements, parse_pins
from support.kits import made_up_wheel


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with made-up wheels in `wheelhouse`, and a cache for kits of them."""
    folder = tmp_path_factory.mktemp("kits")
    (folder / "wheelhouse").mkdir()
    for name, version in (("msgspec", "1.0"), ("tuf", "6.0"), ("pip", "99.0")):
        made_up_wheel(folder / "wheelhouse", name, version)
    return folder


@pytest.fixture
def wheelhouse(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Made-up wheels of everything that an agent needs, which here is little."""
    monkeypatch.setattr(own_wheel, "requirements", lambda extras: ["msgspec>=0.19", "tuf"])
    return made_up / "wheelhouse"


def built(wheelhouse: Path, target: Target | None = None, cache: Path | None = None, **more: object) -> Path:
    cache = cache or wheelhouse.parent / "cache"
    kit = build_kit(target or Target(), cache=cache, wheelhouse=wheelhouse, **more)  # type: ignore[arg-type]
    return kit.files["kit.json"].parent


def copied(wheelhouse: Path, folder: Path) -> Path:
    shutil.copytree(wheelhouse, folder)
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("2.7", "aarch64"), "no kit for Python '2.7'"),
        (("3.11", "armv7l"), "no kit for the machine 'armv7l'"),
        (("3.11", "aarch64", "musl"), "not a version of the GNU C library"),
    ],
)
def test_a_platform_without_wheels_is_refused(words: tuple[str, ...], said: str) -> None:
    """Immediately, with the list of supported ones."""
    with pytest.raises(UsageError, match=said):
        Target(*words)


def test_the_required_glibc_is_read_from_wheel_names() -> None:
    """A wheel of several tags runs from the oldest on; the kit needs the newest of those."""
    several = "a-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl"
    two = "b-1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"
    assert needed_glibc([several, "c-1-py3-none-any.whl"]) == "2.17"
    assert needed_glibc([several, two]) == "2.27"
    assert needed_glibc([several, two, "d-1-cp311-abi3-manylinux_2_34_x86_64.whl"]) == "2.34"


def test_requirements_are_evaluated_for_the_target_python(tmp_path: Path) -> None:
    """Markers apply to the device's Python and machine, through extras and their own requirements."""
    top = made_up_wheel(
        tmp_path,
        "top",
        requires=["old>=2; python_version < '3.11'", "base[fast]", "arm; platform_machine == 'aarch64'"],
    )
    base = made_up_wheel(tmp_path, "base", requires=["quick==3; extra == 'fast'", "never; extra == 'slow'"])
    arm = made_up_wheel(tmp_path, "arm")
    assert missing_requirements([top, base, arm], ["top>=1"], Target("3.11").markers) == ["quick==3"]
    assert missing_requirements([top, base], ["top"], Target("3.10").markers) == ["arm", "old>=2", "quick==3"]


def test_a_kit_for_an_older_python_includes_its_backports(tmp_path: Path, wheelhouse: Path) -> None:
    """pip itself would evaluate the marker for the Python that it runs on."""
    more = copied(wheelhouse, tmp_path / "wheelhouse")
    made_up_wheel(more, "msgspec", "90.0", requires=["backport; python_version < '3.11'"])
    made_up_wheel(more, "backport")
    held = read_kit(built(more, Target("3.10"))).manifest.wheels
    assert {"backport-1.0-py3-none-any.whl", "msgspec-90.0-py3-none-any.whl"} < set(held)


def test_a_kit_is_reproducible_from_the_same_wheels(tmp_path: Path, wheelhouse: Path) -> None:
    """In another cache, at another time; in the same cache it is not built twice."""
    first = built(wheelhouse)
    again = built(wheelhouse)
    other = built(wheelhouse, cache=tmp_path)
    assert first == again
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }


def test_a_corrupt_cache_is_downloaded_again(wheelhouse: Path) -> None:
    """Whatever happened to its files, the resulting kit is complete."""
    folder = built(wheelhouse)
    whole = (folder / "wheels.tar").read_bytes()
    (folder / "wheels.tar").write_bytes(whole[:-1])
    for wheel in (wheelhouse.parent / "cache" / "wheels").rglob("tuf*"):
        wheel.write_bytes(b"")
    assert (built(wheelhouse) / "wheels.tar").read_bytes() == whole


def test_a_missing_wheel_in_the_wheelhouse_is_named(tmp_path: Path, wheelhouse: Path) -> None:
    """There is no request to the network, whatever pip's configuration is."""
    less = copied(wheelhouse, tmp_path / "wheelhouse")
    next(less.glob("tuf-*")).unlink()
    with pytest.raises(UsageError, match=r"no wheels for Python 3\.11 on aarch64.*tuf"):
        built(less)


def test_a_kit_includes_extra_files_and_an_interpreter(tmp_path: Path, wheelhouse: Path) -> None:
    """An interpreter is stored as gzip, which every device unpacks, whatever its source format."""
    interpreter = tmp_path / "python.tar"
    with tarfile.open(interpreter, "w") as archive:
        archive.add(__file__, "python/bin/python3.11")
    packed = tmp_path / "python.tar.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(interpreter.read_bytes()))
    folder = built(wheelhouse, interpreter=packed, more={"coral.tar": interpreter})
    with tarfile.open(folder / "python.tar.gz") as archive:
        assert archive.getnames() == ["python/bin/python3.11"]
    assert (folder / "coral.tar").read_bytes() == interpreter.read_bytes()
    packed.write_bytes(packed.read_bytes()[:40])
    with pytest.raises(UsageError, match="truncated or corrupt"):
        built(wheelhouse, interpreter=packed)
    with tarfile.open(other := tmp_path / "other.tar.gz", "w:gz") as archive:
        archive.add(__file__, "python/bin/python3.12")
    with pytest.raises(UsageError, match=r"holds no python/bin/python3\.11"):
        built(wheelhouse, interpreter=other)
    with pytest.raises(UsageError, match=r"neither a \.tar\.gz nor a \.tar\.zst"):
        built(wheelhouse, interpreter=interpreter)
    with pytest.raises(UsageError, match="not a valid file name in a kit"):
        built(wheelhouse, more={"Coral Files": interpreter})


def test_a_copied_kit_is_verified(tmp_path: Path, wheelhouse: Path) -> None:
    """A file that a card did not keep is named, with the kit at hand and with only the copy."""
    folder = built(wheelhouse)
    copy = tmp_path / "card"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    kit = read_kit(folder)
    kit.check(copy)
    assert read_kit(copy).manifest == kit.manifest
    (copy / "wheels.tar").write_bytes((copy / "wheels.tar").read_bytes()[::-1])
    with pytest.raises(MalformedMessage, match=r"wheels\.tar is not what was written"):
        kit.check(copy)
    with pytest.raises(MalformedMessage, match=r"wheels\.tar is missing or corrupt"):
        read_kit(copy)


def test_kit_file_names_are_safe_on_fat(wheelhouse: Path) -> None:
    """Lower case and an extension; a description that lists other paths is refused."""
    folder = built(wheelhouse)
    described = read_kit(folder).manifest
    assert all(FILE_NAME.fullmatch(file.name) for file in described.files)
    raw = encode(described)
    assert decode(raw) == described
    for name in ("../x.tar", "/etc/passwd", "A.TAR", "a", "a b.tar"):
        with pytest.raises(MalformedMessage, match="not a valid file name in a kit"):
            decode(raw.replace(b'"wheels.tar"', json.dumps(name).encode()))
    for spoilt in (b"", raw[:-20], raw.replace(b"kit/1", b"kit/2"), b"[" * 9_000, raw + b" " * 70_000):
        with pytest.raises(MalformedMessage):
            decode(spoilt)
    with pytest.raises(UsageError):
        list_files({"UPPER.TAR": folder / "wheels.tar"})


def test_the_device_wheel_contains_the_device_packages_only(tmp_path: Path) -> None:
    """No controller, no command line, no pictures; it offers no extras of missing packages; the same bytes every
    time."""
    (tmp_path / "again").mkdir()
    made = own_wheel.write(tmp_path)
    assert made.read_bytes() == own_wheel.write(tmp_path / "again").read_bytes()
    with zipfile.ZipFile(made) as archive:
        names = archive.namelist()
        headers = archive.read(f"edgesplit-{own_wheel.version()}.dist-info/METADATA").decode()
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == set(own_wheel.PACKAGES)
    assert "edgesplit/py.typed" in names and not [name for name in names if "__pycache__" in name]
    assert "Provides-Extra: agent\n" in headers and "fastapi" not in headers and "controller" not in headers
    assert own_wheel.version() == f"{edgesplit.__version__}+device" and f"Version: {own_wheel.version()}\n" in headers


def test_an_installed_wheel_is_repacked_from_its_record(tmp_path: Path) -> None:
    """A kit holds what was installed from the wheel: no file that was added, and a changed file is refused."""
    whole = tmp_path / "whole"
    installed = tmp_path / "installed"
    for folder in (whole, installed):
        folder.mkdir()
    source = own_wheel.write(whole)
    with zipfile.ZipFile(source) as archive:
        archive.extractall(installed)
    (installed / "edgesplit_agent" / "added.py").write_text("")
    script = (
        "import sys, pathlib\n"
        "ours = ('/sdk', '/agent', '/offload')\n"
        f"sys.path[:] = [{str(installed)!r}, *[path for path in sys.path if not path.endswith(ours)]]\n"
        "from edgesplit_provisioning.kit import own_wheel\n"
        "own_wheel.version = lambda: '0+again'\n"
        f"print(own_wheel.write(pathlib.Path({str(tmp_path)!r})))\n"
    )

    def repack() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    done = repack()
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(done.stdout.strip()) as archive, zipfile.ZipFile(source) as before:
        rooms = {name: archive.read(name) for name in archive.namelist() if "dist-info" not in name}
        assert rooms == {name: before.read(name) for name in before.namelist() if "dist-info" not in name}
    (installed / "edgesplit_agent" / "main.py").write_text("changed")
    done = repack()
    assert (
        done.returncode != 0
        and TrustError.__name__ in done.stderr
        and "main.py is not what was installed" in done.stderr
    )


def test_pins_match_the_repositorys_constraints() -> None:
    """Comments are no pins; names are compared as pip does."""
    assert parse_pins("# of them\nA_b.C==1.0\nd==2 # why\n\n") == {"a-b-c": "1.0", "d": "2"}
    assert {"numpy", "cryptography", "pip"} <= set(constraints())


def test_a_missing_wheel_folder_is_refused(tmp_path: Path) -> None:
    """Before pip runs."""
    with pytest.raises(UsageError, match="no folder of wheels"):
        collect_wheels(Target(), ["numpy"], tmp_path, wheelhouse=tmp_path / "none", on_progress=print)
