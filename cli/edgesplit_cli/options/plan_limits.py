"""The options that `edgectl plan` and `edgectl deploy` share: the objective, and the limits of a plan."""

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
from edgesplit_cli.options.percent import parse_share
from edgesplit_cli.options.quantities import CODECS, DURATION, ENERGY, OBJECTIVE, SIZE, Quantity

F = TypeVar("F", bound=Callable[..., Any])


def limit_options(command: F) -> F:
    """Add the options for the objective and for limits on where layers run and how tensors are sent."""
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
        help="How the device finishes alone without the cloud: slices kept loaded, loaded when needed, or not at all.",
    ),
    click.option(
        "--allow-loss",
        callback=parse_share,
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


def check_server(_: click.Context, __: click.Parameter, value: str) -> str:
    """Callback of `click.option`: check the address of a foreign inference server."""
    if value:
        try:
            ForeignServer.parse(value)
        except UsageError as error:
            raise click.BadParameter(str(error)) from error
    return value


offload_option = click.option(
    "--offload",
    default="",
    callback=check_server,
    metavar="URL",
    help="A server that is not ours finishes: triton://HOST[:PORT], or http(s)://HOST[:PORT] for any that speaks the"
    " Open Inference Protocol. `edgectl export` writes what it needs. [default: the device's own]",
)


def build_limits(
    keep_raw_input: bool,
    keep_first: int,
    allow_loss: float | None = None,
    *,
    memory_bytes: float | None = None,
    energy_joules: float | None = None,
    deadline_s: float | None = None,
    fallback: str = "warm",
) -> dict[str, Any]:
    """The limits in the form that the planner takes; limits that are not set are left out."""
    limits = {
        "keep_raw_input": keep_raw_input or None,
        "keep_first": keep_first or None,
        "memory_bytes": memory_bytes,
        "energy_joules": energy_joules,
        "deadline_s": deadline_s,
        "max_loss": allow_loss,
        "fallback": fallback if fallback != "warm" else None,
    }
    return {name: value for name, value in limits.items() if value is not None}


OPTION_UNITS: dict[str, tuple[str, tuple[tuple[float, str], ...]]] = {
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
"""The option that sets each limit of the planner, and its units, largest first."""
BINARY_UNITS = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
LIMIT_PATTERN = re.compile(rf"\b({'|'.join(OPTION_UNITS)})\b(?:=([^\s,;:]*[^\s,;:.]))?")

REPEATED_VALUE = re.compile(r" instead of [0-9.e+-]+(?=;|$)")
"""A part of the planner's messages that repeats the requested value without its unit."""


QUANTITIES: Mapping[str, Quantity] = {"--memory": SIZE, "--energy": ENERGY, "--deadline": DURATION}


def typed_value(option: str, figure: float, arguments: Sequence[str]) -> str:
    """The value of an option as typed on the command line, if it equals `figure`; else empty."""
    parts = [
        part for argument in arguments for part in (argument.split("=", 1) if argument.startswith("--") else [argument])
    ]
    for previous, typed in pairwise(parts):
        if previous == option and option in QUANTITIES:
            with suppress(click.BadParameter):
                return typed if f"{QUANTITIES[option].convert(typed, None, None):g}" == f"{figure:g}" else ""
    return ""


def to_options(text: str) -> str:
    """Replace the planner's names of limits by options: `memory_bytes=4e+07` becomes `--memory 40MB`."""
    return LIMIT_PATTERN.sub(lambda match: to_option(match[1], match[2]), REPEATED_VALUE.sub("", text))


def to_option(name: str, value: str | None) -> str:
    """A limit as the option that sets it."""
    option, units = OPTION_UNITS[name]
    if value is None or value == "true":
        return option
    try:
        figure = float(value) if units else math.nan
    except ValueError:
        figure = math.nan
    if math.isnan(figure):
        return f"{option} {value}"
    if typed := typed_value(option, figure, sys.argv[1:]):
        return f"{option} {typed}"
    if name == "memory_bytes" and figure and not figure % 1024 and figure % 1000:
        units = BINARY_UNITS
    factor, unit = next((pair for pair in units if figure >= pair[0]), units[-1])
    return f"{option} {figure / factor:.7g}{unit}"
