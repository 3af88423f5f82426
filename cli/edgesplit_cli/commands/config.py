"""`edgectl config`: the options that `edgectl up` keeps in the data folder."""

from __future__ import annotations

from pathlib import Path

import click

from edgesplit.errors import UsageError
from edgesplit_cli.commands.up import to_settings, up
from edgesplit_cli.kept_options import (
    NOT_KEPT,
    Value,
    options_of,
    read_options,
    shown,
    to_default_map,
    write_options,
)
from edgesplit_cli.output import json_option, print_result, table


@click.group()
def config() -> None:
    """Show and change the options that `edgectl up` keeps in the data folder.

    `edgectl up` keeps the options that it is given, so that the next start needs none. A change applies at the next
    start, which refuses to strand enrolled devices.
    """


@config.command()
@json_option
@click.pass_obj
def show(data: Path, as_json: bool) -> None:
    """List the kept options; passwords in URLs are not shown."""
    kept = {name: shown(value) for name, value in sorted(read_options(data).items())}
    print_result(kept, as_json, table(("option", "value"), list(kept.items())))


@config.command("set")
@click.argument("name")
@click.argument("values", nargs=-1, metavar="[VALUE]...")
@click.pass_obj
def set_option(data: Path, name: str, values: tuple[str, ...]) -> None:
    """Keep an option of `edgectl up`: NAME without its dashes, as in `edgectl config set host hub.local`.

    A flag takes no value; `host` takes several.
    """
    kept = {**read_options(data), name: _value(name, values)}
    _check(data, kept)
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_options(data, kept)
    click.echo(f"{name}: {shown(kept[name])}, from the next `edgectl up` on")


@config.command()
@click.argument("name")
@click.pass_obj
def unset(data: Path, name: str) -> None:
    """Forget a kept option: the next start uses the default."""
    kept = read_options(data)
    if name not in kept:
        raise UsageError(f"{name[:40]!r} is not kept; kept are: {', '.join(sorted(kept)) or 'none'}")
    _check(data, remaining := {other: value for other, value in kept.items() if other != name})
    write_options(data, remaining)
    click.echo(f"{name}: the default again, from the next `edgectl up` on")


def _value(name: str, values: tuple[str, ...]) -> Value:
    """The option's value as it is kept; UsageError if the number of values does not suit it."""
    known = {known: option for known, option in options_of(up) if known not in NOT_KEPT}
    if name not in known:
        raise UsageError(f"there is no setting {name[:40]!r}; there are {', '.join(sorted(known))}")
    option = known[name]
    if option.is_flag:
        if values:
            raise UsageError(f"{name} is a flag and takes no value: `edgectl config unset {name}` turns it off")
        return True
    if not values or (len(values) > 1 and not option.multiple):
        raise UsageError(f"{name} takes {'at least one value' if option.multiple else 'one value'}")
    return list(values) if option.multiple else next(iter(values))


def _check(data: Path, kept: dict[str, Value]) -> None:
    """UsageError unless `edgectl up` can start with these options."""
    context = up.make_context(
        "up", [], parent=click.get_current_context().find_root(), default_map=to_default_map(up, kept)
    )
    to_settings(data, context.params)
