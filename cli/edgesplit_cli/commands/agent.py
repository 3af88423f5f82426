"""`edgectl agent`: versions of the agent itself: push kits to the controller, roll them out to devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.settings import cache_folder
from edgesplit.errors import UsageError
from edgesplit.quantities import format_size
from edgesplit.release.agent_release import WHEELS_FILE
from edgesplit_cli.commands.deploy import device_lines, sign_release, wait_for_rollout
from edgesplit_cli.options.kit import kit_options
from edgesplit_cli.options.rollout import (
    now_option,
    rollout_body,
    rollout_options,
    sign_with_option,
    to_option,
    wait_option,
    yes_option,
)
from edgesplit_cli.options.types import FOLDER
from edgesplit_cli.output import json_option, print_json, print_result, table
from edgesplit_cli.progress import progress_text, upload_bar
from edgesplit_cli.settings import connect
from edgesplit_provisioning.kit import Kit, Target, build_kit, read_kit


@click.group()
def agent() -> None:
    """Versions of the agent itself: push them, list them, roll them out to devices; a version that fails is rolled
    back."""


@agent.command()
@click.argument("kits", nargs=-1, type=FOLDER, metavar="[KIT]...")
@click.option("--build", is_flag=True, help="Build the kit of this version here instead of giving its folder.")
@kit_options("With --build: ")
@json_option
@click.pass_obj
def push(
    data: Path, /, kits: tuple[Path, ...], build: bool, python: str, machine: str, extras: tuple[str, ...],
    wheelhouse: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Give the controller a version of the agent: one KIT for each kind of machine that it shall run on.

    A KIT is the folder that `edgectl flash` puts on a card. The version is the kit's; its content is never changed once
    it is pushed, but further kits of the same version may follow.
    """
    if build == bool(kits):
        raise UsageError("give the folder of a kit, or --build to make one")
    api = connect(data)
    pushed_kits = [read_kit(kit) for kit in kits] or [_build_kit(Target(python, machine), extras, wheelhouse, as_json)]
    answers = [_push_kit(api, kit, as_json) for kit in pushed_kits]
    lines = [
        f"agent {kit.manifest.version} for Python {kit.manifest.python} on {kit.manifest.machine} "
        + ("is registered now" if answer["created"] else "was registered already")
        for answer, kit in zip(answers, pushed_kits, strict=True)
    ]
    version = pushed_kits[-1].manifest.version
    hint = f"`edgectl agent deploy {version} --to DEVICE --canary 10%` rolls it out."
    print_result(answers, as_json, *lines, hint)


@agent.command(name="list")
@json_option
@click.pass_obj
def list_(data: Path, as_json: bool) -> None:
    """Every version that was pushed, and how many devices run it."""
    versions = connect(data).get("/v1/agents")
    rows = [
        (version["version"], version["model"], _builds_text(version["builds"]), str(version["devices"]))
        for version in versions
    ]
    print_result(versions, as_json, table(("version", "as", "built for", ">devices"), rows))


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
    data: Path, /, version: str, targets: tuple[str, ...], now: bool, wait_s: float, sign_with: tuple[str, ...],
    yes: bool, as_json: bool, **terms: Any,
) -> None:  # fmt: skip
    """Sign VERSION of the agent as one release, and roll it out to devices, as `edgectl deploy` does for models.

    Each device installs it beside the version that runs, starts it on trial, and rolls back unless it reaches the
    broker and serves what was served before. `edgectl rollout` shows and controls the rollout.
    """
    api = connect(data)
    body = {"version": version, "to": list(targets), "now": now, "rollout": rollout_body(**terms)}
    deployment = api.post("/v1/agents/deployments", {**body, "elsewhere": bool(sign_with)})
    if "next_targets" in deployment:
        deployment = api.post("/v1/agents/deployments/signed", {**body, **sign_release(deployment, sign_with, yes)})
    if not as_json:
        click.echo(f"agent {version}, release {deployment['release'][:16]}…, to {', '.join(deployment['devices'])}")
        for line in device_lines(deployment):
            click.echo(line)
    if wait_s:
        wait_for_rollout(api, deployment["rollout"], wait_s, quiet=as_json)
    elif not as_json:
        click.echo(f"Rollout {deployment['rollout']}: `edgectl rollout status --watch` follows it.")
    if as_json:
        print_json(deployment)


def _build_kit(target: Target, extras: tuple[str, ...], wheelhouse: Path | None, quiet: bool) -> Kit:
    with progress_text(f"making a kit for {target}", quiet=quiet) as report:
        return build_kit(target, extras=extras, cache=cache_folder(), wheelhouse=wheelhouse, progress=report)


def _push_kit(api: ControllerClient, kit: Kit, quiet: bool) -> dict[str, Any]:
    """Upload the wheels of one kit."""
    manifest, wheels = kit.manifest, kit.files[WHEELS_FILE]
    extras = [extra for extra in manifest.extras if extra != "agent"]
    query = {"version": manifest.version, "python": manifest.python, "machine": manifest.machine, "extra": extras}
    total = wheels.stat().st_size
    with wheels.open("rb") as file, upload_bar(f"pushing agent {manifest.version}", total, quiet=quiet) as on_progress:
        answer: dict[str, Any] = api.upload("/v1/agents", file, total, on_progress, **query)
    return answer


def _builds_text(builds: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{build['machine']} Python {build['python']}"
        + (f" with {', '.join(build['extras'])}" if build["extras"] else "")
        + f" ({format_size(build['bytes'])})"
        for build in builds
    )
