"""A device at its first boot without the device: a scratch root, the boot partition as a folder, programs that note how
they were called. The scripts are those that a card gets, and a real shell runs them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from edgesplit_provisioning.image.boot_files import BootFiles

MOUNT = "/boot/firmware"
FAKES = {
    "getent": '[ "$2" = "{user}" ] && echo "{user}:x:1000:1000::/home/{user}:/bin/bash"',
    "chown": ":",
    "sync": ":",  # of this machine, which others share
}
NOTED = ("systemctl", "useradd", "usermod", "rfkill")


class Device:
    """Simulates boots of a device."""

    def __init__(self, root: Path, user: str = "pi") -> None:
        self.root, self.boot = root, root / MOUNT[1:]
        self._bin = root / "bin"
        for folder in (self.boot, self._bin, root / "etc", root / "var/lib/systemd/rfkill", root / "etc/sudoers.d"):
            folder.mkdir(parents=True)
        (root / "etc/hosts").write_text("127.0.0.1\tlocalhost\n127.0.1.1\traspberrypi\n")
        (root / "etc/sudoers.d/010_pi-nopasswd").write_text("pi ALL=(ALL) NOPASSWD: ALL\n")
        (root / "var/lib/systemd/rfkill/platform-3f300000:wlan").write_text("1\n")
        for name in NOTED:
            self.fake(name, f'echo "{name} $*" >>"$EDGESPLIT_ROOT/called"')
        for name, text in FAKES.items():
            self.fake(name, text.replace("{user}", user))

    def fake(self, name: str, text: str) -> None:
        """A program of that name."""
        file = self._bin / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)

    def cut_off_at(self, nth: int, *programs: str) -> None:
        """The power goes when the nth of these programs is called: it, and the script that called it, end there."""
        here = 'echo x >>"$EDGESPLIT_ROOT/steps"; [ "$(wc -l <"$EDGESPLIT_ROOT/steps")" -eq {nth} ]'
        for name in programs:
            goes_on = ":" if name == "sync" else f'/bin/{name} "$@"'
            stop = here.replace("{nth}", str(nth))
            self.fake(name, f'[ -e "$EDGESPLIT_ROOT/lives" ] || if {stop}; then kill -9 $PPID; exit 1; fi\n{goes_on}')

    def let_live(self) -> None:
        """The power stays from now on."""
        (self.root / "lives").touch()

    def insert(self, files: BootFiles) -> None:
        """The card, as it was flashed."""
        for name, content in (*files.files.items(), ("cmdline.txt", files.cmdline)):
            place = self.boot / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, place)
            else:
                place.write_bytes(content)

    def run(self, *command: str) -> subprocess.CompletedProcess[bytes]:
        """As root of that device would."""
        environment = {"PATH": f"{self._bin}:/usr/sbin:/usr/bin:/sbin:/bin", "EDGESPLIT_ROOT": str(self.root)}
        return subprocess.run(
            command, env=environment, cwd=self.root, check=False, capture_output=True, timeout=120,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def firstrun(self) -> int:
        """What systemd.run= runs on Bookworm."""
        return self.run("sh", str(self.boot / "firstrun.sh")).returncode

    def first_boot(self) -> int:
        """What the unit runs."""
        return self.run("sh", str(self.boot / "edgesplit/first-boot.sh")).returncode

    def read(self, name: str) -> str:
        """A file of the root."""
        return (self.root / name).read_text()

    @property
    def called(self) -> list[str]:
        """Programs, as they were called."""
        return self.read("called").splitlines() if (self.root / "called").exists() else []

    @property
    def is_armed(self) -> bool:
        """The next boot runs the unit."""
        wants = self.root / "etc/systemd/system/multi-user.target.wants/edgesplit-first-boot.service"
        return wants.is_symlink() and wants.exists()

    @property
    def is_done(self) -> bool:
        """No boot does anything any more."""
        return (self.root / "var/lib/edgesplit-first-boot/done").exists()

    def on_card(self) -> bytes:
        """All bytes that a card reader finds in files of the boot partition, names too."""
        found = b""
        for folder, _, files in os.walk(self.boot):
            for name in files:
                found += name.encode() + (Path(folder) / name).read_bytes()
        return found
