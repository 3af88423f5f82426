"""Wheels become a version that can start, or nothing at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgesplit.errors import ModelRefused
from edgesplit.release.agent_release import Build, Target, this_machine
from edgesplit.release.manifest import Slice
from edgesplit_agent.releases.disk_quota import NoRoom
from edgesplit_agent.self_update.install import install_version
from edgesplit_agent.self_update.launcher import start_command
from edgesplit_agent.self_update.version_slots import Versions
from edgesplit_agent.self_update.version_store import VersionStore
from support.wheels import archive, small_agent, wheel

RELEASE = "d" * 64
MODULE = wheel("extra", "1.0", {"extra/__init__.py": "HERE = True\n"})


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VersionStore:
    monkeypatch.setattr(os, "sync", lambda: None)
    return VersionStore(tmp_path / "data")


def install(shelf: VersionStore, content: bytes, *, version: str = "0.3.0", target: Target | None = None) -> None:
    folder = shelf.folder.parent / "staged"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wheels.tar").write_bytes(content)
    build = Build(version, target or this_machine(), Slice("x", "agent", (), (), ()))
    install_version(shelf, RELEASE, build, folder, ("--launcher", "1"))


def test_wheels_become_an_environment_of_their_own(shelf: VersionStore) -> None:
    """It imports what its wheels hold and nothing of ours; pip, which a kit has for itself, is left out; a second time
    there is nothing to do."""
    install(shelf, archive(small_agent("0.3.0"), MODULE, wheel("pip", "1.0", {"pip/__init__.py": ""})))

    asked = "import extra, importlib.util as u; print(extra.HERE, u.find_spec('pip'), u.find_spec('msgspec'))"
    said = subprocess.run([shelf.python(RELEASE), "-I", "-B", "-c", asked], capture_output=True, text=True)

    assert said.stdout == "True None None\n", said.stderr
    assert shelf.damage(RELEASE) == ""
    (shelf.folder.parent / "staged" / "wheels.tar").unlink()
    install_version(shelf, RELEASE, Build("0.3.0", this_machine(), Slice("x", "agent", (), (), ())), Path("/nowhere"))


def test_starting_a_version_does_not_change_it(shelf: VersionStore) -> None:
    """Started as the launcher does, it writes nothing that would look like damage, its children neither."""
    install(shelf, archive(small_agent("0.3.0"), MODULE))
    release = Versions(installed="0.1.0", committed=RELEASE)
    command, environment = start_command(release, shelf, [], [], os.environ)
    load = "import extra, edgesplit_agent.version_check, subprocess, sys"
    child = "subprocess.run([sys.executable, '-c', 'import extra'], check=True)"
    flags = command[1 : command.index("-m")]
    subprocess.run([command[0], *flags, "-c", f"{load}; {child}"], check=True, env=environment)
    assert shelf.damage(RELEASE) == ""


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"no archive", "is no archive"),
        (archive(("notes.txt", b"x")), "is no wheel"),
        (archive(("broken-1.0-py3-none-any.whl", b"x")), "cannot be installed"),
        (archive(small_agent("0.3.0"), wheel("liar", "1.0", {"liar.py": ""}, lie=True)), "cannot be installed"),
        (archive(small_agent("0.3.0"), wheel("way", "1.0", {"../../../way.py": ""})), "cannot be installed"),
        (archive(small_agent("0.3.0", says="0.2.0")), "reports version 0.2.0"),
        (archive(small_agent("0.3.0", problem="too young")), "cannot run here: too young"),
        (archive(small_agent("0.3.0", body="import nothing_here")), "No module named 'nothing_here'"),
        (archive(small_agent("0.3.0", body="print('[]')")), "does not start here"),
        (archive(MODULE), "does not start here"),
    ],
)
def test_what_is_no_agent_is_never_put_in_place(shelf: VersionStore, content: bytes, why: str) -> None:
    """Each is refused with its reason, and leaves no version behind."""
    with pytest.raises(ModelRefused, match=why):
        install(shelf, content)
    assert not shelf.version_folder(RELEASE).exists() and not (shelf.folder.parent / "way.py").exists()


def test_a_version_that_is_spoilt_is_installed_anew(shelf: VersionStore) -> None:
    """Also where what is there cannot be read at all."""
    for name in ("installed.json", "pyvenv.cfg"):
        install(shelf, archive(small_agent("0.3.0")))
        (shelf.version_folder(RELEASE) / name).write_bytes(b"rot")
        install(shelf, archive(small_agent("0.3.0")))
        assert shelf.damage(RELEASE) == ""
    shelf.remove_others([])
    assert not list(shelf.folder.iterdir())


def test_a_full_disk_is_told_before_anything_is_unpacked(shelf: VersionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said how much is missing, and nothing is left behind; with room it goes on."""
    content = archive(small_agent("0.3.0"))
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
        with pytest.raises(NoRoom, match=r"no room for agent 0\.3\.0: installing it takes about 17 MB, 1 MB are free"):
            install(shelf, content)
    assert not list(shelf.folder.iterdir())
    install(shelf, content)
    assert shelf.damage(RELEASE) == ""


def test_an_installation_that_fails_leaves_nothing(shelf: VersionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up in the middle is not made fuller by what was half unpacked."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgesplit_agent.self_update.install._unpack", full)
    with pytest.raises(OSError, match="No space"):
        install(shelf, archive(small_agent("0.3.0")))
    assert not list(shelf.folder.iterdir())
