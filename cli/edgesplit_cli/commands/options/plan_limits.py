"""Options that `edgectl plan` and `edgectl deploy` share: what is wanted least, and what must be kept."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, TypeVar

import click

from edgesplit.errors import UsageError
from edgesplit.foreign_server import ForeignServer
from edgesplit_cli.commands.options.percent import as_share
from edgesplit_cli.quantities import CODECS, DURATION, ENERGY, OBJECTIVE, SIZE, Quantity

F = TypeVar("F", bound=Callable[..., Any])


def limit_options(command: F) -> F:
    """The options that say what is best and limit where layers may run and how tensors may travel."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--objective",
        type=OBJECTIVE,
        default="latency",
        show_default=True,
        metavar="WHAT",
        help="latency, p95, energy or throughput; or weights, as in latency=1,energy=0.5 (per second, per joule).",
    ),
    click.option(
        "--keep-raw-input", is_flag=True, help="The raw input (frame or decoded picture) never leaves the device."
    ),
    click.option(
        "--keep-first",
        type=click.IntRange(0),
        default=0,
        metavar="N",
        help="The first N layers stay on the device.",
    ),
    click.option(
        "--memory",
        "memory_bytes",
        type=SIZE,
        default=None,
        metavar="SIZE",
        help="Most memory on the device, as in 512MB: weights and the peak of live tensors, the fallback counted.",
    ),
    click.option(
        "--energy",
        "energy_joules",
        type=ENERGY,
        default=None,
        metavar="JOULES",
        help="Most energy of the device per inference, as in 0.5J.",
    ),
    click.option(
        "--deadline",
        "deadline_s",
        type=DURATION,
        default=None,
        metavar="TIME",
        help="Longest from the first input byte to the answer on this link, as in 100ms.",
    ),
    click.option(
        "--fallback",
        type=click.Choice(["warm", "cold", "none"]),
        default="warm",
        show_default=True,
        help="What finishes alone when the cloud is gone: kept loaded, loaded when needed, or nothing.",
    ),
    click.option(
        "--allow-loss",
        callback=as_share,
        default=None,
        metavar="SHARE",
        help="Output error that lossy codecs may cause, as in 0.5%: measured on the model's samples, chosen on one"
        " half of them and confirmed on the other. [default: none, lossless]",
    ),
    click.option(
        "--codecs",
        type=CODECS,
        default=None,
        metavar="LIST",
        help="Allowed codecs, as in raw or raw,raw+zstd. [default: all lossless, and all measured with --allow-loss]",
    ),
)


def as_server(_: click.Context, __: click.Parameter, value: str) -> str:
    """The address of a server that is not ours, checked."""
    if value:
        try:
            ForeignServer.parse(value)
        except UsageError as error:
            raise click.BadParameter(str(error)) from error
    return value


offload_option = click.option(
    "--offload",
    default="",
    callback=as_server,
    metavar="URL",
    help="A server that is not ours finishes: triton://HOST[:PORT], or http(s)://HOST[:PORT] for any that speaks the"
    " Open Inference Protocol. `edgectl export` writes what it needs. [default: the device's own]",
)


def limits_of(
    keep_raw_input: bool,
    keep_first: int,
    allow_loss: float | None = None,
    *,
    memory_bytes: float | None = None,
    energy_joules: float | None = None,
    deadline_s: float | None = None,
    fallback: str = "warm",
) -> dict[str, Any]:
    """The side limits as the planner takes them; those not in force are left out."""
    given = {
        "keep_raw_input": keep_raw_input or None,
        "keep_first": keep_first or None,
        "memory_bytes": memory_bytes,
        "energy_joules": energy_joules,
        "deadline_s": deadline_s,
        "max_loss": allow_loss,
        "fallback": fallback if fallback != "warm" else None,
    }
    return {name: value for name, value in given.items() if value is not None}


SPELT: dict[str, tuple[str, tuple[tuple[float, str], ...]]] = {
    "memory_bytes": ("--memory", ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1, "B"))),
    "energy_joules": ("--energy", ((1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ"))),
    "deadline_s": ("--deadline", ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))),
    "max_loss": ("--allow-loss", ((1e-2, "%"),)),
    "keep_raw_input": ("--keep-raw-input", ()),
    "keep_first": ("--keep-first", ()),
    "force_after": ("--partition", ()),
    "force": ("--partition", ()),
    "edge_after": ("--edge-after", ()),
    "fallback": ("--fallback", ()),
}
"""The planner's limits by the options that set them, with the units that these take, largest first."""
BINARY = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
LIMIT = re.compile(rf"\b({'|'.join(SPELT)})\b(?:=([^\s,;:]*[^\s,;:.]))?")

INSTEAD = re.compile(r" instead of [0-9.e+-]+(?=;|$)")
"""What was asked for is in the same line already, with its unit."""


QUANTITIES: Mapping[str, Quantity] = {"--memory": SIZE, "--energy": ENERGY, "--deadline": DURATION}


def as_typed(option: str, figure: float, words: Sequence[str]) -> str:
    """How that figure of an option stands on a command line; empty where it does not."""
    split = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for before, typed in pairwise(split):
        if before == option and option in QUANTITIES:
            with suppress(click.BadParameter):
                return typed if f"{QUANTITIES[option].convert(typed, None, None):g}" == f"{figure:g}" else ""
    return ""


def in_flags(text: str) -> str:
    """A planner's words about limits, as in `memory_bytes=4e+07`, in those of the command line: `--memory 40MB`."""
    return LIMIT.sub(lambda found: flag(found[1], found[2]), INSTEAD.sub("", text))


def flag(name: str, value: str | None) -> str:
    """One limit as the option that sets it."""
    option, units = SPELT[name]
    if value is None or value == "true":
        return option
    try:
        figure = float(value) if units else math.nan
    except ValueError:
        figure = math.nan
    if math.isnan(figure):
        return f"{option} {value}"
    if typed := as_typed(option, figure, sys.argv[1:]):
        return f"{option} {typed}"
    if name == "memory_bytes" and figure and not figure % 1024 and figure % 1000:
        units = BINARY
    factor, unit = next((one for one in units if figure >= one[0]), units[-1])
    return f"{option} {figure / factor:.7g}{unit}"
