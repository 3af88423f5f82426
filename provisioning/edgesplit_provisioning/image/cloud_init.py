"""The files by which cloud-init configures a device at its first boot: user-data, network-config and meta-data.

Raspberry Pi OS (from Trixie on) and Ubuntu read them from the boot partition. No I/O; the output is YAML in ASCII, with
every other character escaped, so that no network name can be misread by a parser.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from edgesplit.errors import UsageError
from edgesplit_provisioning.image import systemd_unit
from edgesplit_provisioning.image.options import CardSettings
from edgesplit_provisioning.wifi import Wifi

BYTE_LIST = re.compile(r"(?=.*;)[0-9; ]+")
"""Network names that NetworkManager reads as a list of byte values."""
USER_DATA, NETWORK, META_DATA = "user-data", "network-config", "meta-data"


def user_data(settings: CardSettings, mount: str) -> bytes:
    """Host name, user, and the command that starts the first-boot script. `mount` is where the system mounts the boot
    partition."""
    document: dict[str, Any] = {
        "hostname": settings.hostname,
        "user": _user(settings),  # singular: `users` without `default` would lose the image's groups
        "disable_root": True,
        "ssh_pwauth": False,
        # `bootcmd` runs at each boot; `runcmd` runs once and is not retried after a power cut.
        "bootcmd": [["sh", "-c", systemd_unit.install_and_start_commands(mount)]],
    }
    if settings.ssh_keys:
        document["runcmd"] = [["systemctl", "enable", "--now", "ssh"]]  # cloud-init does not on Raspberry Pi OS
    return b"#cloud-config\n" + _yaml(document)


def _user(settings: CardSettings) -> dict[str, Any]:
    user: dict[str, Any] = {
        "name": settings.user,
        "lock_passwd": True,
        "shell": "/bin/bash",
        # Always given: without it, the image's own passwordless sudo would be inherited.
        "sudo": "ALL=(ALL) NOPASSWD:ALL" if settings.sudo else None,
    }
    return {**user, "ssh_authorized_keys": list(settings.ssh_keys)} if settings.ssh_keys else user


def network_config(wifi: Wifi | None) -> bytes:
    """DHCP by cable, and the wireless network where there is one (netplan, version 2)."""
    network: dict[str, Any] = {"version": 2, "ethernets": {"eth0": {"dhcp4": True, "optional": True}}}
    if wifi is not None:
        points = {netplan_ssid(wifi.ssid): {"password": wifi.key}}
        network["wifis"] = {
            "wlan0": {"dhcp4": True, "optional": True, "regulatory-domain": wifi.country, "access-points": points}
        }
    return _yaml({"network": network})


def netplan_ssid(ssid: bytes) -> str:
    """The network name as text; UsageError where it is not UTF-8, has control characters or is read as a byte list."""
    try:
        text = ssid.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"this image needs an SSID in UTF-8, and {ssid!r} is not") from error
    if any(ord(letter) < 0x20 or 0x7F <= ord(letter) < 0xA0 for letter in text):
        raise UsageError(f"this image does not accept control characters in an SSID, as in {text!r}")
    if BYTE_LIST.fullmatch(text):
        raise UsageError(f"NetworkManager would take the network's name {text!r} for a list of bytes")
    return text


def meta_data(instance: str, settings: CardSettings) -> bytes:
    """The instance id; a new one makes cloud-init run, since it does nothing for an instance that it has configured
    before."""
    return _yaml({"instance-id": instance, "local-hostname": settings.hostname})


def kernel_parameters(instance: str, wifi: Wifi | None) -> list[str]:
    """Kernel parameters for cloud-init: without them, the data source is searched anew at each boot."""
    return [f"ds=nocloud;i={instance}", *regulatory_domain(wifi)]


def regulatory_domain(wifi: Wifi | None) -> list[str]:
    """Kernel parameter of the radio's regulatory domain; empty without a wireless network."""
    return [f"cfg80211.ieee80211_regdom={wifi.country}"] if wifi is not None else []


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text, such as scripts, as readable blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _yaml(document: dict[str, Any]) -> bytes:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000, default_flow_style=False).encode("ascii")
