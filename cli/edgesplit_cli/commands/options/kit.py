"""Options that every command shares which makes a kit: for what it is made, and of what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from edgesplit_provisioning.kit.own_wheel import EXTRAS
from edgesplit_provisioning.kit.target import MACHINES, PYTHONS

F = TypeVar("F", bound=Callable[..., Any])


def kit_options(where: str = "") -> Callable[[F], F]:
    """--python, --machine, --with and --wheelhouse, in the order of the help; `where` says when they count, as in
    `With --build: `."""

    def told(text: str) -> str:
        return where + (text[:1].lower() + text[1:] if where else text)

    options = (
        click.option(
            "--python", type=click.Choice(PYTHONS), default="3.11", show_default=True, help=told("Of the device.")
        ),
        click.option(
            "--machine",
            type=click.Choice(MACHINES),
            default="aarch64",
            show_default=True,
            help=told("Its architecture."),
        ),
        click.option(
            "--with",
            "extras",
            multiple=True,
            type=click.Choice([one for one in EXTRAS if one != "agent"]),
            help=told("What the agent shall have besides, as in tflite; repeatable."),
        ),
        click.option(
            "--wheelhouse",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            default=None,
            metavar="DIR",
            help=told("Take wheels from this folder alone: no network. [default: the package index pip is set up for]"),
        ),
    )

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
