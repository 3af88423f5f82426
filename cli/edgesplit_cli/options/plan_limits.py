"""The options that `edgectl plan` and `edgectl deploy` share: the objective, and the limits of a plan."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import click

from edgesplit import quantities
from edgesplit.errors import UsageError
from edgesplit.foreign_server import ForeignServer
from edgesplit_cli.options.types import CODECS, DURATION, ENERGY, FRACTION, OBJECTIVE, SIZE, option_group

limit_options = option_group(
    click.option(
        "--objective",
        type=OBJECTIVE,
        metavar="WHAT",
        help="latency, p95, energy or throughput; or weights, as in latency=1,energy=0.5 (per second, per joule); of a"
        " family also accuracy: the most accurate variant that meets the deadline. [default: latency, of a family"
        " accuracy]",
    ),
    click.option(
        "--least-accuracy",
        type=FRACTION,
        metavar="SHARE",
        help="Of a family: no request is answered by a variant of less accuracy, as in 70%.",
    ),
    click.option(
        "--keep-raw-input", is_flag=True, help="The raw input (frame or decoded picture) never leaves the device."
    ),
    click.option(
        "--keep-first", type=click.IntRange(0), default=0, metavar="N", help="The first N layers stay on the device."
    ),
    click.option(
        "--memory",
        "memory_bytes",
        type=SIZE,
        metavar="SIZE",
        help="Memory limit of the device, as in 512MB: weights and the peak of live tensors, the fallback counted.",
    ),
    click.option(
        "--energy",
        "energy_joules",
        type=ENERGY,
        metavar="JOULES",
        help="Energy limit of the device per inference, as in 0.5J.",
    ),
    click.option(
        "--deadline",
        "deadline_s",
        type=DURATION,
        metavar="TIME",
        help="Latency limit on this link, from the first input byte to the answer, as in 100ms; of a family on the link"
        " of each request.",
    ),
    click.option(
        "--fallback",
        type=click.Choice(["warm", "cold", "none"]),
        default="warm",
        show_default=True,
        help="Local fallback without the cloud: slices kept loaded (warm), loaded when needed (cold), or none.",
    ),
    click.option(
        "--allow-loss",
        type=FRACTION,
        metavar="SHARE",
        help="Output error that lossy codecs may cause, as in 0.5%: measured on the model's samples, chosen on one"
        " half of them and confirmed on the other. [default: none, lossless]",
    ),
    click.option(
        "--allow-changed",
        type=FRACTION,
        metavar="SHARE",
        help="Answers that lossy codecs may change, as in 1%: bounded (90% sure) on samples that chose nothing, of"
        " which it takes 230 for 1%. (--allow-loss limits how far outputs move.) [default: none, lossless]",
    ),
    click.option(
        "--codecs",
        type=CODECS,
        metavar="LIST",
        help="Allowed codecs, as in raw or raw,raw+zstd. [default: all lossless, and all measured with --allow-loss or"
        " --allow-changed]",
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
    "--offload", default="", callback=check_server, metavar="URL",
    help="Foreign inference server that finishes inferences: triton://HOST[:PORT], or http(s)://HOST[:PORT] for any"
    " that speaks the Open Inference Protocol. `edgectl export` writes what it needs. [default: the device's own]",
)  # fmt: skip


answer_option = click.option(
    "--answer", default="", metavar="RULE",
    help="With --allow-changed: what an answer is, where the outputs leave it open: class:OUTPUT,"
    " boxes:LAYOUT[:THRESHOLD] or close:TOLERANCE. [default: a classifier's class]",
)  # fmt: skip


def build_limits(
    keep_raw_input: bool, keep_first: int, allow_loss: float | None = None, *, allow_changed: float | None = None,
    memory_bytes: float | None = None, energy_joules: float | None = None, deadline_s: float | None = None,
    fallback: str = "warm",
) -> dict[str, Any]:  # fmt: skip
    """The limits in the form that the planner takes; limits that are not set are left out."""
    limits = {
        "keep_raw_input": keep_raw_input or None,
        "keep_first": keep_first or None,
        "memory_bytes": memory_bytes,
        "energy_joules": energy_joules,
        "deadline_s": deadline_s,
        "max_loss": allow_loss,
        "max_changed": allow_changed,
        "fallback": fallback if fallback != "warm" else None,
    }
    return {name: value for name, value in limits.items() if value is not None}


LIMIT_OPTIONS: dict[str, tuple[str, quantities.Quantity | None]] = {
    "memory_bytes": ("--memory", quantities.SIZE),
    "energy_joules": ("--energy", quantities.ENERGY),
    "deadline_s": ("--deadline", quantities.DURATION),
    "max_loss": ("--allow-loss", quantities.PERCENTAGE),
    "max_changed": ("--allow-changed", quantities.PERCENTAGE),
    "keep_raw_input": ("--keep-raw-input", None),
    "keep_first": ("--keep-first", None),
    "force_after": ("--partition", None),
    "force": ("--partition", None),
    "edge_after": ("--edge-after", None),
    "fallback": ("--fallback", None),
}
"""The option that sets each limit of the planner, and its quantity."""
BINARY_SIZE = replace(quantities.SIZE, units={"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10})
LIMIT_PATTERN = re.compile(rf"\b({'|'.join(LIMIT_OPTIONS)})\b(?:=([^\s,;:]*[^\s,;:.]))?")

REPEATED_VALUE = re.compile(r" instead of [0-9.e+-]+(?=;|$)")
"""A part of the planner's messages that repeats the requested value without its unit."""


def typed_value(option: str, quantity: quantities.Quantity, figure: float, arguments: Sequence[str]) -> str:
    """The value of an option as typed on the command line, if it equals `figure`; else empty."""
    parts = [
        part for argument in arguments for part in (argument.split("=", 1) if argument.startswith("--") else [argument])
    ]
    for previous, typed in pairwise(parts):
        if previous == option:
            with suppress(UsageError):
                return typed if f"{quantity.parse(typed):g}" == f"{figure:g}" else ""
    return ""


def to_options(text: str) -> str:
    """Replace the planner's names of limits by options: `memory_bytes=4e+07` becomes `--memory 40MB`."""
    return LIMIT_PATTERN.sub(lambda match: to_option(match[1], match[2]), REPEATED_VALUE.sub("", text))


def to_option(name: str, value: str | None) -> str:
    """A limit as the option that sets it."""
    option, quantity = LIMIT_OPTIONS[name]
    if value is None or value == "true":
        return option
    try:
        figure = float(value) if quantity else math.nan
    except ValueError:
        figure = math.nan
    if quantity is None or math.isnan(figure):
        return f"{option} {value}"
    if typed := typed_value(option, quantity, figure, sys.argv[1:]):
        return f"{option} {typed}"
    if name == "memory_bytes" and figure and not figure % 1024 and figure % 1000:
        quantity = BINARY_SIZE
    return f"{option} {quantity.format(figure)}"
