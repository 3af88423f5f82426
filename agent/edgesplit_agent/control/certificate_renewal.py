"""Renews the device's certificate before it expires, or after: with a new key, authorised by a signature of the old
one.

Key and certificate lie in one file, `identity/renewed.pem`, so that one rename is the whole change: after a power cut
the old pair is in use, or the new one. The controller revokes the old certificate once it has seen the new one in use.
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
from edgesplit.crypto.private_key import private_pem
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
    renewal_text,
)
from edgesplit_agent.control.enrolment import credentials, post
from edgesplit_agent.state.data_folder import DataFolder, Identity

log = logging.getLogger(__name__)

RENEW_AT_RATIO = 2 / 3
"""Fraction of a certificate's lifetime after which it is renewed."""
RETRY_S = 300.0
"""Seconds until the retry after a network failure."""
REFUSED_RETRY_S = 86_400.0
"""Seconds until the retry after the controller refused."""
RECHECK_S = 3_600.0
"""Longest time until the clock is read again: it may have been set."""


def due_in_s(not_before: float, not_after: float, now: float) -> float:
    """Seconds until a certificate with that validity period is to be renewed; 0 where it is due. Times are Unix
    seconds."""
    return max(0.0, not_before + RENEW_AT_RATIO * (not_after - not_before) - now)


def certificate_in_use(folder: DataFolder) -> x509.Certificate:
    """The certificate that this device presents."""
    return x509.load_pem_x509_certificate(credentials(folder).certificate_file.read_bytes())


def renew(folder: DataFolder, identity: Identity) -> None:
    """Fetch a new certificate and put it in use. LinkError: retry. TrustError: the controller refuses."""
    current = credentials(folder)
    # Re-encoded: the file may hold its key too.
    old_pem = certificate_in_use(folder).public_bytes(Encoding.PEM).decode()
    key = Ed25519PrivateKey.generate()
    csr_pem = certificate_request(key, identity.device).decode()
    signature = load_or_make_key(current.key_file).sign(renewal_text(csr_pem))
    renewal = Renewal(certificate_pem=old_pem, csr_pem=csr_pem, signature=signature)
    response = _post_renewal(identity.controller, current, encode_document(renewal))
    renewed = decode_document(response, Enrolled)
    if renewed.device != identity.device:
        raise TrustError(
            f"the controller renewed the certificate for {renewed.device[:63]!r}, but this is {identity.device!r}"
        )
    pair = private_pem(key) + renewed.certificate_pem.encode()
    trial_file = folder.identity / "renewed.trial.pem"
    write_durably(trial_file, pair, mode=0o600)
    try:
        # UsageError unless key and certificate match.
        Credentials(trial_file, trial_file, current.ca_file).client_context()
    finally:
        trial_file.unlink()
    write_durably(folder.renewed_file, pair, mode=0o600)


def _post_renewal(url: str, current: Credentials, body: bytes) -> bytes:
    """Post over a connection that presents the old certificate. Where that fails, because it has expired by the
    controller's clock, over a connection without a client certificate: the authorisation then is the signature alone.
    """
    try:
        return post(url, "/v1/renew", current.client_context(), body, "a new certificate")
    except LinkError as lost:
        try:
            return post(url, "/v1/renew", enrolment_context(current.ca_file.read_text()), body, "a new certificate")
        except TrustError:
            raise lost from None


class CertificateRenewer:
    """Renews the certificate in time, on a thread of its own. `on_renewed` is called on that thread after each
    change."""

    def __init__(self, folder: DataFolder, identity: Identity, on_renewed: Callable[[], None]) -> None:
        self._folder = folder
        self._identity = identity
        self._on_renewed = on_renewed
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="renewal", daemon=True)

    def start(self) -> None:
        """Start the thread; a certificate that is due is renewed at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, without waiting for a request in flight."""
        self._stopping.set()

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stopping.wait(wait_s):
            try:
                wait_s = self._renew_if_due()
            except Exception:  # a damaged file or a full disk: the agent keeps serving, and the renewal is retried
                log.exception("could not renew the certificate")
                wait_s = RETRY_S

    def _renew_if_due(self) -> float:
        """Renew the certificate if it is due; seconds until the next check."""
        certificate = certificate_in_use(self._folder)
        begins, ends = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
        if (left_s := due_in_s(begins, ends, time())) > 0:
            return min(left_s, RECHECK_S)
        try:
            renew(self._folder, self._identity)
        except LinkError as error:
            log.warning("the certificate is not renewed yet: %s", error)
            return RETRY_S
        except EdgeError as error:
            log.error(
                "the certificate cannot be renewed, and expires on %s: %s",
                certificate.not_valid_after_utc.date(),
                error,
            )
            return REFUSED_RETRY_S
        log.info("the certificate is renewed")
        self._on_renewed()
        return RECHECK_S
