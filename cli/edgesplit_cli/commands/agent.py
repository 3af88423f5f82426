"""`edgectl agent`: versions of the agent itself, from a kit to every device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.settings import cache_folder
from edgesplit.errors import UsageError
from edgesplit.release.agent_release import WHEELS_FILE
from edgesplit_cli.commands.deploy import sign_release, wait_for
from edgesplit_cli.commands.options.kit import kit_options
from edgesplit_cli.commands.options.rollout import (
    now_option,
    rollout_body,
    rollout_options,
    sign_with_option,
    to_option,
    wait_option,
    yes_option,
)
from edgesplit_cli.commands.upload_progress import upload_bar
from edgesplit_cli.output import console, json_option, print_json, size, table
from edgesplit_cli.settings import connect
from edgesplit_provisioning.kit import Kit, Target, build_kit, read_kit


@click.group()
def agent() -> None:
    """Versions of the agent itself: pushed, listed, brought to devices, each with a way back of its own."""


@agent.command()
@click.argument("kits", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="[KIT]...")
@click.option("--build", is_flag=True, help="Make the kit of this version here, in place of giving its folder.")
@kit_options("With --build: ")
@json_option
@click.pass_obj
def push(
    data: Path,
    /,
    kits: tuple[Path, ...],
    build: bool,
    python: str,
    machine: str,
    extras: tuple[str, ...],
    wheelhouse: Path | None,
    as_json: bool,
) -> None:
    """Give the controller a version of the agent: one KIT for each kind of machine that it shall run on.

    A KIT is the folder that `edgectl flash` puts on a card. The version is the kit's; what it consists of is never
    changed once it is here, but further kits of the same version may follow.
    """
    if build == bool(kits):
        raise UsageError("give the folder of a kit, or --build to make one")
    api = connect(data)
    made = [read_kit(kit) for kit in kits] or [_built(Target(python, machine), extras, wheelhouse, as_json)]
    answers = [_pushed(api, kit, as_json) for kit in made]
    if as_json:
        print_json(answers)
        return
    for answer, kit in zip(answers, made, strict=True):
        told = "is here now" if answer["created"] else "was here already"
        described = kit.described
        console().print(f"agent {described.version} for Python {described.python} on {described.machine} {told}")
    version = made[-1].described.version
    console().print(f"`edgectl agent deploy {version} --to DEVICE --canary 10%` brings it to devices.")


@agent.command(name="list")
@json_option
@click.pass_obj
def list_(data: Path, as_json: bool) -> None:
    """Every version that was pushed, and how many devices are of it."""
    found = connect(data).get("/v1/agents")
    if as_json:
        print_json(found)
        return
    rows = [(one["version"], one["model"], _builds_told(one["builds"]), str(one["devices"])) for one in found]
    console().print(table(("version", "as", "built for", ">devices"), rows))


@agent.command()
@click.argument("version")
@to_option
@rollout_options
@now_option
@wait_option
@sign_with_option
@yes_option
@json_option
@click.pass_obj
def deploy(
    data: Path,
    /,
    version: str,
    targets: tuple[str, ...],
    now: bool,
    wait_s: float,
    sign_with: tuple[str, ...],
    yes: bool,
    as_json: bool,
    **terms: Any,
) -> None:
    """Sign VERSION of the agent as one release, and bring it to devices, as `edgectl deploy` does for models.

    Each device installs it beside the version that runs, starts it on trial, and goes back by itself unless it reaches
    the broker and serves what was served before. `edgectl rollout` shows and steers it.
    """
    api = connect(data)
    body = {"version": version, "to": list(targets), "now": now, "rollout": rollout_body(**terms)}
    made = api.post("/v1/agents/deployments", {**body, "elsewhere": bool(sign_with)})
    if "next_targets" in made:
        made = api.post("/v1/agents/deployments/signed", {**body, **sign_release(made, sign_with, yes)})
    if as_json:
        if wait_s:
            wait_for(api, made["rollout"], wait_s)
        print_json(made)
        return
    console().print(f"agent {version}, release {made['release'][:16]}…, to {', '.join(made['devices'])}")
    for other in made["supersedes"]:
        console().print(f"  takes {other['devices']} devices over from rollout {other['rollout']}")
    if wait_s:
        wait_for(api, made["rollout"], wait_s)
        return
    console().print(f"Rollout {made['rollout']}: `edgectl rollout status --watch` follows it.")


def _built(target: Target, extras: tuple[str, ...], wheelhouse: Path | None, quiet: bool) -> Kit:
    with console().status("making a kit") as status:
        told = (lambda text: None) if quiet else (lambda text: status.update(text))
        return build_kit(target, extras=extras, cache=cache_folder(), wheelhouse=wheelhouse, progress=told)


def _pushed(api: ControllerClient, kit: Kit, quiet: bool) -> dict[str, Any]:
    """Send the wheels of one kit."""
    described, wheels = kit.described, kit.files[WHEELS_FILE]
    extras = [one for one in described.extras if one != "agent"]
    query = {"version": described.version, "python": described.python, "machine": described.machine, "extra": extras}
    total = wheels.stat().st_size
    with wheels.open("rb") as file, upload_bar(f"pushing agent {described.version}", total, quiet=quiet) as told:
        answer: dict[str, Any] = api.upload("/v1/agents", file, total, told, **query)
    return answer


def _builds_told(builds: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{one['machine']} Python {one['python']}"
        + (f" with {', '.join(one['extras'])}" if one["extras"] else "")
        + f" ({size(one['bytes'])})"
        for one in builds
    )
