"""Every dependency is installed by the SHA-256 of its published files, in the versions that the tests ran with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomllib

from edgesplit_provisioning.kit.wheelhouse import parse_pins
from support import REPOSITORY

FILES = sorted((REPOSITORY / "requirements").glob("*.txt"))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PINS = parse_pins((REPOSITORY / "constraints.txt").read_text())
_REQUIREMENT = re.compile(
    r"^([A-Za-z0-9._-]+)==(\S+)(?: ; [^\\\n]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE
)


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(path: Path) -> dict[str, str]:
    """Versions by name; an AssertionError for a line that is no requirement with hashes."""
    text = path.read_text()
    assert _REQUIREMENT.sub("", text).replace("# Made by tools/lock.", "").strip() == ""
    return {normalised(found[1]): found[2] for found in _REQUIREMENT.finditer(text)}


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_dependencies_were_installed_without_hashes(path: Path) -> None:
    """Each has some, and the version that constraints.txt names (`tools/lock` writes the files anew)."""
    ours = {normalised(name): version for name, version in PINS.items()}
    found = pinned(path)
    assert found and {name: ours.get(name) for name in found} == found


@pytest.mark.parametrize(
    ("file", "extras"),
    [
        ("cli", ["cli"]),
        ("controller", ["cli", "s3"]),
        ("dev", ["dev"]),
        ("agent", ["agent", "tflite"]),
        ("offload", ["offload", "tflite"]),
    ],
)
def test_the_hashed_files_contain_every_dependency(file: str, extras: list[str]) -> None:
    """Of the extras that they stand for, and what builds edgesplit: nothing is fetched besides."""
    found = pinned(REPOSITORY / "requirements" / f"{file}.txt")
    wanted, known = {"hatchling", "editables"}, PROJECT["project"]["optional-dependencies"]
    waiting = [*PROJECT["project"]["dependencies"], *(entry for extra in extras for entry in known[extra])]
    while waiting:
        entry = waiting.pop()
        if (more := re.match(r"edgesplit\[(\w+)\]", entry)) is not None:
            waiting += known[more[1]]
        elif (name := re.match(r"[A-Za-z0-9._-]+", entry)) is not None:
            wanted.add(normalised(name[0]))
    assert wanted <= found.keys()


def test_an_isolated_build_took_any_hatchling() -> None:
    """pip applies constraints to no isolated build: the project names the version itself."""
    assert PROJECT["build-system"]["requires"] == [f"hatchling=={PINS['hatchling']}"]


def test_everything_that_installs_edgesplit_checks_hashes() -> None:
    """The setup of a checkout, the dashboard's tools and the images."""
    for path in (REPOSITORY / "tools" / "setup", REPOSITORY / "tools" / "dashboard"):
        assert "--require-hashes" in path.read_text(), path
    for path in sorted((REPOSITORY / "deploy" / "images").glob("*.Dockerfile")):
        installs = [line for line in path.read_text().splitlines() if "pip install" in line]
        assert len(installs) == 2 and "--require-hashes -r requirements/" in installs[0]
        assert "--no-deps --no-build-isolation ." in installs[1]
