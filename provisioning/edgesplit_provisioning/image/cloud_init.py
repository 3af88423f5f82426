"""The three files by which cloud-init configures a device at its first boot: user-data, network-config, meta-data.

Raspberry Pi OS (from Trixie on) and Ubuntu read them from the boot partition. Pure; what is written is YAML in ASCII,
so that no name of a network means anything to a parser.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from edgesplit.errors import UsageError
from edgesplit_provisioning.image import systemd_unit
from edgesplit_provisioning.image.options import Wishes
from edgesplit_provisioning.image.wifi import Wifi

BYTE_LIST = re.compile(r"(?=.*;)[0-9; ]+")
USER_DATA, NETWORK, META_DATA = "user-data", "network-config", "meta-data"


def user_data(wishes: Wishes, mount: str) -> bytes:
    """Name, user, and what arms the first boot. `mount`: where the system mounts the boot partition."""
    said: dict[str, Any] = {
        "hostname": wishes.hostname,
        "user": _user(wishes),  # singular: `users` without `default` would lose the image's groups
        "disable_root": True,
        "ssh_pwauth": False,
        # Each boot, not `runcmd`: what a power cut leaves undone there is never tried again.
        "bootcmd": [["sh", "-c", systemd_unit.arming(mount)]],
    }
    if wishes.ssh_keys:
        said["runcmd"] = [["systemctl", "enable", "--now", "ssh"]]  # cloud-init does not on Raspberry Pi OS
    return b"#cloud-config\n" + _yaml(said)


def _user(wishes: Wishes) -> dict[str, Any]:
    said: dict[str, Any] = {
        "name": wishes.user,
        "lock_passwd": True,
        "shell": "/bin/bash",
        # Said in any case: left out, the image's own passwordless sudo is inherited.
        "sudo": "ALL=(ALL) NOPASSWD:ALL" if wishes.sudo else None,
    }
    return {**said, "ssh_authorized_keys": list(wishes.ssh_keys)} if wishes.ssh_keys else said


def network_config(wifi: Wifi | None) -> bytes:
    """Cable by DHCP in any case, and the wireless network where there is one (netplan, version 2)."""
    said: dict[str, Any] = {"version": 2, "ethernets": {"eth0": {"dhcp4": True, "optional": True}}}
    if wifi is not None:
        points = {netplan_ssid(wifi.ssid): {"password": wifi.key}}
        said["wifis"] = {
            "wlan0": {"dhcp4": True, "optional": True, "regulatory-domain": wifi.country, "access-points": points}
        }
    return _yaml({"network": said})


def netplan_ssid(ssid: bytes) -> str:
    """The name as netplan can say it: text without control characters."""
    try:
        text = ssid.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"this image takes the network's name as UTF-8 text, and {ssid!r} is none") from error
    if any(ord(letter) < 0x20 or 0x7F <= ord(letter) < 0xA0 for letter in text):
        raise UsageError(f"this image takes no network whose name has control characters, as {text!r} has")
    if BYTE_LIST.fullmatch(text):
        raise UsageError(f"NetworkManager would take the network's name {text!r} for a list of bytes")
    return text


def meta_data(instance: str, wishes: Wishes) -> bytes:
    """An instance that no cloud-init has seen: it does nothing for one that it knows."""
    return _yaml({"instance-id": instance, "local-hostname": wishes.hostname})


def kernel_parameters(instance: str, wifi: Wifi | None) -> list[str]:
    """What the kernel's line says of it; without, the data source is searched anew at each boot."""
    return [f"ds=nocloud;i={instance}", *regulatory(wifi)]


def regulatory(wifi: Wifi | None) -> list[str]:
    """The country, for the radio's rules."""
    return [f"cfg80211.ieee80211_regdom={wifi.country}"] if wifi is not None else []


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks, which people can read."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _yaml(said: dict[str, Any]) -> bytes:
    return yaml.dump(said, Dumper=_Dumper, sort_keys=False, width=10_000, default_flow_style=False).encode("ascii")
