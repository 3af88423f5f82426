"""Usage errors say what to type instead."""

from __future__ import annotations

import click
import pytest

from edgesplit_cli.main import cli, usage_error_text


def error_of(*arguments: str) -> str:
    """The text of the usage error that this command line ends with."""
    with pytest.raises(click.UsageError) as raised:
        cli.main(list(arguments), prog_name="edgectl", standalone_mode=False)
    return usage_error_text(raised.value)


def test_an_option_of_edgectl_behind_the_command_was_taken_for_a_misspelt_one() -> None:
    """`edgectl up --data DIR` was answered by "did you mean --database?"."""
    assert error_of("up", "--data", "here") == "--data stands before the command: edgectl --data …"
    assert "did you mean" in error_of("up", "--databse", "x").lower()
