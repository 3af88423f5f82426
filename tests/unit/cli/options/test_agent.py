"""`--agent-options`: what is passed on, and what is refused before a machine is touched."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from edgesplit.errors import UsageError
from edgesplit_cli.options.agent import agent_options


@click.command()
@agent_options
def shown(agent_options: str | None) -> None:
    """Print what a command gets."""
    click.echo(repr(agent_options))


def test_options_of_the_agent_are_passed_on() -> None:
    """As one line with single spaces; none given is another thing than none wanted."""
    run = CliRunner().invoke
    assert run(shown, ["--agent-options", " --skip-still  --changed 1% "]).output == "'--skip-still --changed 1%'\n"
    assert run(shown, ["--agent-options", ""]).output == "''\n"
    assert run(shown, []).output == "None\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("--skip-stills", "unrecognized arguments: --skip-stills"),
        ("--changed 1%", "give both"),
        ("--skip-still --changed 90%", "--changed"),
        ("--data /elsewhere", "leave them out"),
        ("--claim mine.json", "leave them out"),
        ("--help", "they ask for help"),
        ("--socket '/run/a b'", "not options"),
        ("--skip-still\nMORE=1", "not options"),
        ("--link $(reboot)", "not options"),
    ],
)
def test_what_the_agent_would_refuse_is_refused_here(text: str, reason: str) -> None:
    """A misspelt option would keep the service from starting on every device at once."""
    refused = CliRunner().invoke(shown, ["--agent-options", text])
    assert isinstance(refused.exception, UsageError) and reason in str(refused.exception)
