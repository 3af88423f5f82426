"""Facts about a machine, gathered by one read-only shell script; its output is untrusted.

Each answer is a line `name hex`, so that no content of the machine's files can be mistaken for another answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from edgesplit.errors import MalformedMessage
from edgesplit_provisioning.os_release import parse_os_release
from edgesplit_provisioning.ssh.connection import Ssh

PREFIX = "/opt/edgesplit-agent"
DATA = "/var/lib/edgesplit-agent"
STAGE = ".edgesplit-adopt"
"""Folder in the remote home for uploaded files until they are installed."""
_BEGIN, _END = b"edgesplit-survey-1", b"edgesplit-survey-end"
_MAX_ANSWER_BYTES = 8_192

_TELL_FUNCTION = """
tell() { printf '%s ' "$1"; head -c 4096 | od -An -v -tx1 | tr -d ' \\n'; echo; }
"""

SURVEY_SCRIPT = f"""{_TELL_FUNCTION}
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
pythons | tell pythons
room "$HOME" | tell home_room
room "$1" | tell prefix_room
{{ [ -d /run/systemd/system ] && echo yes; }} | tell systemd
id -u | tell uid
{{ command -v sudo >/dev/null 2>&1 && echo yes; }} | tell has_sudo
{{ sudo -n true >/dev/null 2>&1 && echo yes; }} | tell sudo
echo {_END.decode()}
"""

ROOT_SURVEY_SCRIPT = f"""{_TELL_FUNCTION}
echo {_BEGIN.decode()}
readlink "$1/current" 2>/dev/null | tell current
cat "$2/identity/enrolled.json" 2>/dev/null | head -c 2048 | tell enrolled
cat "$2/identity/ca.pem" 2>/dev/null | tell ca
{{ systemctl is-active edgesplit-agent.service 2>/dev/null; }} | tell service
{{ [ -e "$2" ] && echo yes; }} | tell data
{{ grep '^OPTIONS=' "$3" 2>/dev/null | tail -n 1; }} | tell options
echo {_END.decode()}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Facts about a machine. Texts come from the machine: pass them through `printable` before display."""

    os_id: str
    os_like: tuple[str, ...]
    os_name: str
    machine: str
    bits: int
    libc: tuple[int, int] | None
    """Version of glibc; None with another libc."""
    model: str
    pythons: tuple[str, ...]
    host: str
    home_free: int
    prefix_free: int
    """Free bytes on the disk of the installation prefix; `home_free`: on that of the home folder."""
    systemd: bool
    uid: int
    has_sudo: bool
    sudo: bool
    """True where sudo works without a password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What is installed of edgesplit on a machine."""

    version: str
    """Name of the version in use: edgesplit's version and the kit's mark. Empty without an agent."""
    device: str
    """Name of the enrolled device; empty where it is not enrolled."""
    controller: str
    authority: str
    """CA certificate of the controller that it belongs to."""
    service: str
    """State of the service, as reported by systemd."""
    data: bool
    """True where there is a data folder."""
    options: str = ""
    """The line with the agent's options in the service's environment file; empty without one."""


class _Enrolled(msgspec.Struct):
    device: str = ""
    controller: str = ""


def gather_facts(ssh: Ssh, prefix: str = PREFIX) -> MachineFacts:
    """Run the script and parse its output."""
    return parse_facts(ssh.run(SURVEY_SCRIPT, prefix).out)


def parse_facts(raw: bytes) -> MachineFacts:
    """Parse the output of `SURVEY_SCRIPT`; MalformedMessage for anything else."""
    values = parse_answers(raw)
    release = parse_os_release(values.get("os", b""))
    return MachineFacts(
        os_id=release.get("ID", ""), os_like=tuple(release.get("ID_LIKE", "").split()),
        os_name=release.get("PRETTY_NAME", "") or release.get("ID", ""), machine=_line(values, "machine"),
        bits=_number(_line(values, "bits")), libc=_libc(_line(values, "libc")),
        model=_text(values.get("model", b"").split(b"\0")[0]),
        pythons=tuple(dict.fromkeys(re.findall(r"^3\.\d{1,2}$", _text(values.get("pythons", b"")), re.MULTILINE))),
        host=_line(values, "host"), home_free=_free_bytes(_line(values, "home_room")),
        prefix_free=_free_bytes(_line(values, "prefix_room")), systemd=_line(values, "systemd") == "yes",
        uid=_number(_line(values, "uid"), 65_534), has_sudo=_line(values, "has_sudo") == "yes",
        sudo=_line(values, "sudo") == "yes",
    )  # fmt: skip


def parse_installed(raw: bytes) -> Installed:
    """Parse the output of `ROOT_SURVEY_SCRIPT`."""
    values = parse_answers(raw)
    try:
        enrolled = msgspec.json.decode(values.get("enrolled", b"") or b"{}", type=_Enrolled)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        enrolled = _parse_truncated(values["enrolled"])
    version = _line(values, "current").rpartition("/")[2]
    return Installed(
        version=version, device=enrolled.device, controller=enrolled.controller,
        authority=_text(values.get("ca", b"")).strip(),
        service=_line(values, "service"), data=_line(values, "data") == "yes",
        options=_text(values.get("options", b"")).strip(),
    )  # fmt: skip


def _parse_truncated(raw: bytes) -> _Enrolled:
    """Read device and controller from the beginning of `enrolled.json`, which the TUF root in it makes longer than what
    is requested."""
    fields = {
        key.decode(): value.decode("utf-8", "replace")
        for key, value in re.findall(rb'^\s*"(device|controller)"\s*:\s*"([^"\\\n]{1,300})"', raw, re.MULTILINE)
    }
    return _Enrolled(fields.get("device", ""), fields.get("controller", ""))


def parse_answers(raw: bytes) -> Mapping[str, bytes]:
    """The answers by name; output of a login shell before and after them is skipped. MalformedMessage for malformed
    lines."""
    lines = raw.split(b"\n")
    try:
        begin, end = lines.index(_BEGIN), lines.index(_END)
    except ValueError as error:
        raise MalformedMessage("the machine's output is not that of a shell: is it a Linux with /bin/sh?") from error
    values: dict[str, bytes] = {}
    for line in lines[begin + 1 : end]:
        matched = re.fullmatch(rb"([a-z0-9_]{1,16}) ([0-9a-f]*)", line)
        if matched is None or len(matched[2]) > 2 * _MAX_ANSWER_BYTES or len(matched[2]) % 2:
            raise MalformedMessage("the machine's output is not the expected one")
        values[matched[1].decode()] = bytes.fromhex(matched[2].decode())
    return values


def _line(values: Mapping[str, bytes], name: str) -> str:
    return _text(values.get(name, b"")).partition("\n")[0].strip()[:400]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _number(text: str, otherwise: int = 0) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else otherwise


def _free_bytes(line: str) -> int:
    """Free bytes in a line of `df -Pk`; 0 for anything else."""
    parts = line.split()
    return 1024 * _number(parts[3]) if len(parts) >= 6 else 0


def _libc(text: str) -> tuple[int, int] | None:
    matched = re.fullmatch(r"glibc (\d{1,3})\.(\d{1,3})(?:\..*)?", text)
    return (int(matched[1]), int(matched[2])) if matched else None
