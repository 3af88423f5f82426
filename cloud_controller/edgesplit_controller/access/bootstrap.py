"""Opens an installation's gate: the owner's token and certificate in the data folder, the authority of operators.

Operators' certificates are of an authority of their own (`keys/operators/`), which the API alone believes: no operator
comes in at the broker or at an offload server, where every certificate of the devices' authority does.
"""

from __future__ import annotations

import time
from pathlib import Path

from cryptography import x509

from edgesplit.atomic_files import write_durably
from edgesplit_controller.access import bearer_token
from edgesplit_controller.access.audit_log import Audit
from edgesplit_controller.access.authenticator import CERTIFICATE_PREFIX, Gate
from edgesplit_controller.access.operators import Operators
from edgesplit_controller.access.sessions import Sessions
from edgesplit_controller.caller import OWNER
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.storage.database import Database

TOKEN_FILE = "operator.token"
AUTHORITY = "edgesplit operators' authority"


def open_gate(data: Path, database: Database, authority: Authority, *, first: bool = True) -> tuple[Gate, Path]:
    """The gate of the installation in this folder, and the authority (PEM file) by which operators are believed besides
    `authority`, which the owner's certificate is of. Of several processes the `first` looks after the owner's files."""
    own = Authority(data / "keys" / "operators", AUTHORITY)

    def issue(csr_pem: bytes, name: str, expires: float | None) -> bytes:
        return own.sign_operator(csr_pem, CERTIFICATE_PREFIX + name, expires)

    operators = Operators(database, issue, now=time.time)
    if first:
        shown = x509.load_pem_x509_certificate(authority.issue_client(OWNER).certificate_file.read_bytes())
        operators.adopt_owner(owner_token(data / TOKEN_FILE), shown.serial_number)
    gate = Gate(operators, Sessions(database, operators, now=time.time), Audit(database, now=time.time))
    return gate, own.certificate_file


def owner_token(path: Path) -> str:
    """The token in the file, made there if there is none."""
    try:
        token = path.read_text().strip()
    except FileNotFoundError:
        token = ""
    if not token:
        token = bearer_token.make("op")
        write_durably(path, f"{token}\n".encode(), mode=0o600)
    return token
