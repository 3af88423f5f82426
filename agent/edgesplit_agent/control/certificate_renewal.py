"""A new certificate before the old one expires, or after: with a new key, by the right of the old one.

Key and certificate lie in one file, `identity/renewed.pem`, so that its rename is the whole change: after a power cut
the old pair is in use, or the new one. The controller revokes the old certificate once it sees the new one at work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import time

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from edgesplit.atomic_files import write_durably
from edgesplit.errors import EdgeError, LinkError, TrustError
from edgesplit.trust.identity import (
    Credentials,
    Enrolled,
    Renewal,
    certificate_request,
    decode_document,
    encode_document,
    enrolment_context,
    load_or_make_key,
    private_pem,
    renewal_text,
)
from edgesplit_agent.control.enrolment import credentials, post
from edgesplit_agent.state.data_folder import DataFolder, Identity

log = logging.getLogger(__name__)

RENEW_AT = 2 / 3
"""Of a certificate's life is when it is renewed."""
AGAIN_S = 300.0
"""Until the next try where the network failed."""
REFUSED_S = 86_400.0
"""Until the next try where the controller refused."""
LOOK_S = 3_600.0
"""At least so often the clock is looked at: it may have been set."""


def due_in_s(not_before: float, not_after: float, now: float) -> float:
    """Seconds until a certificate of that life is to be renewed; 0 where that is due. Times are Unix seconds."""
    return max(0.0, not_before + RENEW_AT * (not_after - not_before) - now)


def certificate_in_use(folder: DataFolder) -> x509.Certificate:
    """What this device shows to others."""
    return x509.load_pem_x509_certificate(credentials(folder).certificate_file.read_bytes())


def renew(folder: DataFolder, identity: Identity) -> None:
    """Get a new certificate and put it in place. LinkError: try again. TrustError: the controller refuses."""
    held = credentials(folder)
    old_pem = certificate_in_use(folder).public_bytes(Encoding.PEM).decode()  # alone: its key may lie in the same file
    key = Ed25519PrivateKey.generate()
    csr_pem = certificate_request(key, identity.device).decode()
    signature = load_or_make_key(held.key_file).sign(renewal_text(csr_pem))
    renewal = Renewal(certificate_pem=old_pem, csr_pem=csr_pem, signature=signature)
    answer = _ask(identity.controller, held, encode_document(renewal))
    renewed = decode_document(answer, Enrolled)
    if renewed.device != identity.device:
        raise TrustError(f"the controller renewed us as {renewed.device[:63]!r}, and we are {identity.device!r}")
    pair = private_pem(key) + renewed.certificate_pem.encode()
    tried = folder.identity / "renewed.trial.pem"
    write_durably(tried, pair, mode=0o600)
    try:
        Credentials(tried, tried, held.ca_file).client_context()  # they fit each other, or UsageError
    finally:
        tried.unlink()
    write_durably(folder.renewed_file, pair, mode=0o600)


def _ask(url: str, held: Credentials, body: bytes) -> bytes:
    """Over a connection that shows the old certificate; where that makes none, for it has expired by the controller's
    clock, over one that shows nothing: then the right is in the signature alone."""
    try:
        return post(url, "/v1/renew", held.client_context(), body, "a new certificate")
    except LinkError as lost:
        try:
            return post(url, "/v1/renew", enrolment_context(held.ca_file.read_text()), body, "a new certificate")
        except TrustError:
            raise lost from None


class Renewing:
    """Renews in time, for as long as the agent runs. `renewed` is called, on its thread, after each change."""

    def __init__(self, folder: DataFolder, identity: Identity, renewed: Callable[[], None]) -> None:
        self._folder = folder
        self._identity = identity
        self._renewed = renewed
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="renewal", daemon=True)

    def start(self) -> None:
        """Begin; what is due is renewed at once."""
        self._thread.start()

    def stop(self) -> None:
        """No more. A request on its way is not waited for."""
        self._stopping.set()

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stopping.wait(wait_s):
            try:
                wait_s = self._once()
            except Exception:  # a spoilt file or a full disk: the agent serves on, and tries again
                log.exception("could not renew the certificate")
                wait_s = AGAIN_S

    def _once(self) -> float:
        """Renew if that is due; seconds until the next look."""
        used = certificate_in_use(self._folder)
        begins, ends = used.not_valid_before_utc.timestamp(), used.not_valid_after_utc.timestamp()
        if (left_s := due_in_s(begins, ends, time())) > 0:
            return min(left_s, LOOK_S)
        try:
            renew(self._folder, self._identity)
        except LinkError as error:
            log.warning("the certificate is not renewed yet: %s", error)
            return AGAIN_S
        except EdgeError as error:
            log.error("the certificate cannot be renewed, and ends on %s: %s", used.not_valid_after_utc.date(), error)
            return REFUSED_S
        log.info("the certificate is renewed")
        self._renewed()
        return LOOK_S
