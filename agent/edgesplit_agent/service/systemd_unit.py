"""The systemd unit of the agent, printed by `edgesplit-agent unit`.

The agent's version that the unit starts also writes it, so that its permissions match what the program does. Works from
systemd 245 (Ubuntu 20.04) on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import UsageError

NAME = "edgesplit-agent.service"
WATCHDOG_S = 60
"""Watchdog time. A start without a model takes a few seconds on the slowest board; an SD card can stall for tens of
seconds."""

TEMPLATE = """\
# Written by `edgesplit-agent unit`; overwritten by each installation. Your changes: systemctl edit edgesplit-agent
# Your options: OPTIONS="--fetch-rate 2mbit" in /etc/edgesplit-agent.env
[Unit]
Description=edgesplit agent
Wants=network-online.target time-sync.target
After=network.target time-sync.target
# No limit on restarts: a device that cannot be reached must recover by itself.
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
Environment=PYTHONUNBUFFERED=1
Environment=OPTIONS=
EnvironmentFile=-/etc/edgesplit-agent.env
ExecStart={prefix}/current/bin/edgesplit-agent launch --data {data} --claim {data}/claim.json --log-format json $OPTIONS
Restart=always
RestartSec=5s
# The agent notifies after a check of itself, not by a timer: see edgesplit_agent.service.watchdog.
WatchdogSec={watchdog_s}s
# An agent that hangs gets SIGABRT, and is killed with its processes where it does not end by that.
WatchdogSignal=SIGABRT
TimeoutAbortSec=10s
TimeoutStartSec=180s
TimeoutStopSec=30s
# The agent ends its workers; what it leaves is killed.
KillMode=mixed

User={user}
StateDirectory={state}
StateDirectoryMode=0700
UMask=0077
# A core dump would contain keys, weights and inputs.
LimitCORE=0
{writable}
# Limits of the agent with its workers: other programs of the device have priority.
CPUWeight=80
IOWeight=80
MemoryHigh=75%
MemoryMax=85%
TasksMax=512
OOMPolicy=continue
OOMScoreAdjust=200

# What no agent needs.
CapabilityBoundingSet=
AmbientCapabilities=
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateMounts=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RemoveIPC=yes
KeyringMode=private
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
# Accelerators, and no other device: Coral by PCIe and by USB, Jetson's, GPUs, and the Pi's firmware, which knows of
# undervoltage. Engines that compile code write where they execute, so MemoryDenyWriteExecute stays off.
DevicePolicy=closed
DeviceAllow=char-apex rw
DeviceAllow=char-usb_device rw
DeviceAllow=char-drm rw
DeviceAllow=char-nvidia* rw
DeviceAllow=char-nvhost* rw
DeviceAllow=char-nvmap rw
DeviceAllow=/dev/nvmap rw
DeviceAllow=/dev/nvhost-ctrl rw
DeviceAllow=/dev/vcio rw

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class Installation:
    """Folders and user of an installation."""

    prefix: Path = Path("/opt/edgesplit-agent")
    data: Path = Path("/var/lib/edgesplit-agent")
    user: str = "edgesplit-agent"

    def __post_init__(self) -> None:
        for path in (self.prefix, self.data):
            if not path.is_absolute() or not re.fullmatch(r"[A-Za-z0-9/._+-]+", str(path)):
                raise UsageError(f"{str(path)!r}: give a full path of letters, digits and ._+- (systemd reads it)")
        if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", self.user):
            raise UsageError(f"{self.user!r} is no name of a user")


def render_unit(installation: Installation) -> str:
    """The text of the unit."""
    library = Path("/var/lib")
    inside = installation.data.parent == library
    text = TEMPLATE.format(
        prefix=installation.prefix, data=installation.data, user=installation.user, watchdog_s=WATCHDOG_S,
        state=installation.data.name if inside else "",
        writable="" if inside else f"ReadWritePaths={installation.data}",
    )  # fmt: skip
    return text.replace("StateDirectory=\nStateDirectoryMode=0700\n", "").replace("LimitCORE=0\n\n", "LimitCORE=0\n")
