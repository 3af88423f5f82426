"""An arm64 device without its own kernel: a root of Debian's arm64 programs, a flashed card's boot partition in it.

What systemd would do is done from here: the first boot's script is run, then the agent as its own user. Its processor
is emulated by qemu-user, so no time that it measures says anything of a real one. Its network is this machine's.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from arm64.emulator import Emulator
from arm64.image import boot_partition
from arm64.raspberry import MOUNT
from arm64.root import unpack_root
from edgesplit.client.client import Client
from edgesplit_cli.demo.processes import DemoProcess
from edgesplit_cli.demo.run import free_port

AGENT = "/opt/edgesplit-agent/current/bin/edgesplit-agent"
DATA = "/var/lib/edgesplit-agent"
USER = "edgesplit-agent"


class Device:
    """One device; `stop` when done."""

    def __init__(self, root: Path, card: Path, emulator: Emulator, folder: Path) -> None:
        """`root`: the archive that it is unpacked from. `card`: whose boot partition it gets."""
        self.root = folder / "root"
        self.log = folder / "agent.log"
        self.port = free_port()
        self._emulator = emulator
        self._agent: DemoProcess | None = None
        unpack_root(root, emulator, self.root)
        boot = self.root / MOUNT.lstrip("/")
        boot.mkdir(parents=True)
        argv = ["mcopy", "-s", "-n", "-i", boot_partition(card), "::*", str(boot)]
        subprocess.run(argv, check=True, capture_output=True, env=os.environ | {"MTOOLS_SKIP_CHECK": "1"})

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command on it, to its end."""
        argv = ["nice", "-n", "10", *self._emulator.argv(command, self.root)]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    def first_boot(self) -> None:
        """What its first boot's unit runs; AssertionError with its log where that fails."""
        done = self.run("sh", f"{MOUNT}/edgesplit/first-boot.sh")
        log = self.root / "var/log/edgesplit-first-boot.log"
        said = log.read_text() if log.exists() else ""
        assert done.returncode == 0, f"first-boot.sh ended with {done.returncode}: {done.stderr}{said[-3000:]}"

    def start(self) -> None:
        """Start the agent as where there is no systemd: supervised, as its own user, with the claim that the first boot
        took. A sign of life may take long here."""
        command = ["setpriv", "--reuid", USER, "--regid", USER, "--init-groups", "--no-new-privs"]
        command += [
            AGENT,
            "supervise",
            "--watchdog",
            "300",
            "--data",
            DATA,
            "--claim",
            f"{DATA}/claim.json",
            "--port",
            str(self.port),
        ]
        command += ["--health-seconds", "2"]
        argv = ["nice", "-n", "10", *self._emulator.argv(command, self.root)]
        self._agent = DemoProcess("arm64", argv, self.log)
        self._agent.start()

    @property
    def running(self) -> bool:
        """Is the agent there?"""
        return self._agent is not None and self._agent.is_running

    def log_tail(self, lines: int = 15) -> str:
        """The end of the agent's log."""
        return self._agent.log_tail(lines) if self._agent is not None else ""

    @property
    def client(self) -> Client:
        """An application on the device."""
        return Client(f"http://127.0.0.1:{self.port}")

    def stop(self) -> None:
        """Stop the agent. Idempotent."""
        if self._agent is not None:
            self._agent.stop(30)
