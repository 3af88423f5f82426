"""The far half of an encrypted release is for the devices in its list."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgesplit.crypto.permitted_devices import PERMITTED_FILE, append_permitted, write_permitted
from edgesplit.errors import NotFound
from edgesplit.oip import protocol as oip
from edgesplit_offload.models.permissions import OPERATOR, ReleasePermissions

SECRET, PLAIN, ABSENT = "a" * 64, "b" * 64, "c" * 64


@pytest.fixture
def releases(tmp_path: Path) -> Path:
    for digest in (SECRET, PLAIN):
        (tmp_path / digest).mkdir()
    write_permitted(tmp_path / SECRET, {"cam-1"})
    return tmp_path


@pytest.fixture
def permissions(releases: Path) -> ReleasePermissions:
    return ReleasePermissions(releases, look_every_s=0.0)


def test_any_enrolled_device_ran_the_far_half_of_any_encrypted_release(permissions: ReleasePermissions) -> None:
    """A device without keys of it is told that it is not here; a plain release is everybody's."""
    assert permissions.allows(SECRET, "cam-1") and permissions.allows(SECRET, OPERATOR)
    assert permissions.allows(SECRET, None), "a server without certificates listens on loopback only"
    assert permissions.allows(PLAIN, "thief") and not permissions.allows(SECRET, "thief")
    with pytest.raises(NotFound, match=f"^release {SECRET[:12]} is not here$"):
        permissions.check_model(oip.remote_name(SECRET, "pi", "cut-1"), "thief")


@pytest.mark.parametrize("name", ["", "x", "..", f"../{SECRET}.pi.cut-1", f"{SECRET.upper()}.pi.cut-1", "(relayed)"])
def test_names_that_are_no_models_lead_to_no_file(permissions: ReleasePermissions, name: str) -> None:
    """They pass the check, whose caller finds no such model; lists show them to operators only."""
    permissions.check_model(name, "thief")
    assert permissions.allows_model(name, OPERATOR) and not permissions.allows_model(name, "thief")


def test_a_list_is_read_again_when_it_changes(permissions: ReleasePermissions, releases: Path) -> None:
    """A device that was added may use the release at once; a line that is not complete yet counts for nobody."""
    assert not permissions.allows(SECRET, "cam-2")
    append_permitted(releases / SECRET, ["cam-2", "cam-3"])
    assert permissions.allows(SECRET, "cam-2") and permissions.allows(SECRET, "cam-3")
    with (releases / SECRET / PERMITTED_FILE).open("ab") as file:
        file.write(b"cam-4")
    assert not permissions.allows(SECRET, "cam-4")
    write_permitted(releases / SECRET, {"cam-4"})
    assert permissions.allows(SECRET, "cam-4") and not permissions.allows(SECRET, "cam-1")


def test_a_list_that_cannot_be_read_permits_nobody(permissions: ReleasePermissions, releases: Path) -> None:
    """Instead of everybody."""
    (releases / SECRET / PERMITTED_FILE).unlink()
    os.symlink(PERMITTED_FILE, releases / SECRET / PERMITTED_FILE)  # ELOOP
    assert not permissions.allows(SECRET, "cam-1")


def test_invented_releases_take_no_memory(permissions: ReleasePermissions) -> None:
    """Each answer is forgotten."""
    for number in range(100):
        assert permissions.allows(f"{number:064x}", "thief")
    assert permissions.allows(ABSENT, "thief") and len(permissions._known) == 0
