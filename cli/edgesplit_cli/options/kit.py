"""The options that every command shares that builds a kit: its target, and the source of its wheels."""

from __future__ import annotations

from collections.abc import Callable

import click

from edgesplit_cli.options.types import FOLDER, F, option_group
from edgesplit_provisioning.kit.own_wheel import EXTRAS
from edgesplit_provisioning.kit.target import MACHINES, PYTHONS


def kit_options(prefix: str = "") -> Callable[[F], F]:
    """--python, --machine, --with and --wheelhouse, in the order of the help. `prefix` is put before each help text,
    as in `With --build: `."""

    def help_text(text: str) -> str:
        return prefix + (text[:1].lower() + text[1:] if prefix else text)

    return option_group(
        click.option(
            "--python",
            type=click.Choice(PYTHONS),
            default="3.11",
            show_default=True,
            help=help_text("Version of Python on the device."),
        ),
        click.option(
            "--machine",
            type=click.Choice(MACHINES),
            default="aarch64",
            show_default=True,
            help=help_text("Architecture of the device."),
        ),
        click.option(
            "--with",
            "extras",
            multiple=True,
            type=click.Choice([extra for extra in EXTRAS if extra != "agent"]),
            help=help_text("Extra of the agent, as in tflite; repeatable."),
        ),
        click.option(
            "--wheelhouse",
            type=FOLDER,
            metavar="DIR",
            help=help_text(
                "Take wheels from this folder alone: no network. [default: the package index pip is set up for]"
            ),
        ),
    )
