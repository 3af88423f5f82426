"""`edgectl device remove`: what it asks, what it calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgesplit_cli.commands import device
from edgesplit_cli.main import cli


class Controller:
    """Remembers the paths that were called with DELETE."""

    def __init__(self) -> None:
        self.deleted: list[str] = []

    def delete(self, path: str) -> Any:
        """The API's answer to a removal."""
        self.deleted.append(path)
        return {"device": "cam", "state": "removed"}


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    stub = Controller()
    monkeypatch.setattr(device, "connect", lambda _data: stub)
    return stub


@pytest.mark.parametrize(
    ("arguments", "typed", "called"),
    [
        (["cam", "--yes"], "", ["/v1/devices/cam/record"]),
        (["cam", "--yes", "--force"], "", ["/v1/devices/cam/record?force=true"]),
        (["cam"], "y\n", ["/v1/devices/cam/record"]),
        (["cam"], "n\n", []),
        (["cam"], "", []),
        (["x?force=true", "--yes"], "", ["/v1/devices/x%3Fforce%3Dtrue/record"]),
        (["../x", "--yes"], "", []),
    ],
)
def test_a_device_is_removed_only_when_that_was_confirmed(
    controller: Controller, tmp_path: Path, arguments: list[str], typed: str, called: list[str]
) -> None:
    """Without --yes it asks; a name cannot change what is called."""
    done = CliRunner().invoke(cli, ["--data", str(tmp_path), "device", "remove", *arguments], input=typed)
    assert controller.deleted == called
    assert (done.exit_code == 0) == bool(called), done.output
    assert ("its name can be claimed again" in done.output) == bool(called)
    assert ("delete its history and logs" in done.output) == ("--yes" not in arguments)


def test_a_claimed_device_was_shown_as_an_empty_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is missing is said, and what to do; no figures of a device that never ran."""
    claim = {"name": "cam", "state": "claimed", "device_class": "raspberrypi4", "link": "wifi", "models": []}
    monkeypatch.setattr(device, "connect", lambda _data: type("Api", (), {"get": lambda _self, _path: claim})())
    done = CliRunner().invoke(cli, ["--data", str(tmp_path), "device", "show", "cam"])
    assert done.exit_code == 0 and "not enrolled yet: start its agent with the claim" in done.output
    assert "p50" not in done.output and "session" not in done.output
