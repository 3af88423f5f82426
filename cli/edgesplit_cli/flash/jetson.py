"""One run of `edgectl flash --device jetson-…`: read NVIDIA's board support package, prepare its root file system, and
print or run NVIDIA's flash commands. Everything that can be wrong is checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
from rich.progress import SpinnerColumn

from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.settings import cache_folder
from edgesplit.errors import UsageError
from edgesplit_cli.flash.prompts import TerminalUser
from edgesplit_cli.output import print_json, print_result
from edgesplit_cli.progress import progress_bar
from edgesplit_provisioning.flash_options import JetsonOptions
from edgesplit_provisioning.image import options
from edgesplit_provisioning.image.device_config import check_name_is_free, request_claim, requested_device
from edgesplit_provisioning.image.options import DeviceSettings
from edgesplit_provisioning.image.wait_online import wait_online
from edgesplit_provisioning.jetson import flasher
from edgesplit_provisioning.jetson.bsp import BOARDS, BoardSupportPackage, read_bsp
from edgesplit_provisioning.jetson.overlay import overlay_files
from edgesplit_provisioning.jetson.root_filesystem import install_files, restore_files
from edgesplit_provisioning.kit import Kit, Target, build_kit, read_kit
from edgesplit_provisioning.wifi import Wifi, network_from_options

BUNDLED_PYTHON = "3.11"
"""Version of the Python that the kit carries where the root file system has none."""
RECOVERY = "connect the board's recovery port by USB, and start it in recovery mode (FC_REC held or bridged)"


def is_jetson(device: str | None) -> bool:
    """True where NVIDIA's tools flash this board."""
    return device in BOARDS


@dataclass(frozen=True, slots=True)
class JetsonFlash:
    """The checked plan of one run."""

    tree: BoardSupportPackage
    medium: flasher.JetsonMedium
    device: DeviceSettings
    claim: bytes | None
    """A claim that was made before."""
    user: str
    ssh_keys: tuple[str, ...]
    wifi: Wifi | None
    commands: list[list[str]]


def flash_jetson(
    connect: Callable[[], ControllerClient], flash: JetsonOptions, *, as_json: bool, run: bool, yes: bool, wait_s: float
) -> None:
    """Run the whole command: prepare, print, run and wait, as the options say."""
    order = _parse_options(flash, TerminalUser(as_json, yes))
    api = None if flash.dry_run or (flash.claim_file and not flash.wait) else connect()
    if api is not None and flash.claim_file is None:
        check_name_is_free(api, order.device.hostname, flash.replace)
    if not flash.dry_run:
        _prepare(order, api, flash)
    _print_commands(order, as_json, prepared=not flash.dry_run)
    if run and not flash.dry_run:
        _run_commands(order, yes)
    if flash.wait and api is not None:
        progress = wait_online(api, [order.device.hostname], wait_s, lambda progress: None)
        if not as_json:
            click.echo(f"online: {', '.join(progress.online)}")


def _parse_options(flash: JetsonOptions, user: TerminalUser) -> JetsonFlash:
    tree = read_bsp(flash.bsp, flash.device, flash.board or "")
    medium = flasher.parse_medium(flash.to or "nvme")
    if not tree.python and flash.interpreter is None and flash.kit_folder is None:
        raise UsageError(
            f"{tree.name} has no Python that the agent runs on: give the kit one with --interpreter ARCHIVE"
            " (python-build-standalone's install_only for aarch64)"
        )
    login = options.checked_user_name(flash.user) if flash.user is not None else ""
    keys = options.read_ssh_keys(flash.ssh_key) if flash.ssh_key is not None else ()
    if (keys or flash.sudo) and not login:
        raise UsageError("--ssh-key and --sudo need a user: add --user NAME")
    device, claim = requested_device(flash)
    wifi = network_from_options(flash, user.ask_passphrase)
    steps = flasher.flash_commands(
        tree, medium, user=login, hostname=device.hostname, accept_license=flash.accept_nvidia_license
    )
    return JetsonFlash(tree, medium, device, claim, login, keys, wifi, steps)


def _prepare(order: JetsonFlash, api: ControllerClient | None, flash: JetsonOptions) -> None:
    kit, claim = _kit(order.tree, flash), order.claim
    if claim is None:
        assert api is not None
        claim = request_claim(api, flash, order.device, flash.device)
    files = overlay_files(
        kit.files, claim, order.device.hostname, user=order.user, ssh_keys=order.ssh_keys, sudo=flash.sudo,
        wifi=order.wifi, agent_options=flash.agent_options,
    )  # fmt: skip
    install_files(order.tree.path, files)


def _kit(tree: BoardSupportPackage, flash: JetsonOptions) -> Kit:
    if flash.kit_folder is not None:
        kit = read_kit(flash.kit_folder)
        fits = kit.manifest.python == tree.python or "python.tar.gz" in kit.files
        if kit.manifest.machine != "aarch64" or not fits:
            kit_text = f"Python {kit.manifest.python} on {kit.manifest.machine}"
            raise UsageError(f"the kit in {flash.kit_folder} is for {kit_text}, and {tree.name} needs another")
        return kit
    target = Target(python=tree.python or BUNDLED_PYTHON, machine="aarch64", glibc=tree.glibc)
    with progress_bar("making the kit", SpinnerColumn(), quiet=False) as update:
        return build_kit(
            target, extras=flash.extras, cache=cache_folder(), wheelhouse=flash.wheelhouse,
            interpreter=None if tree.python else flash.interpreter,
            progress=lambda text: update(description=text),
        )  # fmt: skip


def _print_commands(order: JetsonFlash, as_json: bool, *, prepared: bool) -> None:
    steps = [flasher.command_line(step) for step in order.commands]
    if as_json:
        print_json({
            "device": order.device.hostname, "tree": str(order.tree.path), "release": order.tree.name,
            "board": order.tree.board, "to": order.medium, "python": order.tree.python or BUNDLED_PYTHON,
            "prepared": prepared, "commands": order.commands,
        })  # fmt: skip
        return
    state = "is prepared for" if prepared else "would be prepared for"
    click.echo(
        f"{order.tree.path}: {order.tree.name} {state} {order.device.hostname} ({order.tree.board}, {order.medium})"
    )
    click.echo(f"{RECOVERY}; then, in {order.tree.path}:")
    for step in steps:
        click.echo(f"  {step}")
    if prepared:
        click.echo(f"`edgectl flash --device … --bsp {order.tree.path} --clean` puts the tree back as it was")


def _run_commands(order: JetsonFlash, yes: bool) -> None:
    if not yes:
        click.confirm(f"Run that now? Everything on the board's {order.medium} is overwritten.", abort=True, err=True)
    for step in order.commands:
        flasher.run(order.tree, step)


def clean_tree(bsp: Path, as_json: bool) -> None:
    """Put NVIDIA's root file system back as it was."""
    kept = restore_files(bsp)
    left = [f"  rootfs/{path} was changed since, and is left" for path in kept]
    print_result({"tree": str(bsp), "left": kept}, as_json, f"{bsp}: as it was before", *left)
