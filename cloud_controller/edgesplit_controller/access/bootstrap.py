"""Creates the authenticator of an installation: the owner's token and certificate in the data folder, and the
operators' certificate authority.

Operators' certificates are issued by an authority of their own (`keys/operators/`), which only the API trusts. The
broker and the offload server trust every certificate of the devices' authority, and must not admit operators.
"""

from __future__ import annotations

import time
from pathlib import Path

from cryptography import x509

from edgesplit.atomic_files import write_durably
from edgesplit_controller.access import bearer_token
from edgesplit_controller.access.audit_log import AuditLog
from edgesplit_controller.access.authenticator import CERTIFICATE_PREFIX, Authenticator
from edgesplit_controller.access.operators import Operators
from edgesplit_controller.access.sessions import Sessions
from edgesplit_controller.caller import OWNER
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.pki.own_certificates import OwnCertificates
from edgesplit_controller.storage.database import Database

TOKEN_FILE = "operator.token"
"""File in the data folder that holds the owner's token."""
AUTHORITY = "edgesplit operators' authority"
"""Subject name of the operators' certificate authority."""


def open_authenticator(
    data: Path, database: Database, certificates: OwnCertificates, *, first: bool = True
) -> tuple[Authenticator, Path]:
    """The authenticator of the installation in folder `data`, and the PEM file of the operators' certificate authority.

    The owner's certificate is among `certificates`, of the devices' authority. Of several controller processes only the
    `first` writes the owner's files. Renewed while the process runs, the previous one stays valid until it expires:
    programs that use it are running.
    """
    operators_authority = Authority(data / "keys" / "operators", AUTHORITY)

    def issue(csr_pem: bytes, name: str, expires: float | None) -> bytes:
        return operators_authority.sign_operator(csr_pem, CERTIFICATE_PREFIX + name, expires)

    operators = Operators(database, issue, now=time.time)
    if first:
        owner = certificates.client(OWNER, on_renewed=lambda: operators.add_owner_certificate(serial()))

        def serial() -> int:
            return x509.load_pem_x509_certificate(owner.certificate_file.read_bytes()).serial_number

        operators.adopt_owner(owner_token(data / TOKEN_FILE), serial())
    gate = Authenticator(operators, Sessions(database, operators, now=time.time), AuditLog(database, now=time.time))
    return gate, operators_authority.certificate_file


def owner_token(path: Path) -> str:
    """The token in the file; creates the file (mode 0600) if it is missing or empty."""
    try:
        token = path.read_text().strip()
    except FileNotFoundError:
        token = ""
    if not token:
        token = bearer_token.make("op")
        write_durably(path, f"{token}\n".encode(), mode=0o600)
    return token
