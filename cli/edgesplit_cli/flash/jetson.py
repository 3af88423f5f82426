"""One run of `edgectl flash --device jetson-…`: read NVIDIA's board support package, prepare its root file system, and
print or run NVIDIA's flash commands. Everything that can be wrong is checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress, SpinnerColumn, TextColumn

from edgesplit.controller_client.claims import ClaimRequest, create_claim
from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.settings import cache_folder
from edgesplit.errors import UsageError
from edgesplit.identifiers import parse_label
from edgesplit_cli.flash import prompts
from edgesplit_cli.output import console, print_json
from edgesplit_provisioning.image import options
from edgesplit_provisioning.image.device_config import check_name_is_free, read_claim
from edgesplit_provisioning.image.wait_online import wait_online
from edgesplit_provisioning.jetson import flasher
from edgesplit_provisioning.jetson.bsp import BOARDS, BoardSupportPackage, read_bsp
from edgesplit_provisioning.jetson.overlay import Overlay, overlay_files
from edgesplit_provisioning.jetson.root_filesystem import install_files, restore_files
from edgesplit_provisioning.kit import Kit, Target, build_kit, read_kit
from edgesplit_provisioning.wifi import Wifi

BUNDLED_PYTHON = "3.11"
"""Version of the Python that the kit carries where the root file system has none."""
CARDS_ONLY = ("image", "sha256", "batch", "fixed_disk")
"""Options that apply to cards only."""
RECOVERY = "connect the board's recovery port by USB, and start it in recovery mode (FC_REC held or bridged)"


def is_jetson(device: str | None) -> bool:
    """True where NVIDIA's tools flash this board."""
    return device in BOARDS


@dataclass(frozen=True, slots=True)
class JetsonFlashOptions:
    """The checked options of one run."""

    tree: BoardSupportPackage
    medium: flasher.JetsonMedium
    hostname: str
    user: str
    ssh_keys: tuple[str, ...]
    wifi: Wifi | None
    commands: list[list[str]]


def flash_jetson(connect: Callable[[], ControllerClient], as_json: bool, arguments: dict[str, Any]) -> None:
    """Run the whole command: clean up, or prepare, print, run and wait, as the options say."""
    bsp: Path | None = arguments["bsp"]
    if bsp is None:
        raise UsageError("say where NVIDIA's Linux_for_Tegra is: --bsp DIR")
    if arguments["clean"]:
        _clean(bsp, as_json)
        return
    order = _parse_options(bsp, arguments)
    api = None if arguments["dry_run"] or (arguments["claim_file"] and not arguments["wait"]) else connect()
    if api is not None and arguments["claim_file"] is None:
        check_name_is_free(api, order.hostname, arguments["replace"])
    if not arguments["dry_run"]:
        _prepare(order, api, arguments)
    _print_commands(order, as_json, prepared=not arguments["dry_run"])
    if arguments["run"] and not arguments["dry_run"]:
        _run_commands(order, arguments)
    if arguments["wait"] and api is not None:
        progress = wait_online(api, [order.hostname], arguments["wait_s"], lambda progress: None)
        if not as_json:
            click.echo(f"online: {', '.join(progress.online)}")


def _parse_options(bsp: Path, arguments: dict[str, Any]) -> JetsonFlashOptions:
    for name in CARDS_ONLY:
        if arguments[name]:
            raise UsageError(f"--{name.replace('_', '-')} is for cards: a Jetson's system comes from --bsp")
    tree = read_bsp(bsp, arguments["device"], arguments["board"] or "")
    medium = flasher.parse_medium(arguments["to"] or "nvme")
    if not tree.python and arguments["interpreter"] is None and arguments["kit_folder"] is None:
        raise UsageError(
            f"{tree.name} has no Python that the agent runs on: give the kit one with --interpreter ARCHIVE"
            " (python-build-standalone's install_only for aarch64)"
        )
    user = options.checked_user_name(arguments["user"]) if arguments["user"] is not None else ""
    keys = options.read_ssh_keys(arguments["ssh_key"]) if arguments["ssh_key"] is not None else ()
    if (keys or arguments["sudo"]) and not user:
        raise UsageError("--ssh-key and --sudo are for somebody: give --user NAME")
    hostname = _hostname(arguments)
    wifi = prompts.prompt_network(arguments["ssid"], arguments["wifi_password_file"], arguments["wifi_country"])
    steps = flasher.flash_commands(
        tree, medium, user=user, hostname=hostname, accept_license=arguments["accept_nvidia_license"]
    )
    return JetsonFlashOptions(tree, medium, hostname, user, keys, wifi, steps)


def _hostname(arguments: dict[str, Any]) -> str:
    if arguments["claim_file"] is not None:
        claim, _ = read_claim(arguments["claim_file"], arguments["hostname"])
        return options.checked_hostname(claim.device)
    if arguments["hostname"] is not None:
        return options.checked_hostname(arguments["hostname"])
    return options.random_hostname(arguments["device"])


def _prepare(order: JetsonFlashOptions, api: ControllerClient | None, arguments: dict[str, Any]) -> None:
    kit = _kit(order.tree, arguments)
    if arguments["claim_file"] is not None:
        claim = read_claim(arguments["claim_file"], order.hostname)[1]
    else:
        assert api is not None
        request = ClaimRequest(
            device=order.hostname, device_class=arguments["device"], link=arguments["link"], group=arguments["group"],
            labels=dict(parse_label(text) for text in arguments["labels"]), expires_s=int(arguments["expires_s"]),
            replace=arguments["replace"],
        )  # fmt: skip
        claim = create_claim(api, request).encode()
    install_files(order.tree.path, overlay_files(Overlay(
        kit=kit.files, claim=claim, hostname=order.hostname, user=order.user, ssh_keys=order.ssh_keys,
        sudo=arguments["sudo"], wifi=order.wifi,
    )))  # fmt: skip


def _kit(tree: BoardSupportPackage, arguments: dict[str, Any]) -> Kit:
    if arguments["kit_folder"] is not None:
        kit = read_kit(arguments["kit_folder"])
        fits = kit.manifest.python == tree.python or "python.tar.gz" in kit.files
        if kit.manifest.machine != "aarch64" or not fits:
            kit_text = f"Python {kit.manifest.python} on {kit.manifest.machine}"
            raise UsageError(f"the kit in {arguments['kit_folder']} is for {kit_text}, and {tree.name} needs another")
        return kit
    target = Target(python=tree.python or BUNDLED_PYTHON, machine="aarch64", glibc=tree.glibc)
    out = console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task("making the kit", total=None)
        return build_kit(
            target, extras=arguments["extras"], cache=cache_folder(), wheelhouse=arguments["wheelhouse"],
            interpreter=None if tree.python else arguments["interpreter"],
            progress=lambda text: bar.update(task, description=text),
        )  # fmt: skip


def _print_commands(order: JetsonFlashOptions, as_json: bool, *, prepared: bool) -> None:
    steps = [flasher.command_line(step) for step in order.commands]
    if as_json:
        print_json({
            "device": order.hostname, "tree": str(order.tree.path), "release": order.tree.name,
            "board": order.tree.board, "to": order.medium, "python": order.tree.python or BUNDLED_PYTHON,
            "prepared": prepared, "commands": order.commands,
        })  # fmt: skip
        return
    state = "is prepared for" if prepared else "would be prepared for"
    click.echo(f"{order.tree.path}: {order.tree.name} {state} {order.hostname} ({order.tree.board}, {order.medium})")
    click.echo(f"{RECOVERY}; then, in {order.tree.path}:")
    for step in steps:
        click.echo(f"  {step}")
    if prepared:
        click.echo(f"`edgectl flash --device … --bsp {order.tree.path} --clean` puts the tree back as it was")


def _run_commands(order: JetsonFlashOptions, arguments: dict[str, Any]) -> None:
    if not arguments["yes"]:
        click.confirm(f"Run that now? Everything on the board's {order.medium} is overwritten.", abort=True, err=True)
    for step in order.commands:
        flasher.run(order.tree, step)


def _clean(bsp: Path, as_json: bool) -> None:
    kept = restore_files(bsp)
    if as_json:
        print_json({"tree": str(bsp), "left": kept})
        return
    click.echo(f"{bsp}: as it was before")
    for path in kept:
        click.echo(f"  rootfs/{path} was changed since, and is left")
