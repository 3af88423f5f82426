"""One call of `edgectl flash --device jetson-…`: the tree is looked at, its root file system prepared, and NVIDIA's
commands are printed, or called. Nothing is written before everything that can be wrong was looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress, SpinnerColumn, TextColumn

from edgesplit.controller_client.claims import ClaimWish, make_claim
from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.settings import cache_folder
from edgesplit.errors import UsageError
from edgesplit_cli.output import console, print_json
from edgesplit_provisioning.image import options, prompts
from edgesplit_provisioning.image.batch import label
from edgesplit_provisioning.image.device_config import claim_in, is_free
from edgesplit_provisioning.image.wait_online import wait_online
from edgesplit_provisioning.jetson import flasher
from edgesplit_provisioning.jetson.bsp import BOARDS, Tree, read_tree
from edgesplit_provisioning.jetson.overlay import Network, Overlay, files
from edgesplit_provisioning.jetson.root_filesystem import put_all, take_back
from edgesplit_provisioning.kit import Kit, Target, build_kit, read_kit

OWN_PYTHON = "3.11"
CARDS_ONLY = ("image", "sha256", "batch", "fixed_disk")
RECOVERY = "connect the board's recovery port by USB, and start it in recovery mode (FC_REC held or bridged)"


def is_jetson(device: str | None) -> bool:
    """Is it a board that NVIDIA's tools flash?"""
    return device in BOARDS


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for, checked."""

    tree: Tree
    to: flasher.Medium
    hostname: str
    user: str
    ssh_keys: tuple[str, ...]
    network: Network | None
    steps: list[list[str]]


def flash_jetson(connect: Callable[[], ControllerClient], as_json: bool, asked: dict[str, Any]) -> None:
    """All of it."""
    bsp: Path | None = asked["bsp"]
    if bsp is None:
        raise UsageError("say where NVIDIA's Linux_for_Tegra is: --bsp DIR")
    if asked["clean"]:
        _clean(bsp, as_json)
        return
    order = _order(bsp, asked)
    api = None if asked["dry_run"] or (asked["claim_file"] and not asked["wait"]) else connect()
    if api is not None and asked["claim_file"] is None:
        is_free(api, order.hostname, asked["replace"])
    if not asked["dry_run"]:
        _prepare(order, api, asked)
    _tell(order, as_json, prepared=not asked["dry_run"])
    if asked["run"] and not asked["dry_run"]:
        _run(order, asked)
    if asked["wait"] and api is not None:
        seen = wait_online(api, [order.hostname], asked["wait_s"], lambda seen: None)
        if not as_json:
            click.echo(f"online: {', '.join(seen.online)}")


def _order(bsp: Path, asked: dict[str, Any]) -> Order:
    for name in CARDS_ONLY:
        if asked[name]:
            raise UsageError(f"--{name.replace('_', '-')} is for cards: a Jetson's system comes from --bsp")
    tree = read_tree(bsp, asked["device"], asked["board"] or "")
    to = flasher.medium(asked["to"] or "nvme")
    if not tree.python and asked["interpreter"] is None and asked["kit_folder"] is None:
        raise UsageError(
            f"{tree.name} has no Python that the agent runs on: give the kit one with --interpreter ARCHIVE"
            " (python-build-standalone's install_only for aarch64)"
        )
    user = options.user_name(asked["user"]) if asked["user"] is not None else ""
    keys = options.ssh_keys(asked["ssh_key"]) if asked["ssh_key"] is not None else ()
    if (keys or asked["sudo"]) and not user:
        raise UsageError("--ssh-key and --sudo are for somebody: give --user NAME")
    hostname = _hostname(asked)
    joined = prompts.network(asked["ssid"], asked["wifi_password_file"], asked["wifi_country"])
    steps = flasher.commands(tree, to, user=user, hostname=hostname, licensed=asked["accept_nvidia_license"])
    network = Network(joined.ssid, joined.key) if joined is not None else None
    return Order(tree, to, hostname, user, keys, network, steps)


def _hostname(asked: dict[str, Any]) -> str:
    if asked["claim_file"] is not None:
        claim, _ = claim_in(asked["claim_file"], asked["hostname"])
        return options.hostname(claim.device)
    if asked["hostname"] is not None:
        return options.hostname(asked["hostname"])
    return options.made_up_hostname(asked["device"])


def _prepare(order: Order, api: ControllerClient | None, asked: dict[str, Any]) -> None:
    kit = _kit(order.tree, asked)
    if asked["claim_file"] is not None:
        claim = claim_in(asked["claim_file"], order.hostname)[1]
    else:
        assert api is not None
        wish = ClaimWish(
            device=order.hostname, device_class=asked["device"], link=asked["link"], group=asked["group"],
            labels=dict(label(one) for one in asked["labels"]), expires_s=int(asked["expires_s"]),
            replace=asked["replace"],
        )  # fmt: skip
        claim = make_claim(api, wish).encode()
    put_all(order.tree.path, files(Overlay(
        kit=kit.files, claim=claim, hostname=order.hostname, user=order.user, ssh_keys=order.ssh_keys,
        sudo=asked["sudo"], network=order.network,
    )))  # fmt: skip


def _kit(tree: Tree, asked: dict[str, Any]) -> Kit:
    if asked["kit_folder"] is not None:
        kit = read_kit(asked["kit_folder"])
        fits = kit.described.python == tree.python or "python.tar.gz" in kit.files
        if kit.described.machine != "aarch64" or not fits:
            said = f"Python {kit.described.python} on {kit.described.machine}"
            raise UsageError(f"the kit in {asked['kit_folder']} is for {said}, and {tree.name} needs another")
        return kit
    target = Target(python=tree.python or OWN_PYTHON, machine="aarch64", glibc=tree.glibc)
    out = console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task("making the kit", total=None)
        return build_kit(
            target, extras=asked["extras"], cache=cache_folder(), wheelhouse=asked["wheelhouse"],
            interpreter=None if tree.python else asked["interpreter"],
            progress=lambda text: bar.update(task, description=text),
        )  # fmt: skip


def _tell(order: Order, as_json: bool, *, prepared: bool) -> None:
    steps = [flasher.spelled(step) for step in order.steps]
    if as_json:
        print_json({
            "device": order.hostname, "tree": str(order.tree.path), "release": order.tree.name,
            "board": order.tree.board, "to": order.to, "python": order.tree.python or OWN_PYTHON,
            "prepared": prepared, "commands": order.steps,
        })  # fmt: skip
        return
    what = "is prepared for" if prepared else "would be prepared for"
    click.echo(f"{order.tree.path}: {order.tree.name} {what} {order.hostname} ({order.tree.board}, {order.to})")
    click.echo(f"{RECOVERY}; then, in {order.tree.path}:")
    for step in steps:
        click.echo(f"  {step}")
    if prepared:
        click.echo(f"`edgectl flash --device … --bsp {order.tree.path} --clean` puts the tree back as it was")


def _run(order: Order, asked: dict[str, Any]) -> None:
    if not asked["yes"]:
        click.confirm(f"Run that now? Everything on the board's {order.to} is overwritten.", abort=True, err=True)
    for step in order.steps:
        flasher.run(order.tree, step)


def _clean(bsp: Path, as_json: bool) -> None:
    left = take_back(bsp)
    if as_json:
        print_json({"tree": str(bsp), "left": left})
        return
    click.echo(f"{bsp}: as it was before")
    for path in left:
        click.echo(f"  rootfs/{path} was changed since, and is left")
