"""A computer that starts a flashed card, by qemu-system: software emulation, any host.

It does what a Raspberry Pi's firmware does with the card: takes the kernel's command line from `cmdline.txt` on the
boot partition, puts the serial port's name into it, and starts the kernel (which lies beside the card: see `image`).
Its network reaches what the host reaches, and the host by its own address. A power cut is SIGKILL: what the guest had
not flushed is gone.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from arm64.debian import NotHere, install_tools
from arm64.image import BOOT_AT, BOOT_MIB, MIB, ROOT_AT, boot_partition
from edgesplit.process.lifecycle import die_with_starting_thread

NETWORK = "198.18.77.0/24"
"""Of the machine, behind qemu: a range that no real network has."""
SERIAL = "ttyAMA0"
CORES, MEMORY_MIB = 4, 2048
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
EXPECTED = (
    "fsck.fat", "There are differences", "This is mostly harmless", "65:01/00", "Not automatically", "Dirty bit is set",
    "Automatically removing dirty bit", "Leaving filesystem",
)  # fmt: skip
"""What fsck.vfat says of a file system that is whole and was not unmounted."""


def host_address() -> str:
    """An address of this host's that is no loopback's, which it reaches by the same name as the machine does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # documentation's; nothing is sent
            return str(asked.getsockname()[0])
        except OSError as error:
            raise NotHere(f"this host has no address but its loopback's: {error}") from error


class Machine:
    """One card in one computer, switched on and off."""

    def __init__(self, card: Path, kernel: Path, console: Path) -> None:
        self.card = card
        self.console = console
        self._kernel = kernel
        self._process: subprocess.Popen[bytes] | None = None
        if not shutil.which("qemu-system-aarch64"):
            install_tools("qemu-system-arm", "ipxe-qemu")

    def power_on(self) -> None:
        """Start it; what it says goes to the end of the console's file."""
        with self.console.open("ab") as console:
            self._process = subprocess.Popen(
                self._argv(),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                preexec_fn=die_with_starting_thread(signal.SIGKILL),
            )

    def cut_power(self) -> None:
        """Off, at once. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def running(self) -> bool:
        """Is it on?"""
        return self._process is not None and self._process.poll() is None

    def console_text(self) -> str:
        """Everything on its console, of all its starts, without colours."""
        text = self.console.read_text(errors="replace") if self.console.exists() else ""
        return COLOUR.sub("", text)

    def boot_file(self, name: str) -> str:
        """A file of the card's boot partition; empty where there is none. Only while it is off."""
        return self._asked(["mtype", "-i", boot_partition(self.card), f"::{name}"])

    def boot_files(self) -> set[str]:
        """The boot partition's files, as `folder/name`. Only while it is off."""
        listed = self._asked(["mdir", "-b", "-/", "-a", "-i", boot_partition(self.card), "::"])
        return {line.removeprefix("::/") for line in listed.splitlines()}

    def root_file(self, name: str) -> str:
        """A file of its root file system, as far as it reached the card; empty where there is none."""
        return self._asked(["debugfs", "-R", f"cat {name}", f"{self.card}?offset={ROOT_AT}"])

    def check_boot_partition(self) -> None:
        """AssertionError with what fsck finds in it, but for the mark that it was not unmounted."""
        part = self.card.with_suffix(".fat")
        where = [f"skip={BOOT_AT // MIB}", f"count={BOOT_MIB}", "conv=sparse"]
        subprocess.run(["dd", f"if={self.card}", f"of={part}", "bs=1M", *where], capture_output=True, check=True)
        lines = self._asked(["fsck.vfat", "-n", str(part)]).splitlines()
        part.unlink()
        faults = [line for line in lines if line.strip() and not line.strip().startswith(EXPECTED)]
        assert lines and not [line for line in faults if str(part) not in line], lines

    def _asked(self, argv: list[str]) -> str:
        return subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False, env=_tools()).stdout

    def _command_line(self) -> str:
        return self.boot_file("cmdline.txt").strip().replace("serial0", SERIAL).replace("console=tty1 ", "")

    def _argv(self) -> list[str]:
        return [
            "nice", "-n", "10", "qemu-system-aarch64", "-M", "virt", "-cpu", "cortex-a72", "-smp", str(CORES),
            "-m", str(MEMORY_MIB), "-accel", "tcg,thread=multi", "-display", "none", "-monitor", "none",
            "-serial", "stdio", "-kernel", str(self._kernel), "-append", self._command_line(),
            "-drive", f"if=none,id=card,format=raw,file={self.card}", "-device", "nvme,drive=card,serial=card",
            "-netdev", f"user,id=net,net={NETWORK}", "-device", "virtio-net-pci,netdev=net,romfile=",
            "-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng",
        ]  # fmt: skip


def _tools() -> dict[str, str]:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return {**os.environ, "MTOOLS_SKIP_CHECK": "1", "LC_ALL": "C.UTF-8", "PATH": path}
