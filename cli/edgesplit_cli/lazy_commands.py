"""Commands that are imported on first use, so that `edgectl device list` does not load what it does not need, and
`edgectl --help` none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.util import find_spec
from typing import Any

import click
from click.shell_completion import CompletionItem

from edgesplit.process.start_up import imports_not_collected


class LazyCommands(MutableMapping[str, click.Command]):
    """Commands by name, each the attribute of that name in a module of `edgesplit_cli.commands`, imported on first
    access."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = dict(modules)
        self._loaded: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._loaded:
            with imports_not_collected():
                module = import_module(f"edgesplit_cli.commands.{self._modules[name]}")
            self._loaded[name] = getattr(module, name)
        return self._loaded[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._modules.setdefault(name, "")
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._modules[name]
        self._loaded.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._modules  # without loading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def outlines(self) -> dict[str, click.Command]:
        """A stand-in for each command, with its name and help text, which is read from its source: importing all of
        them takes a second."""
        docs = {module: _docstrings(f"edgesplit_cli.commands.{module}") for module in {*self._modules.values()}}
        return {name: click.Command(name, help=docs[module].get(name)) for name, module in self._modules.items()}


class LazyGroup(click.Group):
    """A group that is described without importing its commands."""

    def __init__(self, name: str | None = None, commands: LazyCommands | None = None, **settings: Any) -> None:
        super().__init__(name, commands, **settings)
        self.outlines = (commands or LazyCommands({})).outlines

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in the help text."""
        click.Group(commands=self.outlines()).format_commands(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that `args` begin with; where there is none, the error names the groups that have one of that
        name, as `model push` for `push`."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            groups = [name for name in self.commands if _has_command(self.commands[name], args[0])]
            if not groups:
                raise
            meant = " or ".join(f"'{name} {args[0]}'" for name in sorted(groups))
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {meant}?", ctx) from error

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of commands and options that begin like this."""
        commands = [
            CompletionItem(name, help=command.get_short_help_str())
            for name, command in sorted(self.outlines().items())
            if name.startswith(incomplete)
        ]
        return commands + super(click.Group, self).shell_complete(ctx, incomplete)


def _has_command(command: click.Command, name: str) -> bool:
    return isinstance(command, click.Group) and name in command.commands


def _docstrings(module: str) -> dict[str, str]:
    """The docstrings of a module's functions, by name, without importing it."""
    spec = find_spec(module)
    source = spec.loader.get_source(module) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    functions = (node for node in ast.parse(source or "").body if isinstance(node, ast.FunctionDef))
    return {function.name: ast.get_docstring(function) or "" for function in functions}
