"""A wireless network as a device joins it: its SSID as bytes, and the key derived from the passphrase.

The passphrase itself is not stored: the derived key opens this network only, not others with the same passphrase.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from edgesplit.errors import UsageError
from edgesplit_provisioning.flash_options import FlashOptions

PBKDF2_ROUNDS, KEY_BYTES = 4_096, 32
"""PBKDF2 with HMAC-SHA1 and the SSID as salt (IEEE 802.11i, annex H.4)."""
PASSPHRASE_BYTES = 1_000
"""At most this much of a passphrase file is read."""
KEY = re.compile(r"[0-9a-fA-F]{64}")
CONNECTION = "edgesplit-wifi"
"""Name of the connection in NetworkManager."""
COUNTRY = re.compile(r"[A-Z]{2}")


@dataclass(frozen=True, slots=True)
class Wifi:
    """SSID, key and regulatory domain of a wireless network."""

    ssid: bytes
    key: str
    """32 bytes in hex."""
    country: str

    def __repr__(self) -> str:
        """Representation without the key."""
        return f"Wifi(ssid={self.ssid!r}, country={self.country!r})"


def make_wifi(ssid: str, passphrase: str, country: str) -> Wifi:
    """The network with this SSID and passphrase as typed; UsageError where they are invalid."""
    name = ssid_bytes(ssid)
    if not COUNTRY.fullmatch(country):
        raise UsageError(f"--wifi-country {country[:20]!r}: two capital letters (ISO 3166), as in DE, GB or US")
    return Wifi(name, derived_key(name, passphrase), country)


def network_from_options(flash: FlashOptions, ask_passphrase: Callable[[], str]) -> Wifi | None:
    """The wireless network of a flash's options, None without an SSID; the passphrase comes from the file, else from
    `ask_passphrase`."""
    ssid, password_file, country = flash.ssid, flash.wifi_password_file, flash.wifi_country
    if ssid is None:
        if password_file is not None:
            raise UsageError("--wifi-password-file needs --wifi SSID")
        return None
    if not country:
        raise UsageError("--wifi needs --wifi-country: a radio may not send before its country is set")
    if password_file is None:
        return make_wifi(ssid, ask_passphrase(), country)
    try:
        passphrase = password_file.read_bytes()[:PASSPHRASE_BYTES].decode("utf-8", "surrogateescape")
    except OSError as error:
        raise UsageError(f"cannot read {password_file}: {error.strerror}") from error
    return make_wifi(ssid, passphrase, country)


def ssid_bytes(ssid: str) -> bytes:
    """The SSID as bytes; UsageError unless it has 1 to 32 of them."""
    name = os.fsencode(ssid)
    if not 1 <= len(name) <= 32:
        raise UsageError(f"the name of a wireless network has 1 to 32 bytes, and this one has {len(name)}")
    return name


def derived_key(ssid: bytes, passphrase: str) -> str:
    """The key in hex, derived from a passphrase or given as 64 hex digits. Line ends of a pasted passphrase are
    removed."""
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
    return hashlib.pbkdf2_hmac("sha1", secret, ssid, PBKDF2_ROUNDS, KEY_BYTES).hex()


def network_manager_keyfile(wifi: Wifi) -> str:
    """NetworkManager's keyfile for the network; the SSID is written as byte values, which need no quoting."""
    identity = uuid.uuid5(uuid.NAMESPACE_OID, f"edgesplit {wifi.ssid.hex()}")
    return f"""[connection]
id={CONNECTION}
uuid={identity}
type=wifi

[wifi]
mode=infrastructure
ssid={"".join(f"{byte};" for byte in wifi.ssid)}

[wifi-security]
key-mgmt=wpa-psk
psk={wifi.key}

[ipv4]
method=auto

[ipv6]
addr-gen-mode=default
method=auto
"""
