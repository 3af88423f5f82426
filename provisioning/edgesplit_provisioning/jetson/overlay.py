"""The files that are added to a Jetson's root file system: the kit with its claim, a unit that installs it at the first
successful boot, the host name, SSH keys, and a wireless network with its derived key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from edgesplit_provisioning import agent_options as options_file
from edgesplit_provisioning.jetson.root_filesystem import FileToWrite
from edgesplit_provisioning.wifi import CONNECTION, Wifi, network_manager_keyfile

KIT = "opt/edgesplit-kit"
UNIT = "edgesplit-first-boot.service"
_UNITS = "etc/systemd/system"
_FIRST_BOOT = f"""\
#!/bin/sh
# Installs the agent from this folder, at each boot until it is done; then the folder goes, with what is secret in it.
set -eu
cd /{KIT}
coral=
[ ! -e coral.tar ] || coral=--coral
if [ -e claim.json ]; then sh ./install.sh --claim claim.json $coral; else sh ./install.sh $coral; fi
rm -f /{_UNITS}/multi-user.target.wants/{UNIT}
cd /
rm -rf /{KIT}
sync
"""
_UNIT = f"""\
[Unit]
Description=Install the edgesplit agent
After=local-fs.target
ConditionPathExists=/{KIT}/first-boot.sh

[Service]
Type=oneshot
ExecStart=/bin/sh /{KIT}/first-boot.sh
Restart=on-failure
RestartSec=30

[Install]
WantedBy=multi-user.target
"""


def overlay_files(
    kit: Mapping[str, Path], claim: bytes, hostname: str, *, user: str = "", ssh_keys: Sequence[str] = (),
    sudo: bool = False, wifi: Wifi | None = None, agent_options: str | None = None,
) -> list[FileToWrite]:  # fmt: skip
    """The files, by paths below the root. The unit's link comes last, since it enables the installation.

    The settings must be checked: none may contain characters that change the meaning of the file that it is written
    into."""
    puts = [FileToWrite(f"{KIT}/{name}", path) for name, path in kit.items()]
    puts += [
        FileToWrite(f"{KIT}/claim.json", claim, 0o600),
        FileToWrite(f"{KIT}/first-boot.sh", _FIRST_BOOT.encode(), 0o755),
        FileToWrite("etc/hostname", f"{hostname}\n".encode()),
    ]
    if agent_options is not None:
        line = options_file.environment_line(agent_options)
        puts.append(FileToWrite(f"{KIT}/{options_file.FILE}", f"{line}\n".encode()))
    if ssh_keys:
        keys = "".join(f"{key}\n" for key in ssh_keys)
        puts.append(FileToWrite(f"etc/ssh/authorized_keys.d/{user}", keys.encode()))
        line = "AuthorizedKeysFile .ssh/authorized_keys /etc/ssh/authorized_keys.d/%u\n"
        puts.append(FileToWrite("etc/ssh/sshd_config.d/40-edgesplit.conf", line.encode()))
    if sudo:
        puts.append(FileToWrite("etc/sudoers.d/40-edgesplit", f"{user} ALL=(ALL) NOPASSWD: ALL\n".encode(), 0o440))
    if wifi is not None:
        path = f"etc/NetworkManager/system-connections/{CONNECTION}.nmconnection"
        puts.append(FileToWrite(path, network_manager_keyfile(wifi).encode(), 0o600))
    puts.append(FileToWrite(f"{_UNITS}/{UNIT}", _UNIT.encode()))
    puts.append(FileToWrite(f"{_UNITS}/multi-user.target.wants/{UNIT}", target=f"/{_UNITS}/{UNIT}"))
    return puts
