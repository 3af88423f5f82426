"""Validated names: safe as a file name, an MQTT topic level, an HTTP path segment and a certificate's common name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgesplit.errors import MalformedMessage, UsageError

DEVICE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
MODEL = re.compile(r"[a-z0-9](?:[a-z0-9_.-]{0,61}[a-z0-9])?")
VARIANT = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,29}[a-z0-9])?")
SLICE = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")
RESERVED = frozenset({"controller", "offload", "chunk", "all", "broker", "admin", "operator"})
"""Identities and topic levels of edgesplit itself, which no device may have as its name."""
WORDS = frozenset({"none"})
"""Words of commands that stand where a device's name may stand. No device gets one as its name; one that has it from
before keeps it."""


def device_name(raw: str) -> str:
    """Return `raw` if it is a valid device name; UsageError otherwise."""
    if not DEVICE.fullmatch(raw) or raw in RESERVED:
        raise UsageError(
            f"not a device name: {raw[:80]!r} "
            f"(lower-case letters, digits and '-', at most 63, none of {sorted(RESERVED)})"
        )
    return raw


def new_device_name(raw: str) -> str:
    """Return `raw` if a device may be given this name; UsageError otherwise."""
    if raw in WORDS:
        raise UsageError(f"{raw!r} is a word of the commands and cannot be the name of a device: choose another")
    return device_name(raw)


def gateway_host(device: str) -> str:
    """Host name in the server certificate of the gateway `device`. It contains no address, so that the gateway may
    move, and it cannot be mistaken for the cloud or for another gateway."""
    return f"{device_name(device)}.gateway.edgesplit"


def model_name(raw: str) -> str:
    """Return `raw` if it is a valid model name; UsageError otherwise."""
    if not MODEL.fullmatch(raw):
        raise UsageError(f"not a model name: {raw[:80]!r} (lower-case letters, digits, '.', '_' and '-', at most 63)")
    return raw


def variant_name(raw: str) -> str:
    """Return `raw` if it is a valid name of a family's variant; UsageError otherwise."""
    if not VARIANT.fullmatch(raw):
        raise UsageError(f"not a variant's name: {raw[:80]!r} (lower-case letters, digits, '_' and '-', at most 31)")
    return raw


def slice_name(raw: str) -> str:
    """Return `raw` if it is a valid slice name; MalformedMessage otherwise."""
    if not SLICE.fullmatch(raw):
        raise MalformedMessage(f"not a slice name: {raw[:80]!r}")
    return raw


def sha256_hex(raw: str) -> str:
    """Return `raw` if it is a SHA-256 digest in lower-case hex; MalformedMessage otherwise."""
    if not SHA256.fullmatch(raw):
        raise MalformedMessage(f"not a SHA-256 digest: {raw[:80]!r}")
    return raw


def parse_label(text: str) -> tuple[str, str]:
    """Key and value of a label `KEY=VALUE`, neither of them empty; UsageError otherwise."""
    key, _, value = text.partition("=")
    if not key or not value:
        raise UsageError(f"not a label: {text[:80]!r} (KEY=VALUE, as in room=kitchen)")
    return key, value


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Model reference `name@version`; without a version it refers to the newest."""

    name: str
    version: int | None = None

    @classmethod
    def parse(cls, raw: str) -> ModelRef:
        """Parse `name` or `name@version`; UsageError otherwise."""
        name, at, version = raw.partition("@")
        if at and not (version.isascii() and version.isdigit() and 0 < int(version[:9]) < 10**8):
            raise UsageError(f"not a model reference: {raw[:80]!r} (name or name@version, as in digits@1)")
        return cls(model_name(name), int(version) if at else None)

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}@{self.version}"
