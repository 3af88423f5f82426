"""An operator's credentials: one file with the controller's address and CA, a certificate, its private key and a token.

`edgectl operator add` writes the file (mode 0600), `edgectl login` saves it where edgectl and
`ControllerClient.connect` look for it. The key is generated where the file is written and never leaves it: the
controller only sees a certificate request signed with it.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edgesplit.atomic_files import write_durably
from edgesplit.crypto.private_key import private_pem
from edgesplit.decoding import DECODE_ERRORS
from edgesplit.errors import UsageError
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.trust.identity import Credentials as Files
from edgesplit.trust.identity import certificate_request

FORMAT = "edgesplit.credentials/1"
MAX_BYTES = 65_536


class Credentials(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a credentials file."""

    format: str = FORMAT
    url: str
    operator: str
    token: str
    ca_pem: str
    certificate_pem: str
    key_pem: str
    expires: float | None = None
    """Unix seconds; None: never."""

    def __repr__(self) -> str:
        """Without the token and the key."""
        return f"Credentials(operator={self.operator!r}, url={self.url!r})"

    def client_context(self) -> ssl.SSLContext:
        """A TLS context that presents the operator's certificate and trusts only the controller's CA. The key stays in
        memory."""
        own_chain, authority = _in_memory(self.key_pem + self.certificate_pem), _in_memory(self.ca_pem)
        try:
            return Files(_path(own_chain), _path(own_chain), _path(authority)).client_context()
        finally:
            os.close(own_chain)
            os.close(authority)


def new_certificate_request() -> tuple[Ed25519PrivateKey, str]:
    """A new private key, and a certificate request signed with it. The controller ignores the name in the request."""
    key = Ed25519PrivateKey.generate()
    return key, certificate_request(key, "edgectl").decode()


def from_reply(reply: dict[str, Any], key: Ed25519PrivateKey) -> Credentials:
    """Credentials from the controller's `reply` to a certificate request made with `key`."""
    names = ("url", "operator", "token", "ca_pem", "certificate_pem", "expires")
    return Credentials(key_pem=private_pem(key).decode(), **{name: reply[name] for name in names})


def write(credentials: Credentials, file: Path) -> None:
    """Write the credentials to `file`, readable only by its owner. UsageError if that fails."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(file, msgspec.json.format(msgspec.json.encode(credentials), indent=1) + b"\n", mode=0o600)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error


def read(file: Path) -> Credentials:
    """The credentials in `file`. UsageError if it cannot be read, is no credentials file, or its credentials have
    expired."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
        credentials = msgspec.json.decode(raw, type=Credentials)
    except OSError as error:
        raise UsageError(f"cannot read the credentials {file}: {error.strerror}") from error
    except DECODE_ERRORS as error:
        raise UsageError(f"{file} holds no credentials: `edgectl operator add` writes them") from error
    if credentials.format != FORMAT:
        raise UsageError(f"{file} is of the format {credentials.format[:40]!r}, and this edgectl reads {FORMAT}")
    if credentials.expires is not None and credentials.expires <= time.time():
        raise UsageError(
            f"the credentials of {credentials.operator} have expired: ask an admin for `edgectl operator rotate`"
        )
    return credentials


def from_data_folder(folder: Path) -> Credentials:
    """The owner's credentials, from the data folder of a controller that runs on this machine. UsageError if none runs
    there."""
    try:
        url = _own_url(json.loads((folder / "controller.json").read_text()))
        keys = folder / "keys"
        return Credentials(
            url=url, operator="operator", token=(folder / "operator.token").read_text().strip(),
            ca_pem=(folder / "ca.pem").read_text(), certificate_pem=(keys / "operator.pem").read_text(),
            key_pem=(keys / "operator.key").read_text(),
        )  # fmt: skip
    except FileNotFoundError as error:
        raise UsageError(
            f"no controller runs on {folder}: start one with `edgectl --data {folder} up`, or use one that runs"
            " elsewhere"
            " with `edgectl login FILE`"
        ) from error
    except PermissionError as error:
        raise UsageError(f"{error.filename} is not readable: run as the user who started the controller") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder / 'controller.json'} is damaged; restart `edgectl up`") from error


def _own_url(addresses: Mapping[str, Any]) -> str:
    """The API's URL as devices have it; where this machine does not know that name, the loopback address, if the
    controller listens there."""
    url, port = str(addresses["api_url"]), addresses.get("api_port")
    if port is not None and addresses.get("bind") == "0.0.0.0" and not is_known_host(urlsplit(url).hostname or ""):
        return f"https://127.0.0.1:{int(port)}"
    return url


def is_known_host(host: str) -> bool:
    """Whether this machine finds an address for the name."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False


def _in_memory(text: str) -> int:
    """Descriptor of an anonymous in-memory file with `text`, because `ssl` loads keys only from files."""
    descriptor = os.memfd_create("credentials", os.MFD_CLOEXEC)
    os.write(descriptor, text.encode())
    return descriptor


def _path(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}")


warm_up_structs(__name__)
