"""What a machine is, asked by one shell script that changes nothing there, and read as from a stranger.

Each answer comes as `name hex`, so that nothing that a machine has in its files can be taken for another answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from edgesplit.errors import MalformedMessage
from edgesplit_provisioning.ssh.connection import Ssh

PREFIX = "/opt/edgesplit-agent"
DATA = "/var/lib/edgesplit-agent"
STAGE = ".edgesplit-adopt"
"""In the home there: what is copied, until it is installed."""
_BEGIN, _END = b"edgesplit-survey-1", b"edgesplit-survey-end"
_LONGEST = 8_192

_TELL = """
tell() { printf '%s ' "$1"; head -c 4096 | od -An -v -tx1 | tr -d ' \\n'; echo; }
"""

LOOK = f"""{_TELL}
PATH=$PATH:/usr/sbin:/sbin
pythons() {{
  for one in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    command -v "$one" >/dev/null 2>&1 || continue
    "$one" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
  done
}}
room() {{ at=$1; while [ ! -d "$at" ]; do at=$(dirname "$at"); done; df -Pk "$at" | tail -n 1; }}
echo {_BEGIN.decode()}
cat /etc/os-release 2>/dev/null | tell os
uname -m | tell machine
uname -n | tell host
getconf LONG_BIT 2>/dev/null | tell bits
getconf GNU_LIBC_VERSION 2>/dev/null | tell libc
cat /proc/device-tree/model 2>/dev/null | tell model
cat /etc/nv_tegra_release 2>/dev/null | head -n 1 | tell l4t
pythons | tell pythons
room "$HOME" | tell home_room
room "$1" | tell prefix_room
{{ [ -d /run/systemd/system ] && echo yes; }} | tell systemd
id -u | tell uid
{{ command -v sudo >/dev/null 2>&1 && echo yes; }} | tell has_sudo
{{ sudo -n true >/dev/null 2>&1 && echo yes; }} | tell sudo
cat /sys/bus/usb/devices/*/idVendor 2>/dev/null | tell usb
echo {_END.decode()}
"""

LOOK_AS_ROOT = f"""{_TELL}
echo {_BEGIN.decode()}
readlink "$1/current" 2>/dev/null | tell current
cat "$2/identity/enrolled.json" 2>/dev/null | head -c 2048 | tell enrolled
cat "$2/identity/ca.pem" 2>/dev/null | tell ca
{{ systemctl is-active edgesplit-agent.service 2>/dev/null; }} | tell service
{{ [ -e "$2" ] && echo yes; }} | tell data
echo {_END.decode()}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What is there. Texts are the machine's own: show them through `plain`."""

    os_id: str
    os_like: tuple[str, ...]
    os_name: str
    os_version: str
    machine: str
    bits: int
    libc: tuple[int, int] | None
    """glibc's version; None where there is another libc."""
    model: str
    l4t: str
    pythons: tuple[str, ...]
    host: str
    home_free: int
    prefix_free: int
    """Bytes."""
    systemd: bool
    uid: int
    has_sudo: bool
    sudo: bool
    """Without a password."""
    edge_tpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What is there of ours."""

    version: str
    """The name of what runs: edgesplit's version and its kit's mark. Empty where there is no agent."""
    device: str
    """Empty where it is not enrolled."""
    controller: str
    authority: str
    """The certificate of whom it belongs to."""
    service: str
    """What systemd says of the service."""
    data: bool
    """There is a data folder."""


class _Enrolled(msgspec.Struct):
    device: str = ""
    controller: str = ""


def survey(ssh: Ssh, prefix: str = PREFIX) -> Survey:
    """Ask."""
    return parse_survey(ssh.run(LOOK, prefix).out)


def parse_survey(raw: bytes) -> Survey:
    """What `LOOK` said; MalformedMessage for anything else."""
    told = answers(raw)
    release = os_release(told.get("os", b""))
    usb = told.get("usb", b"").decode("ascii", "replace").split()
    return Survey(
        os_id=release.get("ID", ""),
        os_like=tuple(release.get("ID_LIKE", "").split()),
        os_name=release.get("PRETTY_NAME", "") or release.get("ID", ""),
        os_version=release.get("VERSION_ID", ""),
        machine=_line(told, "machine"),
        bits=_number(_line(told, "bits")),
        libc=_libc(_line(told, "libc")),
        model=_text(told.get("model", b"").split(b"\0")[0]),
        l4t=_line(told, "l4t"),
        pythons=tuple(dict.fromkeys(re.findall(r"^3\.\d{1,2}$", _text(told.get("pythons", b"")), re.MULTILINE))),
        host=_line(told, "host"),
        home_free=_free(_line(told, "home_room")),
        prefix_free=_free(_line(told, "prefix_room")),
        systemd=_line(told, "systemd") == "yes",
        uid=_number(_line(told, "uid"), 65_534),
        has_sudo=_line(told, "has_sudo") == "yes",
        sudo=_line(told, "sudo") == "yes",
        edge_tpu="1a6e" in usb or "18d1" in usb,
    )


def parse_installed(raw: bytes) -> Installed:
    """What `LOOK_AS_ROOT` said."""
    told = answers(raw)
    try:
        enrolled = msgspec.json.decode(told.get("enrolled", b"") or b"{}", type=_Enrolled)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        enrolled = _beginning(told["enrolled"])
    version = _line(told, "current").rpartition("/")[2]
    return Installed(
        version=version, device=enrolled.device, controller=enrolled.controller,
        authority=_text(told.get("ca", b"")).strip(),
        service=_line(told, "service"), data=_line(told, "data") == "yes",
    )  # fmt: skip


def _beginning(raw: bytes) -> _Enrolled:
    """The TUF root in `enrolled.json` makes it longer than is asked for: its first fields are read as they stand."""
    found = {
        key.decode(): value.decode("utf-8", "replace")
        for key, value in re.findall(rb'^\s*"(device|controller)"\s*:\s*"([^"\\\n]{1,300})"', raw, re.MULTILINE)
    }
    return _Enrolled(found.get("device", ""), found.get("controller", ""))


def answers(raw: bytes) -> Mapping[str, bytes]:
    """The answers by name. What a login shell says before and after is passed over."""
    lines = raw.split(b"\n")
    try:
        begin, end = lines.index(_BEGIN), lines.index(_END)
    except ValueError as error:
        raise MalformedMessage("the machine does not answer as a shell does: is it a Linux with /bin/sh?") from error
    found: dict[str, bytes] = {}
    for line in lines[begin + 1 : end]:
        matched = re.fullmatch(rb"([a-z0-9_]{1,16}) ([0-9a-f]*)", line)
        if matched is None or len(matched[2]) > 2 * _LONGEST or len(matched[2]) % 2:
            raise MalformedMessage("the machine answers what was not asked")
        found[matched[1].decode()] = bytes.fromhex(matched[2].decode())
    return found


def os_release(raw: bytes) -> dict[str, str]:
    """os-release(5), read without a shell: lines of KEY=VALUE, the value perhaps in quotes."""
    found: dict[str, str] = {}
    for line in _text(raw).splitlines():
        matched = re.fullmatch(r"([A-Z][A-Z0-9_]{0,40})=(.{0,300})", line.strip())
        if matched is None:
            continue
        value = matched[2]
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = re.sub(r'\\(["\'$`\\])', r"\1", value[1:-1])
        found.setdefault(matched[1], value)
    return found


def _line(told: Mapping[str, bytes], name: str) -> str:
    return _text(told.get(name, b"")).partition("\n")[0].strip()[:400]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _number(text: str, otherwise: int = 0) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else otherwise


def _free(line: str) -> int:
    """Of a line of `df -Pk`; 0 where it is none."""
    parts = line.split()
    return 1024 * _number(parts[3]) if len(parts) >= 6 else 0


def _libc(text: str) -> tuple[int, int] | None:
    matched = re.fullmatch(r"glibc (\d{1,3})\.(\d{1,3})(?:\..*)?", text)
    return (int(matched[1]), int(matched[2])) if matched else None
