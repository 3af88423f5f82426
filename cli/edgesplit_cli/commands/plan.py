"""`edgectl plan`: where each layer would run, what that costs, and from which bandwidth on that changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from edgesplit.links import parse_link
from edgesplit_cli.api import Api
from edgesplit_cli.show import console, json_option, ms, print_json, rate, size, table

F = TypeVar("F", bound=Callable[..., Any])


def limit_options(command: F) -> F:
    """The options that limit where layers may run and how tensors may travel."""
    for option in (
        click.option(
            "--codecs",
            default=None,
            metavar="LIST",
            help="Allowed codecs, as in raw or raw,raw+zstd. [default: all lossless]",
        ),
        click.option(
            "--keep-first",
            type=click.IntRange(0),
            default=0,
            metavar="N",
            help="The first N layers stay on the device.",
        ),
        click.option(
            "--keep-raw-input", is_flag=True, help="The raw input (frame or decoded picture) never leaves the device."
        ),
    ):
        command = option(command)
    return command


def limits_of(keep_raw_input: bool, keep_first: int) -> dict[str, Any]:
    """The side limits as the planner takes them; those not in force are left out."""
    return ({"keep_raw_input": True} if keep_raw_input else {}) | ({"keep_first": keep_first} if keep_first else {})


@click.command()
@click.argument("what", metavar="MODEL|COSTS.json")
@click.option("--device", default=None, help="Device profile (see `edgectl profiles`); needed for a MODEL.")
@click.option(
    "--link",
    "link_text",
    default="wifi",
    show_default=True,
    help="wifi, lte, 3g, or UP/RTT or UP/DOWN/RTT as in 8mbit/40ms.",
)
@click.option(
    "--partition", default="auto", show_default=True, help="auto, device, cloud, or the last LAYER on the device."
)
@limit_options
@json_option
@click.pass_obj
def plan(
    data: Path,
    what: str,
    device: str | None,
    link_text: str,
    partition: str,
    keep_raw_input: bool,
    keep_first: int,
    codecs: str | None,
    as_json: bool,
) -> None:
    """Plan MODEL for a device profile and a link, or plan from your own costs file."""
    limits = limits_of(keep_raw_input, keep_first)
    allowed = codecs.split(",") if codecs else None
    if what.endswith(".json") or Path(what).is_file():
        made = _from_costs(Path(what), link_text, limits, allowed, partition)
    else:
        if device is None:
            raise click.UsageError("--device PROFILE is needed to plan a model (see `edgectl profiles`)")
        body = {
            "model": what,
            "device": device,
            "link": link_text,
            "partition": partition,
            "limits": limits,
            "codecs": allowed,
        }
        with console().status(f"planning {what} for {device} on {link_text}"):
            made = Api.of(data).post("/v1/plans", body)
    print_json(made) if as_json else print_plan(made)


def _from_costs(
    path: Path, link_text: str, limits: dict[str, Any], codecs: list[str] | None, partition: str
) -> dict[str, Any]:
    from edgesplit_partitioner import describe, load_costs

    if partition != "auto":
        key = "force" if partition in ("device", "cloud") else "force_after"
        limits = limits | {key: partition}
    return describe(load_costs(path), parse_link(link_text), limits=limits, codecs=tuple(codecs) if codecs else None)


def print_plan(made: dict[str, Any]) -> None:
    """The plan for people: candidates beside the pure modes, then the switching table."""
    out = console()
    link = made["link"]
    out.print(
        f"[bold]{made['model']}[/] on {made['device_class'] or 'the device'}, link {link.get('name') or ''} "
        f"up {rate(link['up_bytes_per_s'])}, down {rate(link['down_bytes_per_s'])}, round trip {ms(link['rtt_s'])} ms"
    )
    for tier, basis in made.get("basis", {}).items():
        out.print(f"  {tier} times: {basis}")
    best = made["best"]
    rows = [_candidate(one, best) for one in made["candidates"]]
    columns = (
        "",
        "cut",
        "last layer on device",
        ">sends",
        ">device ms",
        ">encode ms",
        ">link ms",
        ">remote ms",
        ">total ms",
        "",
    )
    out.print(table(columns, rows))
    certificate = made["certificate"]
    bound = f"lower bound {ms(certificate['lower_bound'])} ms, gap {certificate['gap']:.2%}"
    gain = f"; {made['gain']:.2f}x the better of all-local and all-remote" if made["gain"] else ""
    out.print(f"best: [bold]{best}[/] {ms(made['seconds'])} ms; {bound}{gain}")
    headings = ("row", "best at this round trip while the uplink is")
    out.print(table(headings, map(_range, made["ranges"]), title="switching table"))


def _range(one: dict[str, Any]) -> tuple[str, str]:
    if not one["best_somewhere"]:
        return one["name"], "never (kept as the fallback, or for shorter round trips)"
    low, high = one["from_bytes_per_s"], one["to_bytes_per_s"]
    if high is None:
        return one["name"], f"above {rate(low)}" if low else "any"
    return one["name"], f"{rate(low)} to {rate(high)}" if low else f"below {rate(high)}"


def _candidate(one: dict[str, Any], best: str) -> tuple[str, ...]:
    return (
        "*" if one["name"] == best else "",
        one["name"] + (" +zstd" if one.get("compress") else ""),
        one.get("after") or "-",
        size(one["up_bytes"]) if one["up_bytes"] else "-",
        ms(one["device_s"]),
        ms(one["encode_s"]),
        ms(one["link_s"]),
        ms(one["decode_s"] + one["remote_s"]),
        ms(one["total_s"]),
        "" if one.get("allowed", True) else "not allowed by the limits",
    )
