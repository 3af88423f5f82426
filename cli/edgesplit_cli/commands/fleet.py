"""`edgectl fleet`: an overview of the fleet."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from edgesplit.controller_client.client import ControllerClient
from edgesplit.terminal_text import printable
from edgesplit_cli.output import console, counted, json_option, percent_text, print_json, table
from edgesplit_cli.settings import connect
from edgesplit_cli.views.device import STATE_STYLE, ago

REFRESH_S = 2.0
"""Seconds between two refreshes of `--watch`."""


@click.command()
@json_option
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.pass_obj
def fleet(data: Path, as_json: bool, watch: bool) -> None:
    """An overview of the fleet: health, versions, cuts in use, fallbacks, failures by cause, parts that are not
    healthy."""
    api = connect(data)
    if as_json or not watch:
        while True:
            if as_json:
                print_json(api.get("/v1/fleet"))
            else:
                console().print(_screen(api))
            if not watch:
                return
            time.sleep(REFRESH_S)
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        while True:
            live.update(_screen(api), refresh=True)
            time.sleep(REFRESH_S)


def _screen(api: ControllerClient) -> Group:
    data = printable(api.get("/v1/fleet"))
    return Group(overview(data), *unhealthy_parts(printable(api.get("/v1/components"))))


def overview(fleet: Mapping[str, Any]) -> Group:
    """The overview on one screen."""
    parts: list[Any] = [states_text(fleet["devices"]), agents_text(fleet), models_table(fleet)]
    if fleet["failures"]:
        parts.append(failures_table(fleet["failures"]))
    wrong = fleet["conditions"]
    parts.append(conditions_table(wrong, fleet["at"]) if wrong else Text("no problems", "green"))
    return Group(*parts)


def unhealthy_parts(parts: Iterable[Mapping[str, Any]]) -> list[Any]:
    """A table of parts of the installation that are not healthy, and what to do; empty where all are."""
    rows = [
        (Text(f"{part['name']} {part['subject']}".strip(), "red"), part["state"], part["text"], part["remedy"])
        for part in parts
        if part["state"] != "good"
    ]
    return [table(("part", "is", "detail", "do"), rows, title="parts")] if rows else []


def states_text(devices: Mapping[str, Any]) -> Text:
    """Number of devices by state."""
    parts: list[str | tuple[str, str]] = [(counted(devices["total"], "device"), "bold")]
    for state, style in STATE_STYLE.items():
        if count := devices.get(state):
            parts += ["  ", (f"{count} {state}", style)]
    if emulated := devices.get("emulated"):
        parts.append(f"  ({emulated} emulated)")
    if simulated := devices.get("simulated"):
        parts.append(f"  ({simulated} simulated)")
    return Text.assemble(*parts)


def agents_text(fleet: Mapping[str, Any]) -> Text:
    """Number of devices by version of the agent and by device class."""
    return Text(
        f"agents: {_counts_text(fleet['agents'], 'agent')}   classes: {_counts_text(fleet['classes'], 'device_class')}"
    )


def models_table(fleet: Mapping[str, Any]) -> Any:
    """By model: what runs, which cuts are in use, and the requests of the last minutes."""
    shown = [model for model in fleet["models"] if model["releases"] or model["requests"] or model["failed"]]
    rows = [line for model in shown for line in _model_rows(model)]
    minutes = f"requests in {fleet['lately_s'] / 60:.0f} min"
    return table(("model", "release", "state", ">devices", "cuts in use", f">{minutes}", ">failed", ">fallbacks"), rows)


def failures_table(failures: Iterable[Mapping[str, Any]]) -> Any:
    """Releases that failed, by cause."""
    rows = [
        (
            failure["model"],
            failure["release"][:12],
            failure["state"],
            str(failure["devices"]),
            failure["cause"],
            failure["example"],
        )
        for failure in failures
    ]
    return table(("model", "release", "state", ">devices", "cause", "as on"), rows, title="failures")


def conditions_table(conditions: Iterable[Mapping[str, Any]], now: float) -> Any:
    """What is wrong, by kind."""
    rows = [
        (
            Text(condition["kind"], "red"),
            str(condition["devices"]),
            ago(condition["since"], now),
            condition["example"] or "",
            condition["remedy"],
        )
        for condition in conditions
    ]
    return table(("condition", ">devices", "since", "for example", "remedy"), rows, title="problems")


def _model_rows(model: Mapping[str, Any]) -> list[tuple[str, ...]]:
    cuts = ", ".join(f"{cut['cut']} {cut['devices']}" for cut in model["cuts"]) or "-"
    lines: list[tuple[str, ...]] = []
    for index, release in enumerate(model["releases"] or [{}]):
        name = str(release.get("version") or "") + (f" {release['release'][:12]}" if release.get("release") else "")
        release_cells = (name.strip() or "-", release.get("state", "-"), str(release.get("devices", 0)))
        total = model["requests"] + model["failed"]
        counts = (
            str(model["requests"]),
            str(model["failed"]),
            percent_text(model["fallbacks"] / total if total else None),
        )
        lines.append(
            (model["model"], *release_cells, cuts, *counts) if not index else ("", *release_cells, "", "", "", "")
        )
    return lines


def _counts_text(rows: Iterable[Mapping[str, Any]], name: str) -> str:
    return ", ".join(f"{row[name] or 'unknown'} {row['devices']}" for row in rows) or "-"
