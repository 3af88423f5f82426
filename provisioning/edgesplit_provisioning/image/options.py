"""What a card shall become: the device's name, who may log in, its network. Checked once, here."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

from edgesplit import identifiers
from edgesplit.errors import UsageError
from edgesplit_provisioning.image.wifi import Wifi

HOSTNAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
NO_LOGIN = frozenset({"root", "daemon", "nobody", "edgesplit-agent"})
KEY_TYPES = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp", "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@")
MOST_KEYS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Values that a first boot can carry out."""

    hostname: str
    user: str
    ssh_keys: tuple[str, ...] = ()
    sudo: bool = False
    """The user becomes root without a password (there is none)."""
    wifi: Wifi | None = None


def hostname(raw: str) -> str:
    """`raw` if a device can be called that, in its network and at the controller."""
    if not HOSTNAME.fullmatch(raw):
        raise UsageError(f"not a host name: {raw[:80]!r} (lower-case letters, digits and '-', at most 63)")
    if raw == "localhost":
        raise UsageError("a device cannot be called localhost")
    return raw


def made_up_hostname(device_class: str) -> str:
    """A name that nobody has, where none was given."""
    return identifiers.device_name(f"{re.sub('[^a-z0-9]+', '', device_class)}-{secrets.token_hex(3)}")


def user_name(raw: str) -> str:
    """`raw` if it can log in."""
    if not USER.fullmatch(raw) or raw in NO_LOGIN:
        raise UsageError(f"not a user to log in as: {raw[:80]!r} (lower-case letters, digits, '-' and '_', at most 31)")
    return raw


def ssh_keys(file: Path) -> tuple[str, ...]:
    """The public keys in a file, one a line, as authorized_keys has them without options."""
    try:
        text = file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--ssh-key {file}: {error}") from error
    if "PRIVATE KEY" in text:
        raise UsageError(f"--ssh-key {file} is a private key, which belongs on no card: give {file}.pub")
    lines = [line.strip() for line in text.splitlines()]
    found = tuple(ssh_key(line, file) for line in lines if line and not line.startswith("#"))
    if not 0 < len(found) <= MOST_KEYS:
        raise UsageError(f"--ssh-key {file} holds {len(found)} public keys; 1 to {MOST_KEYS} can be")
    return found


def ssh_key(line: str, file: Path) -> str:
    """One public key, its comment without what a terminal or a shell would obey."""
    kind, _, rest = line.partition(" ")
    body, _, comment = rest.strip().partition(" ")
    if not kind.startswith(KEY_TYPES) or _type_inside(body) != kind:
        raise UsageError(f"--ssh-key {file}: {line[:40]!r} is no public key, as in 'ssh-ed25519 AAAA… me@here'")
    said = "".join(letter for letter in comment if letter.isprintable())
    return f"{kind} {body} {said}".rstrip()


def _type_inside(body: str) -> str:
    """The type that the key's own bytes name (RFC 4253, 6.6)."""
    try:
        raw = base64.b64decode(body, validate=True)
        (length,) = struct.unpack(">I", raw[:4])
        return raw[4 : 4 + length].decode("ascii") if length < len(raw) - 4 else ""
    except (binascii.Error, struct.error, UnicodeDecodeError, ValueError):
        return ""
