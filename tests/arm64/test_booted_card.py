"""A card that `edgectl flash` wrote, started in a computer: cloud-init, the installer, the service, online by itself.

The computer is qemu-system's (software emulation of arm64), the system Debian's programs laid out as Raspberry Pi OS
Trixie is (`raspberry`): systemd, cloud-init, netplan and the kernel are real, the card is written as for a Raspberry
Pi. The power is cut while the installer works; the next start goes on.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from arm64.conftest import taking
from arm64.emulator import Emulator
from arm64.image import Image, make_image
from arm64.machine import Machine, host_address
from arm64.raspberry import TRIXIE
from support.edgesplit_processes import Cloud, eventually

pytestmark = pytest.mark.usefixtures("arm64_requested")
BOOT_S = float(os.environ.get("EDGESPLIT_BOOT_S", "1500"))
"""How long a first boot may take here."""
CUTS = int(os.environ.get("EDGESPLIT_BOOT_CUTS", "1"))
SEED = int(os.environ.get("EDGESPLIT_SEED", "20261121"))
NAME = "first-boot"
CLAIM = "edgesplit/claim.json"
INSTALLING = "Starting edgesplit-first-boot"
FINISHED = "Finished edgesplit-first-boot"
"""As systemd says it on the console, which shortens what is longer."""


@pytest.fixture(scope="module")
def image(emulator: Emulator, arm64_cache: Path) -> Image:
    """Raspberry Pi OS Trixie's stand-in, with a kernel that starts in a virtual machine."""
    with taking("image (from the cache, or made with its root)"):
        return make_image(TRIXIE, emulator, arm64_cache)


@pytest.fixture(scope="module")
def cloud(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """A controller that calls itself by the address at which the machine reaches this host."""
    running = Cloud(tmp_path_factory.mktemp("cloud"), "--host", host_address())
    running.start()
    yield running
    running.stop()


@pytest.fixture
def machine(image: Image, cloud: Cloud, scratch: Path) -> Iterator[Machine]:
    """A computer with a flashed card in it, off."""
    card = scratch / "card.img"
    with taking("edgectl flash (a kit for Python 3.13 on aarch64, written and read back)"):
        cloud.edgectl(
            "flash", "--device", "raspberrypi4", "--image", str(image.disk), "--to", str(card),
            "--hostname", NAME, "--group", "lab", "--yes", timeout=600,
        )  # fmt: skip
    (scratch.parent / "console.log").unlink(missing_ok=True)
    made = Machine(card, image.kernel, scratch.parent / "console.log")
    yield made
    made.cut_power()


def test_a_first_boot_heals_a_power_cut_and_comes_online(machine: Machine, cloud: Cloud) -> None:
    """The power goes while the agent is being installed; the next start finishes and the device is online. Then its
    boot partition holds no claim and is in order, and a further start brings the same device back by itself."""
    dice = random.Random(SEED)
    assert CLAIM in machine.boot_files()
    for number in range(CUTS):
        cut_while_installing(machine, cloud, 3 + 12 * dice.random(), number + 1)
    with taking("a start after the power cut, until the device is online"):
        machine.power_on()
        first = eventually("the device is online", lambda: online(machine, cloud), BOOT_S)
    eventually("the first boot has finished", lambda: FINISHED in machine.console_text(), BOOT_S)
    machine.cut_power()
    assert CLAIM not in machine.boot_files()
    machine.check_boot_partition()
    assert machine.root_file("/var/lib/edgesplit-first-boot/claim.json") == ""
    with taking("a further start, until the device is online"):
        machine.power_on()
        eventually("the device is online again", lambda: online(machine, cloud, since=first), BOOT_S)


def cut_while_installing(machine: Machine, cloud: Cloud, seconds: float, number: int) -> None:
    """Start it, wait for the installer, and take the power away `seconds` into its work."""
    before = machine.console_text().count(INSTALLING)
    with taking(f"power cut {number}, {seconds:.1f} s after the installer began (EDGESPLIT_SEED={SEED})"):
        machine.power_on()
        eventually("the installer begins", lambda: begun(machine, before), BOOT_S)
        threading.Event().wait(seconds)  # the moment of the fault, not a wait for anything
        machine.cut_power()
    log = machine.root_file("/var/log/edgesplit-first-boot.log").strip().splitlines()
    print(f"  its log on the card ends: {log[-1] if log else '(nothing reached the card)'}", flush=True)
    assert cloud.api.get(f"/v1/devices/{NAME}")["state"] != "online"


def begun(machine: Machine, before: int) -> bool:
    assert machine.running, f"the machine went off: {machine.console_text()[-2000:]}"
    return machine.console_text().count(INSTALLING) > before


def online(machine: Machine, cloud: Cloud, since: int = 0) -> int:
    """The number of its session at the broker, once it has a newer one than `since`."""
    assert machine.running, f"the machine went off: {machine.console_text()[-2000:]}"
    shown = cloud.api.get(f"/v1/devices/{NAME}")
    return int(shown["session"]) if shown["state"] == "online" and int(shown["session"]) > since else 0
