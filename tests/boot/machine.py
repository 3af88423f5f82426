"""A computer that starts a flashed card, by qemu-system: software emulation, any host.

It does what a Raspberry Pi's firmware does with the card: takes the kernel's command line from `cmdline.txt` on the boot
partition, puts the serial port's name into it, and starts the kernel (which lies beside the card: see `image`). Its
network reaches the host as 10.0.2.2. A power cut is SIGKILL: what the guest had not flushed is gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from arm64.debian import install_tools
from boot.image import BOOT_AT
from edgesplit.lifetime import ending_with_us

HOST = "10.0.2.2"
"""The host's loopback, as the machine sees it."""
SERIAL = "ttyAMA0"
CORES, MEMORY_MIB = 4, 2048


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
                preexec_fn=ending_with_us(signal.SIGKILL),
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

    def said(self) -> str:
        """Everything on its console, of all its starts."""
        return self.console.read_text(errors="replace") if self.console.exists() else ""

    def file(self, name: str) -> str:
        """A file of the card's boot partition; empty where there is none. Only while it is off."""
        argv = ["mtype", "-i", f"{self.card}@@{BOOT_AT}", f"::{name}"]
        return subprocess.run(argv, capture_output=True, text=True, check=False, env=_english()).stdout

    def files(self) -> set[str]:
        """Names on the card's boot partition. Only while it is off."""
        argv = ["mdir", "-b", "-/", "-a", "-i", f"{self.card}@@{BOOT_AT}", "::"]
        return set(subprocess.run(argv, capture_output=True, text=True, check=True, env=_english()).stdout.split("\n"))

    def _command_line(self) -> str:
        return self.file("cmdline.txt").strip().replace("serial0", SERIAL).replace("console=tty1 ", "")

    def _argv(self) -> list[str]:
        return [
            "nice", "-n", "10", "qemu-system-aarch64", "-M", "virt", "-cpu", "cortex-a72", "-smp", str(CORES),
            "-m", str(MEMORY_MIB), "-accel", "tcg,thread=multi", "-display", "none", "-monitor", "none",
            "-serial", "stdio", "-kernel", str(self._kernel), "-append", self._command_line(),
            "-drive", f"if=none,id=card,format=raw,file={self.card}", "-device", "nvme,drive=card,serial=card",
            "-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile=",
            "-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng",
        ]  # fmt: skip


def _english() -> dict[str, str]:
    return {**os.environ, "MTOOLS_SKIP_CHECK": "1", "LC_ALL": "C.UTF-8"}
