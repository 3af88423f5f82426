"""Options that `edgectl plan` and `edgectl deploy` share: what is wanted least, and what must be kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from edgesplit_cli.commands.percent import as_share
from edgesplit_cli.quantities import DURATION, ENERGY, OBJECTIVE, SIZE

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
        default=None,
        metavar="LIST",
        help="Allowed codecs, as in raw or raw,raw+zstd. [default: all lossless, and all measured with --allow-loss]",
    ),
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
