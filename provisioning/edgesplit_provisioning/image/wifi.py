"""A wireless network as a device joins it: its name as bytes, and the key that is derived of the passphrase.

The passphrase itself goes nowhere: what is stored opens this network and nothing else that shares its passphrase.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass

from edgesplit.errors import UsageError

ROUNDS, KEY_BYTES = 4_096, 32
"""IEEE 802.11i, annex H.4: PBKDF2 with HMAC-SHA1 and the network's name as salt."""
KEY = re.compile(r"[0-9a-fA-F]{64}")
COUNTRY = re.compile(r"[A-Z]{2}")


@dataclass(frozen=True, slots=True)
class Wifi:
    """What a device needs to join."""

    ssid: bytes
    key: str
    """32 bytes in hex."""
    country: str

    def __repr__(self) -> str:
        """Without the key."""
        return f"Wifi(ssid={self.ssid!r}, country={self.country!r})"


def wifi(ssid: str, passphrase: str, country: str) -> Wifi:
    """The network by its name and passphrase as they were typed; UsageError where no such network can be."""
    name = ssid_bytes(ssid)
    if not COUNTRY.fullmatch(country):
        raise UsageError(f"--wifi-country {country[:20]!r}: two capital letters (ISO 3166), as in DE, GB or US")
    return Wifi(name, derived_key(name, passphrase), country)


def ssid_bytes(ssid: str) -> bytes:
    """Between 1 and 32 bytes, whichever they are."""
    name = os.fsencode(ssid)
    if not 1 <= len(name) <= 32:
        raise UsageError(f"the name of a wireless network has 1 to 32 bytes, and this one has {len(name)}")
    return name


def derived_key(ssid: bytes, passphrase: str) -> str:
    """The key in hex. Line ends that came with a pasted passphrase do not count."""
    clean = passphrase.strip("\r\n")
    if KEY.fullmatch(clean):
        return clean.lower()
    secret = os.fsencode(clean)
    if any(byte in secret for byte in b"\r\n\0"):
        raise UsageError("the passphrase of the wireless network has several lines: give the file that holds it alone")
    if not 8 <= len(secret) <= 63:
        raise UsageError(
            f"a WPA passphrase has 8 to 63 characters, or is a key of 64 hex digits; this one has {len(secret)}."
            " Open networks and WPA3 without WPA2 are not supported"
        )
    return hashlib.pbkdf2_hmac("sha1", secret, ssid, ROUNDS, KEY_BYTES).hex()
