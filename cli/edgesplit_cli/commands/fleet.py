"""`edgectl fleet`: the fleet at a glance."""

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
from edgesplit_cli.commands.device import STATE_STYLE, ago
from edgesplit_cli.output import console, json_option, plain, print_json, share, table
from edgesplit_cli.settings import connect

EVERY_S = 2.0


@click.command()
@json_option
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.pass_obj
def fleet(data: Path, as_json: bool, watch: bool) -> None:
    """The fleet at a glance: health, versions, cuts in use, fallbacks, failures by cause, parts that are not well."""
    api = connect(data)
    if as_json and not watch:
        print_json(api.get("/v1/fleet"))
        return
    if not watch:
        console().print(_screen(api))
        return
    if as_json:
        while True:
            print_json(api.get("/v1/fleet"))
            time.sleep(EVERY_S)
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        while True:
            live.update(_screen(api), refresh=True)
            time.sleep(EVERY_S)


def _screen(api: ControllerClient) -> Group:
    seen = plain(api.get("/v1/fleet"))
    return Group(overview(seen), *not_well(plain(api.get("/v1/parts"))))


def overview(seen: Mapping[str, Any]) -> Group:
    """Everything on one screen."""
    parts: list[Any] = [states(seen["devices"]), agents(seen), models(seen)]
    if seen["failures"]:
        parts.append(failures(seen["failures"]))
    wrong = seen["conditions"]
    parts.append(conditions(wrong, seen["at"]) if wrong else Text("nothing is wrong", "green"))
    return Group(*parts)


def not_well(parts: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Parts of the installation that are not well, and what to do; nothing where all are."""
    rows = [
        (Text(f"{one['name']} {one['subject']}".strip(), "red"), one["state"], one["text"], one["do"])
        for one in parts
        if one["state"] != "good"
    ]
    return [table(("part", "is", "what is known", "do"), rows, title="parts")] if rows else []


def states(devices: Mapping[str, Any]) -> Text:
    """How many are how."""
    words: list[str | tuple[str, str]] = [(f"{devices['total']} devices", "bold")]
    for state, style in STATE_STYLE.items():
        if count := devices.get(state):
            words += ["  ", (f"{count} {state}", style)]
    if emulated := devices.get("emulated"):
        words.append(f"  ({emulated} emulated)")
    if simulated := devices.get("simulated"):
        words.append(f"  ({simulated} simulated)")
    return Text.assemble(*words)


def agents(seen: Mapping[str, Any]) -> Text:
    """Versions of the agent, and device classes."""
    return Text(f"agents: {_counted(seen['agents'], 'agent')}   classes: {_counted(seen['classes'], 'device_class')}")


def models(seen: Mapping[str, Any]) -> Any:
    """By model: what runs, which cuts, and how the last minutes went."""
    rows = [line for one in seen["models"] for line in _model(one)]
    minutes = f"requests in {seen['lately_s'] / 60:.0f} min"
    return table(("model", "release", "state", ">devices", "cuts in use", f">{minutes}", ">failed", ">fallbacks"), rows)


def failures(found: Iterable[Mapping[str, Any]]) -> Any:
    """Releases that failed, by cause."""
    rows = [
        (one["model"], one["release"][:12], one["state"], str(one["devices"]), one["cause"], one["example"])
        for one in found
    ]
    return table(("model", "release", "state", ">devices", "cause", "as on"), rows, title="failures")


def conditions(found: Iterable[Mapping[str, Any]], now: float) -> Any:
    """What is wrong, by kind."""
    rows = [
        (Text(one["kind"], "red"), str(one["devices"]), ago(one["since"], now), one["example"] or "", one["do"])
        for one in found
    ]
    return table(("what", ">devices", "first", "as on", "do"), rows, title="what is wrong")


def _model(one: Mapping[str, Any]) -> list[tuple[str, ...]]:
    cuts = ", ".join(f"{cut['cut']} {cut['devices']}" for cut in one["cuts"]) or "-"
    lines: list[tuple[str, ...]] = []
    for place, release in enumerate(one["releases"] or [{}]):
        name = str(release.get("version") or "") + (f" {release['release'][:12]}" if release.get("release") else "")
        told = (name.strip() or "-", release.get("state", "-"), str(release.get("devices", 0)))
        asked = one["requests"] + one["failed"]
        counts = (str(one["requests"]), str(one["failed"]), share(one["fallbacks"] / asked if asked else None))
        lines.append((one["model"], *told, cuts, *counts) if not place else ("", *told, "", "", "", ""))
    return lines


def _counted(rows: Iterable[Mapping[str, Any]], name: str) -> str:
    return ", ".join(f"{one[name] or 'unknown'} {one['devices']}" for one in rows) or "-"
