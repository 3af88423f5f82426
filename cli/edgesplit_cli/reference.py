"""docs/cli.md: the help text of every command, as `edgectl COMMAND --help` prints it.

`python -m edgesplit_cli.reference > docs/cli.md` writes it; a test compares the two.
"""

from __future__ import annotations

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
    """One line per kind of error, least code first."""
    kinds: list[type[EdgeError]] = [EdgeError, *_subclasses(EdgeError)]
    first_of: dict[int, type[EdgeError]] = {}
    for kind in sorted(kinds, key=lambda kind: kind.exit_code):
        first_of.setdefault(kind.exit_code, kind)
    for code, first in first_of.items():
        summary = "something else failed" if first is EdgeError else (first.__doc__ or "").strip().split("\n")[0]
        yield f"| {code} | {summary} |\n"
    yield "| 130 | stopped by Ctrl-C |\n"


def _subclasses(kind: type[EdgeError]) -> list[type[EdgeError]]:
    own = [one for one in kind.__subclasses__() if one.__module__ == EdgeError.__module__]
    return own + [deeper for one in own for deeper in _subclasses(one)]


def _sections(command: click.Command, path: tuple[str, ...], parent: click.Context | None = None) -> Iterator[str]:
    """The command's help, then that of its commands, in order of their names."""
    context = click.Context(
        command,
        info_name=path[-1],
        parent=parent,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        help_option_names=["-h", "--help"],
    )
    yield f"{'#' * (len(path) + 1)} {' '.join(path)}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _sections(command.commands[name], (*path, name), context)


if __name__ == "__main__":
    click.echo(reference(), nl=False)
