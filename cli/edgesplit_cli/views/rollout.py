"""A rollout as text: stages as bars, what it waits for, failures by cause; and following it until it ends."""

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
from edgesplit.quantities import format_duration
from edgesplit.terminal_text import printable
from edgesplit_cli.output import console, counted, table

EXIT_CODES = {"finished": 0, "failed": 11, "aborted": 12, "rolled back": 13, "superseded": 14}
"""Exit code of a command that follows a rollout, by how the rollout ended."""
POLL_S = 1.0
WIDTH = 40
BAR_PARTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("█", ("succeeded",), "green"),
    ("█", ("failed", "rolled back", "timed out"), "red"),
    ("▓", ("trial",), "yellow"),
    ("▒", ("assigned", "fetching"), "yellow"),
    ("·", ("skipped", "superseded"), "dim"),
    ("░", ("queued",), "dim"),
)
PROGRESS_TEXTS = (
    ("queued", "to be assigned"), ("assigned", "assigned"), ("fetching", "fetching"),
    ("trial", "on trial: kept once it has run for some seconds without a fault, else rolled back"),
)  # fmt: skip
"""What a device does in each state that passes."""
STYLES = {
    "finished": "green", "running": "yellow", "failed": "red", "aborting": "red", "aborted": "red",
    "rolling back": "red", "rolled back": "red", "paused": "magenta", "waiting": "magenta", "scheduled": "cyan",
    "superseded": "dim",
}  # fmt: skip


def rollout_table(rollouts: list[dict[str, Any]]) -> RenderableType:
    """Several rollouts, one line each."""
    rows = []
    for rollout in printable(rollouts):
        states = rollout["states"]
        failed = states["failed"] + states["rolled back"] + states["timed out"]
        rows.append(
            (
                str(rollout["id"]), rollout["model"], Text(rollout["state"], STYLES.get(rollout["state"], "")),
                f"{max(rollout['stage'], 0)}/{len(rollout['stages'])}", str(rollout["devices"]),
                simulated_text(rollout),
                str(states["succeeded"]), str(failed), rollout["reason"] or rollout["waits_for"],
            )
        )  # fmt: skip
    columns = (">id", "model", "state", "stage", ">devices", "of them", ">well", ">not", "reason, or what it waits for")
    return table(columns, rows)


def rollout_view(rollout: dict[str, Any]) -> RenderableType:
    """One rollout in full."""
    rollout = printable(rollout)
    head = Text.assemble(
        (f"rollout {rollout['id']}", "bold"),
        f"  {rollout['model']}  {_purpose(rollout)} {_targets(rollout)}  ",
        (rollout["state"], STYLES.get(rollout["state"], "")),
    )  # fmt: skip
    lines: list[RenderableType] = [head]
    if rollout["reason"]:
        lines.append(Text(f"  {rollout['reason']}", "red" if rollout["state"] in ("failed", "aborting") else ""))
    if rollout["waits_for"]:
        lines.append(Text(f"  waits for {rollout['waits_for']}"))
    if rollout["superseded_by"]:
        lines.append(Text(f"  rollout {rollout['superseded_by']} has taken devices over"))
    lines += [_bar(stage, rollout["stage"]) for stage in rollout["stages"]]
    if speed := _speed_text(rollout):
        lines.append(Text(f"  {speed}"))
    if rollout["failures"]:
        rows = [
            (str(cause["count"]), cause["kind"], _devices_text(cause), cause["example"])
            for cause in rollout["failures"]
        ]
        lines.append(table((">devices", "cause", "which", "for example"), rows))
    return Group(*lines)


def _purpose(rollout: Mapping[str, Any]) -> str:
    return "is removed from" if rollout["withdraws"] else f"release {rollout['release'][:16]}…  to"


def _targets(rollout: Mapping[str, Any]) -> str:
    targets = rollout["targets"]
    return ", ".join(targets[:4]) + (f" and {len(targets) - 4} more" if len(targets) > 4 else "")


def _devices_text(cause: Mapping[str, Any]) -> str:
    more = cause["count"] - len(cause["devices"])
    return ", ".join(cause["devices"]) + (f", {more} more" if more > 0 else "")


def _bar(stage: Mapping[str, Any], reached: int) -> Text:
    """A stage as a line: `2  50%  ████▒▒░░  12 of 40`."""
    states, devices = stage["states"], stage["devices"]
    line = Text(f"  {stage['number']:>2}  {stage['size']:>6}  ", "" if stage["number"] <= reached else "dim")
    drawn = 0
    for sign, names, style in BAR_PARTS:
        count = sum(states.get(name, 0) for name in names)
        cells = _cells(count, devices, WIDTH - drawn)
        line.append(sign * cells, style)
        drawn += cells
    line.append(" " * (WIDTH - drawn))
    state_counts = ", ".join(f"{count} {state}" for state, count in states.items())
    waits = "  waits for approval" if stage["needs_approval"] else ""
    of_them = f" ({simulated_text(stage)})" if simulated_text(stage) else ""
    return line.append(f"  {counted(devices, 'device')}{of_them}: {state_counts or 'none'}{waits}")


def simulated_text(counted: Mapping[str, Any]) -> str:
    """How many of the counted devices are emulated or simulated; empty where none is."""
    parts = ((counted.get(kind, 0), kind) for kind in ("emulated", "simulated"))
    return ", ".join(f"{count} {kind}" for count, kind in parts if count)


def _cells(count: int, of: int, room: int) -> int:
    """Width of a part of the bar; at least 1 where the count is not 0."""
    return min(room, max(1, round(WIDTH * count / of))) if count else 0


def _speed_text(rollout: Mapping[str, Any]) -> str:
    """How many devices received the release, and how fast."""
    reached = rollout["devices"] - sum(rollout["states"][state] for state in ("queued", "skipped", "superseded"))
    if not rollout["began"] or not reached:
        return ""
    seconds = max(1.0, (rollout["ended"] or time.time()) - rollout["began"])
    limit = f" (at most {rollout['terms']['rate']})" if rollout["terms"]["rate"] else ""
    speed = f", {_rate_text(reached, seconds)}" if reached > 1 else ""
    return f"assigned to {counted(reached, 'device')} in {format_duration(seconds)}{speed}{limit}"


def _rate_text(devices: int, seconds: float) -> str:
    """Devices per minute, hour or day, whichever gives a number that is not below 1."""
    for name, unit_s in (("a minute", 60.0), ("an hour", 3600.0)):
        if devices * unit_s >= seconds:
            return f"about {devices * unit_s / seconds:.0f} {name}"
    return f"about {devices * 86_400.0 / seconds:.3g} a day"


def progress_line(rollout: Mapping[str, Any]) -> str:
    """What a rollout does now, in one line."""
    states = rollout["states"]
    parts = [f"{states[state]} {text}" for state, text in PROGRESS_TEXTS if states.get(state)]
    doing = ", ".join(parts) or rollout["waits_for"] or rollout["state"]
    return f"runs on {states['succeeded']} of {counted(rollout['devices'], 'device')}; {printable(doing)}"


def poll(api: ControllerClient, number: int, until: float, every_s: float = POLL_S) -> Iterator[dict[str, Any]]:
    """Poll the rollout until it has ended, only follows new devices, or the time is up; yields each state."""
    while True:
        rollout: dict[str, Any] = api.get(f"/v1/rollouts/{number}")
        yield rollout
        if is_settled(rollout) or time.monotonic() > until:
            return
        time.sleep(every_s)


def is_settled(rollout: Mapping[str, Any]) -> bool:
    """True where the rollout has ended, or only waits for devices that match later."""
    if rollout["ended"] is not None:
        return True
    everything_began = rollout["stage"] == len(rollout["stages"])
    return bool(rollout["following"]) and everything_began and not any(stage["open"] for stage in rollout["stages"])


def is_awaited_offline(device: Mapping[str, Any]) -> bool:
    """True for a device that the rollout waits for, and that is offline: nothing happens there until it returns."""
    is_awaited = device["state"] in ("queued", "assigned", "fetching", "trial") or device["rolls_back"]
    return is_awaited and not device.get("online", True)


def watch(api: ControllerClient, number: int, *, as_json: bool, until: float = float("inf")) -> dict[str, Any]:
    """Show the rollout live until it ends; returns its last state. With `as_json`, one line for each change."""
    last: dict[str, Any] = {}
    if as_json:
        for rollout in poll(api, number, until):
            if rollout != last:
                click.echo(json.dumps(rollout))
            last = rollout
        return last
    out = console()
    if out.is_terminal:
        with Live(console=out, refresh_per_second=4, transient=False) as live:
            for last in poll(api, number, until):
                live.update(rollout_view(last))
        return last
    return _print_changes(api, number, until, out.print)


def _print_changes(
    api: ControllerClient, number: int, until: float, print_view: Callable[[RenderableType], None]
) -> dict[str, Any]:
    """Without a terminal: print the whole rollout at each change of state or stage."""
    previous: tuple[Any, ...] = ()
    last: dict[str, Any] = {}
    for last in poll(api, number, until):
        now = (last["state"], last["stage"], last["reason"], last["ended"])
        if now != previous:
            print_view(rollout_view(last))
        previous = now
    return last


def exit_code(rollout: Mapping[str, Any]) -> int:
    """Exit code by how the rollout ended; 0 also for one that goes on following."""
    return EXIT_CODES.get(str(rollout["state"]), 0)
