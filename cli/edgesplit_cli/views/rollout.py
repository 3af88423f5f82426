"""A rollout for people: stages as bars, what it waits for, failures by cause; and following it until it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from edgesplit.controller_client.client import ControllerClient
from edgesplit_cli.output import console, plain, table

EXITS = {"finished": 0, "failed": 11, "aborted": 12, "rolled back": 13, "superseded": 14}
"""What a command that follows a rollout ends with, by how the rollout ended."""
POLL_S = 1.0
WIDTH = 40
PARTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("█", ("succeeded",), "green"),
    ("█", ("failed", "gone back", "timed out"), "red"),
    ("▓", ("trial",), "yellow"),
    ("▒", ("told", "fetching"), "yellow"),
    ("·", ("skipped", "superseded"), "dim"),
    ("░", ("queued",), "dim"),
)
STYLES = {
    "finished": "green", "running": "yellow", "failed": "red", "aborting": "red", "aborted": "red",
    "rolling back": "red", "rolled back": "red", "paused": "magenta", "waiting": "magenta", "scheduled": "cyan",
    "superseded": "dim",
}  # fmt: skip


def rollout_table(rollouts: list[dict[str, Any]]) -> RenderableType:
    """Several, one line each."""
    rows = []
    for one in plain(rollouts):
        states = one["states"]
        failed = states["failed"] + states["gone back"] + states["timed out"]
        rows.append(
            (
                str(one["id"]), one["model"], Text(one["state"], STYLES.get(one["state"], "")),
                f"{max(one['stage'], 0)}/{len(one['stages'])}", str(one["devices"]), made_up(one),
                str(states["succeeded"]), str(failed), one["why"] or one["waits_for"],
            )
        )  # fmt: skip
    columns = (">id", "model", "state", "stage", ">devices", "of them", ">well", ">not", "why, or what it waits for")
    return table(columns, rows)


def rollout_shown(one: dict[str, Any]) -> RenderableType:
    """One, whole."""
    one = plain(one)
    head = Text.assemble(
        (f"rollout {one['id']}", "bold"), f"  {one['model']}  release {one['release'][:16]}…  to {_targets(one)}  ",
        (one["state"], STYLES.get(one["state"], "")),
    )  # fmt: skip
    lines: list[RenderableType] = [head]
    if one["why"]:
        lines.append(Text(f"  {one['why']}", "red" if one["state"] in ("failed", "aborting") else ""))
    if one["waits_for"]:
        lines.append(Text(f"  waits for {one['waits_for']}"))
    if one["superseded_by"]:
        lines.append(Text(f"  rollout {one['superseded_by']} has taken devices over"))
    lines += [_bar(stage, one["stage"]) for stage in one["stages"]]
    if speed := _speed(one):
        lines.append(Text(f"  {speed}"))
    if one["failures"]:
        rows = [(str(cause["count"]), cause["kind"], _few(cause), cause["example"]) for cause in one["failures"]]
        lines.append(table((">devices", "cause", "which", "for example"), rows))
    return Group(*lines)


def _targets(one: Mapping[str, Any]) -> str:
    targets = one["targets"]
    return ", ".join(targets[:4]) + (f" and {len(targets) - 4} more" if len(targets) > 4 else "")


def _few(cause: Mapping[str, Any]) -> str:
    more = cause["count"] - len(cause["devices"])
    return ", ".join(cause["devices"]) + (f", {more} more" if more > 0 else "")


def _bar(stage: Mapping[str, Any], reached: int) -> Text:
    """A stage: `2  50%  ████▒▒░░  12 of 40`."""
    states, devices = stage["states"], stage["devices"]
    line = Text(f"  {stage['number']:>2}  {stage['asked']:>6}  ", "" if stage["number"] <= reached else "dim")
    drawn = 0
    for sign, names, style in PARTS:
        count = sum(states.get(name, 0) for name in names)
        cells = _cells(count, devices, WIDTH - drawn)
        line.append(sign * cells, style)
        drawn += cells
    line.append(" " * (WIDTH - drawn))
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    waits = "  waits for approval" if stage["needs_approval"] else ""
    of_them = f" ({made_up(stage)})" if made_up(stage) else ""
    return line.append(f"  {devices} device{'s' * (devices != 1)}{of_them}: {told or 'none'}{waits}")


def made_up(counted: Mapping[str, Any]) -> str:
    """How many of the devices that were counted are no real ones; empty where all are."""
    parts = ((counted.get(kind, 0), kind) for kind in ("emulated", "simulated"))
    return ", ".join(f"{count} {kind}" for count, kind in parts if count)


def _cells(count: int, of: int, room: int) -> int:
    """At least one for what there is."""
    return min(room, max(1, round(WIDTH * count / of))) if count else 0


def _speed(one: Mapping[str, Any]) -> str:
    """How many were told, and how fast."""
    told = one["devices"] - sum(one["states"][state] for state in ("queued", "skipped", "superseded"))
    if not one["began"] or not told:
        return ""
    seconds = max(1.0, (one["ended"] or time.time()) - one["began"])
    limit = f" (at most {one['terms']['rate']})" if one["terms"]["rate"] else ""
    return f"told {told} in {seconds:.0f} s, {60 * told / seconds:.3g} a minute{limit}"


def looks(api: ControllerClient, number: int, until: float, every_s: float = POLL_S) -> Iterator[dict[str, Any]]:
    """The rollout, again and again, until it has ended, has nothing to do but follow, or the time is up."""
    while True:
        one: dict[str, Any] = api.get(f"/v1/rollouts/{number}")
        yield one
        if has_settled(one) or time.monotonic() > until:
            return
        time.sleep(every_s)


def has_settled(one: Mapping[str, Any]) -> bool:
    """It has ended; or it only waits for devices that come to be meant."""
    if one["ended"] is not None:
        return True
    everything_began = one["stage"] == len(one["stages"])
    return bool(one["following"]) and everything_began and not any(stage["open"] for stage in one["stages"])


def watch(api: ControllerClient, number: int, *, as_json: bool, until: float = float("inf")) -> dict[str, Any]:
    """Show it live until it ends; how it stands then. JSON: a line for each change."""
    last: dict[str, Any] = {}
    if as_json:
        for one in looks(api, number, until):
            if one != last:
                click.echo(json.dumps(one))
            last = one
        return last
    out = console()
    if out.is_terminal:
        with Live(console=out, refresh_per_second=4, transient=False) as live:
            for last in looks(api, number, until):
                live.update(rollout_shown(last))
        return last
    return _told_in_lines(api, number, until, out.print)


def _told_in_lines(
    api: ControllerClient, number: int, until: float, say: Callable[[RenderableType], None]
) -> dict[str, Any]:
    """Where nothing can be redrawn: whole at each change of state or stage."""
    seen: tuple[Any, ...] = ()
    last: dict[str, Any] = {}
    for last in looks(api, number, until):
        now = (last["state"], last["stage"], last["why"], last["ended"])
        if now != seen:
            say(rollout_shown(last))
        seen = now
    return last


def exit_code(one: Mapping[str, Any]) -> int:
    """0 for one that finished, or that goes on following."""
    return EXITS.get(str(one["state"]), 0)
