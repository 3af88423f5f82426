"""The parser of os-release(5)."""

from __future__ import annotations

from edgesplit_provisioning.os_release import parse_os_release


def test_os_release_is_read_without_a_shell() -> None:
    """Quotes come off, substitutions stay letters, the first of two counts, comments and other lines are skipped."""
    assert parse_os_release(b'# x\nID="debian"\nID=evil\nNAME=\'a "b"\'\nPRETTY_NAME="$(id) \\"x\\""\nlower=1\n') == {
        "ID": "debian", "NAME": 'a "b"', "PRETTY_NAME": '$(id) "x"',
    }  # fmt: skip
