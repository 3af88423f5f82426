"""Two systems as Raspberry Pi OS is: one that configures itself by `firstrun.sh`, one by cloud-init.

The programs are Debian's own, of the release that each is based on. What is copied of Raspberry Pi OS is what a first
boot depends on: names and contents on the boot partition, where that is mounted, where cloud-init looks for its seed,
and that network interfaces are called eth0 and wlan0.
"""

from __future__ import annotations

from arm64.image import DISK_ID, Layout
from arm64.root import Recipe

PROGRAMS = ("python3", "python3-venv", "ca-certificates", "passwd")
MOUNT = "/boot/firmware"
FSTAB = f"PARTUUID={DISK_ID}-01 {MOUNT} vfat defaults 0 2\nPARTUUID={DISK_ID}-02 / ext4 defaults,noatime 0 1\n"
CMDLINE = f"console=serial0,115200 console=tty1 root=PARTUUID={DISK_ID}-02 rootfstype=ext4 fsck.repair=yes rootwait\n"
ISSUE = "Raspberry Pi reference {date}\nGenerated using pi-gen, stage2\n(a stand-in made of Debian's programs)\n"
SEED = (
    "datasource_list: [ NoCloud, None ]\n"
    f"datasource:\n  NoCloud:\n    seedfrom: file://{MOUNT}\n"
    "ssh_deletekeys: false\nssh_genkeytypes: []\n"
)
AFTER_BOOT_PARTITION = f"[Unit]\nRequiresMountsFor={MOUNT}\n"

BOOKWORM = Layout(
    Recipe("bookworm", PROGRAMS),
    boot_files={"cmdline.txt": CMDLINE, "config.txt": "arm_64bit=1\n", "issue.txt": ISSUE.format(date="2025-05-13")},
    root_files={
        "etc/fstab": FSTAB,
        "etc/rpi-issue": ISSUE.format(date="2025-05-13"),
        "usr/lib/raspberrypi-sys-mods/firstboot": "#!/bin/sh\n",
    },
    root_mib=900,
)
TRIXIE = Layout(
    Recipe(
        "trixie",
        (
            *PROGRAMS, "systemd-sysv", "udev", "dbus", "kmod", "cloud-init", "netplan.io",
            "iproute2", "e2fsprogs", "dosfstools",
        ),
    ),
    boot_files={
        "cmdline.txt": CMDLINE,
        "config.txt": "arm_64bit=1\n",
        "issue.txt": ISSUE.format(date="2026-10-01"),
        "user-data": "#cloud-config\n",
        "network-config": "# network-config\n",
        "meta-data": "dsmode: local\ninstance_id: rpios-image\n",
    },
    root_files={
        "etc/fstab": FSTAB,
        "etc/hostname": "raspberrypi\n",
        "etc/machine-id": "uninitialized\n",
        "etc/rpi-issue": ISSUE.format(date="2026-10-01"),
        "etc/cloud/cloud.cfg.d/99_raspberry-pi.cfg": SEED,
        "etc/systemd/system/cloud-init-main.service.d/boot.conf": AFTER_BOOT_PARTITION,
        "etc/systemd/system/cloud-init-local.service.d/boot.conf": AFTER_BOOT_PARTITION,
        "etc/systemd/network/99-default.link": "",
    },
    root_mib=2048,
    bootable=True,
)  # fmt: skip
