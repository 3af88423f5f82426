"""Frequently started programs import little: a thin client's command, a child that tries a model, a server beside a
controller."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edgesplit_cli.lazy_commands import LazyCommands
from edgesplit_cli.main import COMMANDS, cli

NOTHING_BIG = ("scipy", "sqlalchemy", "fastapi", "onnx", "onnxruntime", "matplotlib")
LOADS = [
    ("from edgesplit_cli.main import cli; cli.commands['device']", (*NOTHING_BIG, "numpy")),
    ("from edgesplit_cli.main import cli; cli.commands['deploy']", NOTHING_BIG),
    ("import edgesplit_partitioner.split_check.child", ("scipy", "sqlalchemy")),
    ("import edgesplit_partitioner.profiling.layers_child", ("scipy", "sqlalchemy")),
    ("import edgesplit_controller.model_registry.golden_child", ("scipy", "sqlalchemy", "fastapi")),
    ("import edgesplit_controller.app.offload_process", NOTHING_BIG),
    ("import edgesplit_controller.app.main", ("scipy", "matplotlib", "alembic", "boto3.session")),
    ("import edgesplit.trust.verification", ("boto3.session", "botocore.session")),
]


@pytest.mark.parametrize(("starts", "without"), LOADS)
def test_unneeded_libraries_are_not_imported(starts: str, without: tuple[str, ...]) -> None:
    """Each costs a tenth of a second or more, at every start."""
    command = [sys.executable, "-c", f"import sys; {starts}; print(*sys.modules)"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in without if name in loaded] == []


def test_every_lazy_command_can_be_loaded() -> None:
    """Commands that are not called are not loaded, so no other test would notice a wrong module name."""
    assert sorted(cli.commands) == sorted(COMMANDS) and len(cli.commands) == len(COMMANDS)
    assert {name: command.name for name, command in cli.commands.items()} == {name: name for name in COMMANDS}


def test_an_unknown_command_loads_nothing() -> None:
    """It is reported as for any group; and commands may still be added and removed."""
    commands = LazyCommands({"device": "devices"})
    assert "devise" not in commands and commands.get("devise") is None
    commands["more"] = cli.commands["doctor"]
    del commands["device"]
    assert list(commands) == ["more"] and commands["more"].name == "doctor"
