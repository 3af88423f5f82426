"""docs/cli.md equals the help texts of the commands."""

from __future__ import annotations

import subprocess
import sys

import click

from edgesplit_cli.main import cli
from support import REPOSITORY

PAGE = REPOSITORY / "docs" / "cli.md"


def test_cli_page_matches_the_commands_help() -> None:
    """Run `python -m edgesplit_cli.reference > docs/cli.md` after a change to a command.

    In a process of its own: what another test asked of click in another way would change the help here.
    """
    command = [sys.executable, "-m", "edgesplit_cli.reference"]
    assert PAGE.read_text("utf-8") == subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_every_command_and_option_has_help() -> None:
    """An undocumented command or option fails here."""

    def bare(command: click.Command, path: str) -> list[str]:
        found = [] if command.help else [path]
        found += [
            f"{path} {parameter.opts[0]}"
            for parameter in command.params
            if isinstance(parameter, click.Option) and not parameter.help
        ]
        inner = command.commands.items() if isinstance(command, click.Group) else ()
        return found + [missing for name, subcommand in inner for missing in bare(subcommand, f"{path} {name}")]

    assert bare(cli, "edgectl") == []
