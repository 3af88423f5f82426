"""Options of `edgectl up` that are kept in the data folder (`settings.json`), so that the next start needs none.

Options given on the command line replace kept ones and are kept themselves once the controller is ready; an environment
variable takes precedence over a kept option. A process that joins another one keeps nothing and uses nothing kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click

from edgesplit.atomic_files import write_durably
from edgesplit.errors import UsageError

FILE: Final = "settings.json"
NOT_KEPT: Final = frozenset({"join", "force", "print-broker-config", "out", "installed-at", "help"})
"""Options of `edgectl up` that concern one call only."""
KEPT_META: Final = "edgesplit.kept_options"
"""Key of the call's options, as text, in the context's `meta`."""
Value = str | bool | list[str]
"""A kept option as it is written on the command line: its text, True for a flag, several texts."""


class KeepsOptions(click.Command):
    """A command whose missing options are those kept in the data folder, which is the context's object."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with the kept options as defaults; `ctx.meta` then has those to keep."""
        given = self._given(ctx, args)
        if ctx.default_map is None and isinstance(ctx.obj, Path) and "join" not in given:
            ctx.default_map = to_default_map(self, read_options(ctx.obj))
        ctx.meta[KEPT_META] = {} if "join" in given else {n: v for n, v in given.items() if n not in NOT_KEPT}
        return super().parse_args(ctx, args)

    def _given(self, ctx: click.Context, args: list[str]) -> dict[str, Value]:
        """The options of the command line, by name, as text."""
        values, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        return {name: values[param.name] for name, param in options_of(self) if param.name in values}


def options_of(command: click.Command) -> Iterator[tuple[str, click.Option]]:
    """The options of a command, each by its long name without dashes."""
    for param in command.params:
        if isinstance(param, click.Option):
            yield max(param.opts, key=len).lstrip("-"), param


def to_default_map(command: click.Command, kept: Mapping[str, Value]) -> dict[str, Any]:
    """Kept options as click's defaults; UsageError for one that the command does not have."""
    known = {name: param for name, param in options_of(command) if name not in NOT_KEPT}
    for name in kept:
        if name not in known:
            raise UsageError(f"there is no setting {name[:40]!r}; there are {', '.join(sorted(known))}")
    return {str(known[name].name): value for name, value in kept.items()}


def read_options(data: Path) -> dict[str, Value]:
    """The options kept in a data folder; UsageError if the file is damaged."""
    file = data / FILE
    try:
        kept = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{file} cannot be read ({error}): repair it, or remove it and give the options again"
        ) from error
    if not isinstance(kept, dict) or not all(_is_value(value) for value in kept.values()):
        raise UsageError(f"{file} is no table of options: repair it, or remove it and give the options again")
    return kept


def kept_text(data: Path, name: str) -> str:
    """The text of a kept option; empty if it is not kept."""
    value = read_options(data).get(name, "")
    return value if isinstance(value, str) else ""


def _is_value(value: object) -> bool:
    texts = value if isinstance(value, list) else [value]
    return value is True or (bool(texts) and all(isinstance(text, str) for text in texts))


def write_options(data: Path, kept: Mapping[str, Value]) -> None:
    """Keep exactly these options. Only the owner can read them, because a database's URL may have a password."""
    if not kept:
        (data / FILE).unlink(missing_ok=True)
        return
    write_durably(data / FILE, (json.dumps(dict(sorted(kept.items())), indent=1) + "\n").encode(), 0o600)


def keep_given(data: Path, given: Mapping[str, Value]) -> dict[str, Value]:
    """Keep the options of a call besides those kept already; returns all that are kept now."""
    kept = read_options(data)
    if any(kept.get(name) != value for name, value in given.items()):
        kept |= given
        write_options(data, kept)
    return kept


def shown(value: Value) -> str:
    """A kept option for people, without a password in it."""
    texts = value if isinstance(value, list) else [value if isinstance(value, str) else "yes"]
    return ", ".join(re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", text) for text in texts)
