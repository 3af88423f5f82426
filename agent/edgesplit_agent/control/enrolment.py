"""Enrols the device: exchanges a one-time claim for an identity (own keys, certificate request, certificate).

Two keys are made: one proves the device's identity, the other is the one to which content keys of encrypted slices are
wrapped, and is signed by the first. Enrolment survives being killed at any point: each key is made once, the controller
repeats its answer for the same token and key while the claim is valid, and `enrolled.json` is written last, when
everything that it refers to is on disk.
"""

from __future__ import annotations

import http.client
import itertools
import json
import logging
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from edgesplit.atomic_files import write_durably
from edgesplit.backoff import Backoff
from edgesplit.crypto.key_wrapping import load_or_make_encryption_key, sign_encryption_key
from edgesplit.errors import LinkError, MalformedMessage, TrustError, UsageError
from edgesplit.trust.identity import (
    Claim,
    Credentials,
    Enrolled,
    EnrolmentRequest,
    certificate_request,
    decode_claim,
    decode_document,
    encode_document,
    enrolment_context,
    load_or_make_key,
)
from edgesplit_agent.state.data_folder import DataFolder, Identity

log = logging.getLogger(__name__)

RETRY = Backoff(first_s=0.5, longest_s=16.0)
"""Back-off between requests for a certificate."""

TIMEOUT_S = 15.0
"""Timeout of one request to the controller."""
MOST_RESPONSE_BYTES = 65_536
"""Largest response of the controller."""


def read_claim(path: Path) -> Claim:
    """The claim in that file; UsageError where it cannot be read, MalformedMessage where it is no claim."""
    try:
        return decode_claim(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read the claim {path}: {error.strerror}") from error


PostEnrolment = Callable[[bytes], bytes]
"""Sends an enrolment request and returns the controller's response. LinkError: retry; TrustError: refused."""


def enrol(
    folder: DataFolder, claim: Claim, controller_url: str | None = None, post_enrolment: PostEnrolment | None = None
) -> Identity:
    """Become the device that the claim names; the stored identity where that device is enrolled here already.
    `post_enrolment` replaces the request over HTTPS. UsageError where the folder belongs to another device, TrustError
    where the controller refuses."""
    existing = folder.read_identity()
    if existing is not None:
        if existing.device != claim.device:
            raise UsageError(
                f"{folder.path} already belongs to device {existing.device!r}; use another folder for {claim.device!r}"
            )
        return existing
    url = controller_url or claim.controller_url
    key = load_or_make_key(folder.key_file)
    csr_pem = certificate_request(key, claim.device).decode()
    public, signature = sign_encryption_key(load_or_make_encryption_key(folder.encryption_key_file), key, csr_pem)
    request = EnrolmentRequest(
        token=claim.token, csr_pem=csr_pem, encryption_key=public, encryption_signature=signature
    )
    response = (post_enrolment or _by_https(url, claim.ca_pem))(encode_document(request))
    enrolled = decode_document(response, Enrolled)
    if enrolled.device != claim.device:
        raise TrustError(
            f"the controller enrolled this device as {enrolled.device[:63]!r}, but the claim is for {claim.device!r}"
        )
    write_durably(folder.certificate_file, enrolled.certificate_pem.encode())
    write_durably(folder.ca_file, enrolled.ca_pem.encode())
    credentials(folder).client_context()  # UsageError unless the certificate matches the key
    identity = Identity(
        device=enrolled.device, device_class=claim.device_class,
        broker=f"{enrolled.broker_host}:{enrolled.broker_port}", offload=enrolled.offload_url, controller=url,
        tuf_root=claim.tuf_root,
    )  # fmt: skip
    folder.write_identity(identity)
    log.info("enrolled as %s", identity.device)
    return identity


@contextmanager
def removed_if_refused(folder: DataFolder) -> Iterator[None]:
    """A context for enrolment: a claim that is refused leaves no folder behind that this process made."""
    try:
        yield
    except (TrustError, MalformedMessage, UsageError):
        folder.remove_if_new()
        raise


def _by_https(url: str, ca_pem: str) -> PostEnrolment:
    return lambda request: post(url, "/v1/enrol", enrolment_context(ca_pem), request, "the claim")


def enrol_with_retries(
    folder: DataFolder, claim: Claim, controller_url: str | None, wait: Callable[[float], bool]
) -> Identity | None:
    """Enrol, with retries for as long as the network fails. `wait(seconds)` returns True when the agent is to stop; the
    result then is None."""
    for tries in itertools.count():
        try:
            return enrol(folder, claim, controller_url)
        except LinkError as error:
            folder.keep()  # the request may have arrived, and the controller answers only the same key again
            log.warning("not enrolled yet, retrying: %s", error)
        if wait(RETRY.pause_s(tries, 0.5)):
            break
    return None


def credentials(folder: DataFolder) -> Credentials:
    """Certificate and key that this device presents to broker and servers: the renewed pair, otherwise those of
    enrolment."""
    if folder.renewed_file.exists():
        return Credentials(folder.renewed_file, folder.renewed_file, folder.ca_file)
    return Credentials(folder.key_file, folder.certificate_file, folder.ca_file)


def post(
    url: str, path: str, tls: ssl.SSLContext, body: bytes, what: str, *, max_bytes: int = MOST_RESPONSE_BYTES
) -> bytes:
    """Post to the controller, whose TLS certificate must be of our authority; at most `max_bytes` of the response.
    `what` names the requested thing in error messages. LinkError where the network fails or the controller is not
    ready, TrustError where it refuses or is not ours."""
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        raise UsageError(f"not the address of a controller: {url[:200]!r} (as in https://controller:8443)")
    connection = http.client.HTTPSConnection(parts.hostname, parts.port or 443, timeout=TIMEOUT_S, context=tls)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", parts.path.rstrip("/") + path, body, headers)
        response = connection.getresponse()
        content = response.read(max_bytes)
    except ssl.SSLCertVerificationError as error:
        raise TrustError(
            f"{url} does not present a certificate of the claim's authority: {error.verify_message}"
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a chunk of negative length
        raise LinkError(f"cannot reach the controller at {url}: {error}") from error
    finally:
        connection.close()
    if response.status >= 500 or response.status in (408, 429):
        raise LinkError(f"the controller at {url} is not ready: {response.status}")
    if response.status not in (200, 201):
        raise TrustError(f"the controller refused {what} ({response.status}): {_error_text(content)}")
    return content


def _error_text(answer: bytes) -> str:
    """The controller's error text in a response."""
    try:
        error = json.loads(answer)
        return str(error.get("error") or error.get("detail"))[:300]
    except (ValueError, AttributeError):
        return answer[:100].decode("utf-8", "replace")
