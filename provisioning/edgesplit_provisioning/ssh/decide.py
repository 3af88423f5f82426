"""Decides what to do with a machine, by its facts. No I/O. UsageError names the obstacle and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgesplit.errors import UsageError
from edgesplit.terminal_text import printable
from edgesplit_provisioning.profiles import CORAL_PROFILES
from edgesplit_provisioning.ssh.facts import Installed, MachineFacts

MACHINES = ("aarch64", "x86_64")
SYSTEMS = ("debian", "ubuntu", "raspbian")
PYTHONS = ("3.14", "3.13", "3.12", "3.11", "3.10")
"""Python versions that the agent runs on, newest first."""
BUNDLED_PYTHON = "3.11"
"""Version of the Python in a kit that contains one."""
OLDEST_GLIBC = (2, 28)
"""Oldest glibc: the wheels of onnxruntime and LiteRT are manylinux_2_28 or older builds (PEP 600)."""
PROFILES_BY_MODEL = (
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
"""Device profile by the beginning of a device tree's model."""

RootMethod = Literal["root", "sudo", "sudo with password"]
Action = Literal["install", "upgrade", "repair", "configure", "nothing"]


@dataclass(frozen=True, slots=True)
class InstallMeans:
    """How the agent can be installed on a machine."""

    python: str
    """Version of the machine's Python, or of the one in the kit."""
    own_interpreter: bool
    machine: str
    service: bool
    """True where systemd runs the agent."""


def choose_means(facts: MachineFacts, *, interpreter: bool) -> InstallMeans:
    """How the agent can be installed on that machine; UsageError where it cannot. `interpreter`: the kit may contain
    its own Python."""
    system = printable(facts.os_name)[:80] or "an unknown system"
    if facts.machine not in MACHINES or facts.bits == 32:
        userland = "a 32-bit system" if facts.bits == 32 else printable(facts.machine)[:20] or "an unknown machine"
        raise UsageError(
            f"{system} on {userland}: onnxruntime and LiteRT have wheels for 64-bit ARM and x86 alone; install the"
            " 64-bit image"
        )
    if not {facts.os_id, *facts.os_like} & set(SYSTEMS):
        raise UsageError(
            f"{system} is not supported (Raspberry Pi OS, Debian, Ubuntu and JetPack are): use the agent's container"
        )
    if facts.libc is None or facts.libc < OLDEST_GLIBC:
        libc_text = f"glibc {facts.libc[0]}.{facts.libc[1]}" if facts.libc else "no glibc"
        raise UsageError(
            f"{system} has {libc_text}, and the runtimes need {OLDEST_GLIBC[0]}.{OLDEST_GLIBC[1]}: upgrade it"
        )
    fitting = [version for version in PYTHONS if version in facts.pythons]
    if not fitting and not interpreter:
        found = ", ".join(facts.pythons) or "none"
        raise UsageError(
            f"{system} has no Python that the agent runs on (3.10 to 3.14; there: {found}): give the kit one of its own"
            " with --interpreter ARCHIVE"
        )
    brings_python = interpreter and not fitting
    return InstallMeans(BUNDLED_PYTHON if brings_python else fitting[0], brings_python, facts.machine, facts.systemd)


def root_method(facts: MachineFacts) -> RootMethod:
    """How commands can be run as root there; UsageError where they cannot."""
    if facts.uid == 0:
        return "root"
    if facts.sudo:
        return "sudo"
    if facts.has_sudo:
        return "sudo with password"
    raise UsageError("the agent is installed as root, and there is no sudo for this user: adopt root@HOST, or add it")


def device_class(facts: MachineFacts, *, coral: bool) -> str:
    """The device profile that fits; UsageError where none does."""
    fitting = [name for prefix, name in PROFILES_BY_MODEL if facts.model.startswith(prefix)]
    profile = fitting[0] if fitting else "generic-x86" if facts.machine == "x86_64" and not facts.model else ""
    if coral and profile:
        profile = CORAL_PROFILES.get(profile, "")
    if not profile:
        board = printable(facts.model)[:60] or "an unknown board"
        with_accelerator = " with an Edge TPU" if coral else ""
        raise UsageError(
            f"no device profile is known for {board}{with_accelerator}: give --device-class (`edgectl profiles`)"
        )
    return profile


def check_free_space(facts: MachineFacts, to_copy: int, to_install: int) -> None:
    """UsageError where the free space is less than what is still to be uploaded or what installing takes at its peak,
    in bytes."""
    for where, free, need in (("home", facts.home_free, to_copy), ("prefix", facts.prefix_free, to_install)):
        if free < need:
            raise UsageError(
                f"no room there: the {where} folder's disk has {free / 1e6:.0f} MB free, {need / 1e6:.0f} MB are needed"
            )


def next_action(installed: Installed, mark: str, *, known: bool, options: str | None = None) -> Action:
    """What is to be done: `installed` is what is there, `mark` the version that the kit installs; `known`: the
    controller has the device; `options`: the line of the environment file that is wanted, None for any."""
    if not installed.version:
        return "install"
    if installed.version != mark:
        return "upgrade"
    if not known or installed.service not in ("active", ""):
        return "repair"
    return "nothing" if options in (None, installed.options) else "configure"


def check_owner(installed: Installed, authority: str, name: str) -> None:
    """UsageError where the machine is a device of another controller, or has another name than the requested one."""
    if not installed.device:
        return
    if installed.authority != authority.strip():
        raise UsageError(
            f"it is device {printable(installed.device)[:63]!r} of the controller at"
            f" {printable(installed.controller)[:100]}, another one: remove it there first, with --remove --purge"
        )
    if name and name != installed.device:
        raise UsageError(
            f"it is device {printable(installed.device)[:63]!r} already: omit --name, or first remove it with"
            " --remove --purge"
        )
