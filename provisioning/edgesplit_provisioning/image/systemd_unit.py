"""The systemd unit of the first boot, the same on every kind of image: it runs `first_boot.sh` from the boot partition
at each boot until the script has finished. It stays enabled across a power cut at any point."""

from __future__ import annotations

import re
from pathlib import Path

from edgesplit.errors import UsageError

NAME = "edgesplit-first-boot.service"
SCRIPT = "first-boot.sh"
FOLDER = "edgesplit"
DONE_FILE = "/var/lib/edgesplit-first-boot/done"
MOUNT = re.compile(r"(/[a-z0-9]+)+")


def unit_text(mount: str) -> str:
    """Content of the unit file. `mount` is where the system mounts the boot partition."""
    return f"""[Unit]
Description=edgesplit: install the agent from the boot partition, once
ConditionPathExists=!{DONE_FILE}
RequiresMountsFor={_checked_mount(mount)}
After=cloud-init.service cloud-init-network.service

[Service]
Type=oneshot
ExecStart=/bin/sh {mount}/{FOLDER}/{SCRIPT}
Restart=on-failure
RestartSec=60
TimeoutStartSec=1800

[Install]
WantedBy=multi-user.target
"""


def install_commands(mount: str) -> str:
    """Shell commands that install the unit; idempotent. They exit the shell where the first boot is already done."""
    return f"""r=${{EDGESPLIT_ROOT:-}}
[ -e "$r{DONE_FILE}" ] && exit 0
s=$r/etc/systemd/system
mkdir -p "$s/multi-user.target.wants"
cat > "$s/{NAME}.part" <<'END' || exit 1
{unit_text(mount)}END
mv "$s/{NAME}.part" "$s/{NAME}" || exit 1
ln -sf ../{NAME} "$s/multi-user.target.wants/{NAME}" || exit 1
sync
"""


def install_and_start_commands(mount: str) -> str:
    """Shell commands that install the unit and start it without waiting, for a system that is already starting."""
    return f"{install_commands(mount)}systemctl daemon-reload\nsystemctl --no-block start {NAME}\n"


def script() -> bytes:
    """The script that the unit runs; identical for every device, and without secrets."""
    return Path(__file__).with_name("first_boot.sh").read_bytes()


def _checked_mount(mount: str) -> str:
    if not MOUNT.fullmatch(mount):
        raise UsageError(f"the image mounts its boot partition at {mount[:80]!r}, which edgesplit does not know")
    return mount
