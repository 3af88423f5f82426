"""The shell completes names that the controller knows, and nothing where there is no controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import LinkError
from edgesplit_cli.main import cli

ANSWERS: dict[str, list[dict[str, str]]] = {
    "/v1/models": [{"model": "digits@1"}, {"model": "digits@2"}, {"model": "doorbell@1"}],
    "/v1/devices": [{"name": "cam-1"}, {"name": "cam-2"}, {"name": "webcam"}],
}


class KnowsNames(ControllerClient):
    """A controller with models and devices."""

    def __init__(self) -> None:
        """Nothing is connected."""

    def get(self, path: str, **query: Any) -> Any:
        """The list."""
        return ANSWERS[path]


def completed(*words: str) -> list[str]:
    """What the shell offers for the last word."""
    return [item.value for item in ShellComplete(cli, {}, "edgectl", "_EDGECTL_COMPLETE").get_completions(
        list(words[:-1]), words[-1])]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("infer", "d"), ["digits", "doorbell"]),
        (("model", "show", "digits@"), ["digits@1", "digits@2"]),
        (("deploy", "digits", "--to", "cam"), ["cam-1", "cam-2"]),
        (("device", "show", "w"), ["webcam"]),
        (("plan", "digits", "--device", "jetson-n"), ["jetson-nano"]),
        (("device", "claim", "x", "--profile", "raspberrypi3b"), ["raspberrypi3b+"]),
    ],
)
def test_names_of_models_devices_and_profiles_were_not_completed(
    words: tuple[str, ...], offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments and options alike; versions once an @ is typed."""
    monkeypatch.setattr(ControllerClient, "connect", lambda *_, **__: KnowsNames())
    assert completed(*words) == offered


def test_the_controller_of_the_typed_options_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--data` and `--credentials` count, though the command does not run; and one that hangs is left soon."""
    asked: list[tuple[Path | None, Path | None, float]] = []

    def connect(data: Path | None, file: Path | None, *, timeout_s: float) -> ControllerClient:
        asked.append((data, file, timeout_s))
        raise LinkError("no controller")

    monkeypatch.setattr(ControllerClient, "connect", connect)
    credentials = tmp_path / "anna.json"
    credentials.write_text("{}")
    assert completed("--data", str(tmp_path), "device", "show", "") == []
    assert completed("--credentials", str(credentials), "device", "show", "") == []
    assert asked[0] == (tmp_path, None, 2.0) and asked[1][1:] == (credentials, 2.0)
    assert isinstance(cli, click.Group)


def test_files_are_offered_where_no_model_begins_like_this(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` and `check` take files too."""
    monkeypatch.setattr(ControllerClient, "connect", lambda *_, **__: KnowsNames())
    shell = ShellComplete(cli, {}, "edgectl", "_EDGECTL_COMPLETE")
    assert [item.type for item in shell.get_completions(["check"], "models/")] == ["file"]
