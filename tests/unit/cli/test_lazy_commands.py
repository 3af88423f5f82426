"""`edgectl --help` describes every command and imports none."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from edgesplit_cli.lazy_commands import LazyCommands, LazyGroup
from edgesplit_cli.main import COMMANDS, cli

IMPORTED = """
import sys
from click.testing import CliRunner
from edgesplit_cli.main import cli
assert CliRunner().invoke(cli, ["--help"]).exit_code == 0
print([name for name in sys.modules if name.startswith("edgesplit_cli.commands.")
       or name.split(".")[0] in ("numpy", "sqlalchemy", "onnx", "edgesplit_controller", "edgesplit_partitioner")])
"""


def test_help_imported_every_command_to_name_it() -> None:
    """It took over a second; in a fresh process the modules of commands, and what they need, stay unloaded."""
    run = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_outlines_are_the_commands_own_help() -> None:
    """Read from the source, equal to what an import gives."""
    assert isinstance(cli, LazyGroup)
    outlines = cli.outlines()
    assert set(outlines) == set(COMMANDS)
    for name, outline in outlines.items():
        assert outline.get_short_help_str(90) == cli.commands[name].get_short_help_str(90) != "", name


def test_names_of_commands_are_completed_without_importing_them() -> None:
    """With their help."""
    with cli.make_context("edgectl", ["x"], resilient_parsing=True) as context:
        items = {item.value: item.help for item in cli.shell_complete(context, "pl")}
        assert list(items) == ["plan"] and (items["plan"] or "").startswith("Plan a MODEL")
        assert "--data" in {item.value for item in cli.shell_complete(context, "--da")}


def test_an_empty_group_has_help() -> None:
    """A group without commands, and one whose command has no source here."""
    assert CliRunner().invoke(LazyGroup("empty"), ["--help"]).exit_code == 0
    with pytest.raises(KeyError):
        LazyCommands({})["nothing"]
    assert isinstance(LazyGroup("empty"), click.Group)


def test_push_was_an_unknown_command_without_a_word_of_model_push() -> None:
    """A command of a group that is given without the group; a typo still gets the nearest name."""
    missing = CliRunner().invoke(cli, ["push", "x.onnx"])
    assert missing.exit_code == 2 and "Did you mean 'agent push' or 'model push'?" in missing.output
    typo = CliRunner().invoke(cli, ["modle", "push"])
    assert typo.exit_code == 2 and "'model'" in typo.output
