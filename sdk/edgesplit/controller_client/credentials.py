"""An operator's credentials: one file with the controller's address and authority, a certificate, its key and a token.

`edgectl operator add` writes it (0600), `edgectl login` keeps it where edgectl finds it. The key is made where the file
is written and is nowhere else: the controller has only seen a request that it signed.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edgesplit.atomic_files import write_durably
from edgesplit.errors import UsageError
from edgesplit.msgspec_warmup import settle
from edgesplit.trust.identity import Credentials as Files
from edgesplit.trust.identity import certificate_request, private_pem

FORMAT = "edgesplit.credentials/1"
MOST_BYTES = 65_536


class Credentials(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator holds."""

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
        """Without what opens anything."""
        return f"Credentials(operator={self.operator!r}, url={self.url!r})"

    def client_context(self) -> ssl.SSLContext:
        """Shows the certificate, believes the controller's authority. The key stays in memory."""
        mine, authority = _in_memory(self.key_pem + self.certificate_pem), _in_memory(self.ca_pem)
        try:
            return Files(_path(mine), _path(mine), _path(authority)).client_context()
        finally:
            os.close(mine)
            os.close(authority)


def request() -> tuple[Ed25519PrivateKey, str]:
    """A new key, and the request for a certificate that goes with it; the name in it is not looked at."""
    key = Ed25519PrivateKey.generate()
    return key, certificate_request(key, "edgectl").decode()


def made(answer: dict[str, Any], key: Ed25519PrivateKey) -> Credentials:
    """From what the controller answered to a request by this key."""
    names = ("url", "operator", "token", "ca_pem", "certificate_pem", "expires")
    return Credentials(key_pem=private_pem(key).decode(), **{name: answer[name] for name in names})


def write(credentials: Credentials, file: Path) -> None:
    """Keep them in this file, for its owner alone."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(file, msgspec.json.format(msgspec.json.encode(credentials), indent=1) + b"\n", mode=0o600)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error


def read(file: Path) -> Credentials:
    """The credentials in this file; UsageError says what is wrong with it."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(MOST_BYTES + 1)
        found = msgspec.json.decode(raw, type=Credentials)
    except OSError as error:
        raise UsageError(f"cannot read the credentials {file}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{file} holds no credentials: `edgectl operator add` writes them") from error
    if found.format != FORMAT:
        raise UsageError(f"{file} is of the format {found.format[:40]!r}, and this edgectl reads {FORMAT}")
    if found.expires is not None and found.expires <= time.time():
        raise UsageError(
            f"the credentials of {found.operator} have expired: ask an admin for `edgectl operator rotate`"
        )
    return found


def of_folder(data: Path) -> Credentials:
    """The owner's, from a running controller's data folder."""
    try:
        url = str(json.loads((data / "controller.json").read_text())["api_url"])
        keys = data / "keys"
        return Credentials(
            url=url,
            operator="operator",
            token=(data / "operator.token").read_text().strip(),
            ca_pem=(data / "ca.pem").read_text(),
            certificate_pem=(keys / "operator.pem").read_text(),
            key_pem=(keys / "operator.key").read_text(),
        )
    except FileNotFoundError as error:
        raise UsageError(
            f"no controller runs on {data}: start one with `edgectl --data {data} up`, or use one that runs elsewhere"
            " with `edgectl login FILE`"
        ) from error
    except PermissionError as error:
        raise UsageError(
            f"{error.filename} is not yours to read: run as the user who started the controller"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{data / 'controller.json'} is damaged; restart `edgectl up`") from error


def _in_memory(text: str) -> int:
    """A file that is on no disk."""
    descriptor = os.memfd_create("credentials", os.MFD_CLOEXEC)
    os.write(descriptor, text.encode())
    return descriptor


def _path(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}")


settle(__name__)
