"""Generates docs/cli.md: the help text of every command, as `edgectl COMMAND --help` prints it.

`python -m edgesplit_cli.reference > docs/cli.md` writes it; a test compares the two.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from edgesplit.errors import EdgeError

WIDTH = 100
HEAD = """# The command line

Written by `python -m edgesplit_cli.reference > docs/cli.md` from the commands' own help; a test compares the two.

Every command that prints something takes `--json`. An error is one line that says what to do next, and the exit code
says who must act:

| code | meaning |
|---|---|
| 0 | done |
"""


def reference() -> str:
    """The whole page."""
    from edgesplit_cli.main import cli

    return "\n".join([HEAD + "".join(_exit_codes()), *_sections(cli, ("edgectl",))])


def _exit_codes() -> Iterator[str]:
    """One line per exit code, in ascending order."""
    kinds: list[type[EdgeError]] = [EdgeError, *_subclasses(EdgeError)]
    first_of: dict[int, type[EdgeError]] = {}
    for kind in sorted(kinds, key=lambda kind: kind.exit_code):
        first_of.setdefault(kind.exit_code, kind)
    for code, first in first_of.items():
        paragraph = inspect.cleandoc(first.__doc__ or "").partition("\n\n")[0]
        summary = "something else failed" if first is EdgeError else paragraph.replace("\n", " ")
        yield f"| {code} | {summary} |\n"
    yield "| 130 | stopped by Ctrl-C |\n"


def _subclasses(kind: type[EdgeError]) -> list[type[EdgeError]]:
    direct = [subclass for subclass in kind.__subclasses__() if subclass.__module__ == EdgeError.__module__]
    return direct + [deeper for subclass in direct for deeper in _subclasses(subclass)]


def _sections(command: click.Command, path: tuple[str, ...], parent: click.Context | None = None) -> Iterator[str]:
    """The command's help, then that of its subcommands, by name."""
    context = click.Context(
        command, info_name=path[-1], parent=parent, terminal_width=WIDTH, max_content_width=WIDTH,
        help_option_names=["-h", "--help"],
    )  # fmt: skip
    yield f"{'#' * (len(path) + 1)} {' '.join(path)}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _sections(command.commands[name], (*path, name), context)


if __name__ == "__main__":
    click.echo(reference(), nl=False)
