"""What to do with a machine, by what it is: pure decisions over a survey. UsageError says what is in the way, and what
to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgesplit.errors import UsageError
from edgesplit_cli.output import plain
from edgesplit_provisioning.ssh.facts import Installed, Survey

MACHINES = ("aarch64", "x86_64")
SYSTEMS = ("debian", "ubuntu", "raspbian")
PYTHONS = ("3.14", "3.13", "3.12", "3.11", "3.10")
"""Which the agent runs on, newest first."""
INTERPRETER = "3.11"
"""Of a kit that brings its own."""
LEAST_GLIBC = (2, 28)
"""onnxruntime's and LiteRT's wheels are manylinux_2_28 or older builds (PEP 600)."""
MODELS = (
    ("Raspberry Pi 5", "raspberrypi5"),
    ("Raspberry Pi 500", "raspberrypi5"),
    ("Raspberry Pi Compute Module 5", "raspberrypi5"),
    ("Raspberry Pi 4", "raspberrypi4"),
    ("Raspberry Pi 400", "raspberrypi4"),
    ("Raspberry Pi Compute Module 4", "raspberrypi4"),
    ("Raspberry Pi 3 Model B Plus", "raspberrypi3b+"),
    ("NVIDIA Jetson Orin Nano", "jetson-orin-nano"),
    ("NVIDIA Orin Nano", "jetson-orin-nano"),
    ("NVIDIA Jetson Nano", "jetson-nano"),
)
"""How device trees begin, and the device profile of that board."""
CORAL = {"raspberrypi4": "coral-usb-rpi4"}
"""The same with an Edge TPU at its USB, where there is a profile of that."""

Root = Literal["root", "sudo", "sudo with password"]
Step = Literal["install", "upgrade", "repair", "nothing"]


@dataclass(frozen=True, slots=True)
class Means:
    """How the agent can be installed there."""

    python: str
    """Of the machine, or of the interpreter that the kit brings."""
    own_interpreter: bool
    machine: str
    service: bool
    """systemd runs it."""


def means(seen: Survey, *, interpreter: bool) -> Means:
    """Whether and how; `interpreter`: the kit may bring its own."""
    named = plain(seen.os_name)[:80] or "an unknown system"
    if seen.machine not in MACHINES or seen.bits == 32:
        userland = "a 32-bit system" if seen.bits == 32 else plain(seen.machine)[:20] or "an unknown machine"
        raise UsageError(
            f"{named} on {userland}: onnxruntime and LiteRT have wheels for 64-bit ARM and x86 alone; install the"
            " 64-bit image"
        )
    if not {seen.os_id, *seen.os_like} & set(SYSTEMS):
        raise UsageError(f"{named} is none of Raspberry Pi OS, Debian, Ubuntu or JetPack: use the agent's container")
    if seen.libc is None or seen.libc < LEAST_GLIBC:
        found = f"glibc {seen.libc[0]}.{seen.libc[1]}" if seen.libc else "no glibc"
        raise UsageError(f"{named} has {found}, and the runtimes need {LEAST_GLIBC[0]}.{LEAST_GLIBC[1]}: upgrade it")
    fitting = [version for version in PYTHONS if version in seen.pythons]
    if not fitting and not interpreter:
        has = ", ".join(seen.pythons) or "none"
        raise UsageError(
            f"{named} has no Python that the agent runs on (3.10 to 3.14; there: {has}): give the kit one of its own"
            " with --interpreter ARCHIVE"
        )
    own = interpreter and not fitting
    return Means(INTERPRETER if own else fitting[0], own, seen.machine, seen.systemd)


def root_by(seen: Survey) -> Root:
    """How to become root there."""
    if seen.uid == 0:
        return "root"
    if seen.sudo:
        return "sudo"
    if seen.has_sudo:
        return "sudo with password"
    raise UsageError("the agent is installed as root, and there is no sudo for this user: adopt root@HOST, or add it")


def device_class(seen: Survey, *, coral: bool) -> str:
    """The device profile that fits; UsageError where none does."""
    fitting = [name for begin, name in MODELS if seen.model.startswith(begin)]
    found = fitting[0] if fitting else "generic-x86" if seen.machine == "x86_64" and not seen.model else ""
    if coral and found:
        found = CORAL.get(found, "")
    if not found:
        board = plain(seen.model)[:60] or "a board that does not say what it is"
        beside = " with an Edge TPU" if coral else ""
        raise UsageError(f"no device profile is known for {board}{beside}: give --device-class (`edgectl profiles`)")
    return found


def check_room(seen: Survey, to_copy: int, to_install: int) -> None:
    """Bytes, for what is still to be copied and for what installing it takes at its peak."""
    for where, free, need in (("home", seen.home_free, to_copy), ("prefix", seen.prefix_free, to_install)):
        if free < need:
            raise UsageError(
                f"no room there: the {where} folder's disk has {free / 1e6:.0f} MB free, {need / 1e6:.0f} MB are needed"
            )


def step(there: Installed, mark: str, *, known: bool) -> Step:
    """What is to be done where `there` is what is found, and `mark` names what the kit installs; `known`: the
    controller knows the device that it is."""
    if not there.version:
        return "install"
    if there.version != mark:
        return "upgrade"
    return "nothing" if known and there.service in ("active", "") else "repair"


def check_ours(there: Installed, authority: str, name: str) -> None:
    """UsageError where it is a device of another controller, or by another name than was asked for."""
    if not there.device:
        return
    if there.authority != authority.strip():
        raise UsageError(
            f"it is device {plain(there.device)[:63]!r} of the controller at {plain(there.controller)[:100]}, not of"
            " ours: take it from there first, with --remove --purge"
        )
    if name and name != there.device:
        raise UsageError(
            f"it is device {plain(there.device)[:63]!r} already: leave --name away, or --remove --purge it first"
        )
