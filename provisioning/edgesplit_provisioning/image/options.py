"""The settings of a card: the device's name, its user and keys, its network. Parsed and checked here."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgesplit import identifiers
from edgesplit.errors import UsageError
from edgesplit_provisioning.wifi import Wifi

HOSTNAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
NO_LOGIN = frozenset({"root", "daemon", "nobody", "edgesplit-agent"})
"""System users, which cannot be used to log in."""
KEY_TYPES = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp", "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@")
MAX_KEYS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """What differs between the devices of a batch."""

    hostname: str
    group: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSettings:
    """Checked settings of one card."""

    hostname: str
    user: str
    ssh_keys: tuple[str, ...] = ()
    sudo: bool = False
    """The user gets sudo without a password (it has none)."""
    wifi: Wifi | None = None
    agent_options: str | None = None
    """Checked options of the agent's `run`."""


def checked_hostname(raw: str) -> str:
    """`raw` if it is valid as a host name and as a device name at the controller; UsageError otherwise."""
    if not HOSTNAME.fullmatch(raw):
        raise UsageError(f"not a host name: {raw[:80]!r} (lower-case letters, digits and '-', at most 63)")
    if raw == "localhost":
        raise UsageError("a device cannot be called localhost")
    return raw


def random_hostname(device_class: str) -> str:
    """A random host name, used where none is given."""
    return identifiers.device_name(f"{re.sub('[^a-z0-9]+', '', device_class)}-{secrets.token_hex(3)}")


def checked_user_name(raw: str) -> str:
    """`raw` if it is a valid user to log in as; UsageError otherwise."""
    if not USER.fullmatch(raw) or raw in NO_LOGIN:
        raise UsageError(f"not a user to log in as: {raw[:80]!r} (lower-case letters, digits, '-' and '_', at most 31)")
    return raw


def read_ssh_keys(file: Path) -> tuple[str, ...]:
    """The public keys in a file, one a line, as in authorized_keys without options. UsageError for anything else,
    private keys in particular."""
    try:
        text = file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--ssh-key {file}: {error}") from error
    if "PRIVATE KEY" in text:
        raise UsageError(f"--ssh-key {file} is a private key, which belongs on no card: give {file}.pub")
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(parse_ssh_key(line, file) for line in lines if line and not line.startswith("#"))
    if not 0 < len(keys) <= MAX_KEYS:
        raise UsageError(f"--ssh-key {file} holds {len(keys)} public keys; 1 to {MAX_KEYS} can be")
    return keys


def parse_ssh_key(line: str, file: Path) -> str:
    """One public key; unprintable characters are removed from its comment, since a terminal or shell might interpret
    them."""
    kind, _, rest = line.partition(" ")
    body, _, comment = rest.strip().partition(" ")
    if not kind.startswith(KEY_TYPES) or _embedded_key_type(body) != kind:
        raise UsageError(f"--ssh-key {file}: {line[:40]!r} is not a public key, as in 'ssh-ed25519 AAAA… me@here'")
    printable = "".join(letter for letter in comment if letter.isprintable())
    return f"{kind} {body} {printable}".rstrip()


def _embedded_key_type(body: str) -> str:
    """The key type in the key's own bytes (RFC 4253, 6.6); empty where they are malformed."""
    try:
        raw = base64.b64decode(body, validate=True)
        (length,) = struct.unpack(">I", raw[:4])
        return raw[4 : 4 + length].decode("ascii") if length < len(raw) - 4 else ""
    except (binascii.Error, struct.error, UnicodeDecodeError, ValueError):
        return ""
