"""How the first boot begins, on every kind of image alike: a systemd unit that runs `first_boot.sh` from the boot
partition at each boot until it has finished. A power cut anywhere leaves it armed.
"""

from __future__ import annotations

import re
from pathlib import Path

from edgesplit.errors import UsageError

NAME = "edgesplit-first-boot.service"
SCRIPT = "first-boot.sh"
FOLDER = "edgesplit"
DONE = "/var/lib/edgesplit-first-boot/done"
MOUNT = re.compile(r"(/[a-z0-9]+)+")


def text(mount: str) -> str:
    """The unit's file. `mount`: where the system mounts the boot partition."""
    return f"""[Unit]
Description=edgesplit: install the agent from the boot partition, once
ConditionPathExists=!{DONE}
RequiresMountsFor={_checked(mount)}
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


def placing(mount: str) -> str:
    """Shell that puts the unit into place, as often as it is run; leaves the shell once the first boot is done."""
    return f"""r=${{EDGESPLIT_ROOT:-}}
[ -e "$r{DONE}" ] && exit 0
s=$r/etc/systemd/system
mkdir -p "$s/multi-user.target.wants"
cat > "$s/{NAME}.part" <<'END' || exit 1
{text(mount)}END
mv "$s/{NAME}.part" "$s/{NAME}" || exit 1
ln -sf ../{NAME} "$s/multi-user.target.wants/{NAME}" || exit 1
sync
"""


def arming(mount: str) -> str:
    """The same, and starts it where the system is starting already."""
    return f"{placing(mount)}systemctl daemon-reload\nsystemctl --no-block start {NAME}\n"


def script() -> bytes:
    """What the unit runs; the same for every device, and without a secret."""
    return Path(__file__).with_name("first_boot.sh").read_bytes()


def _checked(mount: str) -> str:
    if not MOUNT.fullmatch(mount):
        raise UsageError(f"the image mounts its boot partition at {mount[:80]!r}, which edgesplit does not know")
    return mount
