"""From a one-time claim to an identity: own keys, certificate request, certificate.

Two keys are made: one to prove who we are, and one that content keys of encrypted slices are wrapped to, for which the
first signs. Survives being killed at any point: each key is made once, the controller answers the same token and key
again while the claim lasts, and `enrolled.json` is written last, when everything it stands for is on disk.
"""

from __future__ import annotations

import http.client
import json
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from edgesplit.atomic_files import write_durably
from edgesplit.crypto.key_wrapping import introduce, load_or_make_encryption_key
from edgesplit.errors import LinkError, TrustError, UsageError
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
from edgesplit_agent.updates.reconciler import pause_after

log = logging.getLogger(__name__)

TIMEOUT_S = 15.0
ANSWER_BYTES = 65_536


def read_claim(path: Path) -> Claim:
    """The claim in that file; UsageError where there is none to read."""
    try:
        return decode_claim(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read the claim {path}: {error.strerror}") from error


Ask = Callable[[bytes], bytes]
"""The controller's answer to an enrolment request. LinkError: try again; TrustError: it is refused."""


def enrol(folder: DataFolder, claim: Claim, controller_url: str | None = None, ask: Ask | None = None) -> Identity:
    """Become the device that the claim names, or find that we are it already. `ask`, where not over HTTPS."""
    known = folder.enrolled()
    if known is not None:
        if known.device != claim.device:
            raise UsageError(
                f"{folder.path} already is device {known.device!r}; give {claim.device!r} a folder of its own"
            )
        return known
    url = controller_url or claim.controller_url
    key = load_or_make_key(folder.key_file)
    csr_pem = certificate_request(key, claim.device).decode()
    public, signature = introduce(load_or_make_encryption_key(folder.encryption_key_file), key, csr_pem)
    request = EnrolmentRequest(
        token=claim.token, csr_pem=csr_pem, encryption_key=public, encryption_signature=signature
    )
    answer = (ask or _by_https(url, claim.ca_pem))(encode_document(request))
    enrolled = decode_document(answer, Enrolled)
    if enrolled.device != claim.device:
        raise TrustError(f"the controller enrolled us as {enrolled.device[:63]!r}, the claim says {claim.device!r}")
    write_durably(folder.certificate_file, enrolled.certificate_pem.encode())
    write_durably(folder.ca_file, enrolled.ca_pem.encode())
    credentials(folder).client_context()  # the certificate fits our key, or UsageError
    identity = Identity(
        device=enrolled.device,
        device_class=claim.device_class,
        broker=f"{enrolled.broker_host}:{enrolled.broker_port}",
        offload=enrolled.offload_url,
        controller=url,
        tuf_root=claim.tuf_root,
    )
    folder.write_enrolled(identity)
    log.info("enrolled as %s", identity.device)
    return identity


def _by_https(url: str, ca_pem: str) -> Ask:
    return lambda request: post(url, "/v1/enrol", enrolment_context(ca_pem), request, "the claim")


def enrol_patiently(
    folder: DataFolder, claim: Claim, controller_url: str | None, wait: Callable[[float], bool]
) -> Identity | None:
    """Enrol, however long the network takes; `wait(seconds)` says True when we shall stop, and then None comes back."""
    tries = 0
    while True:
        try:
            return enrol(folder, claim, controller_url)
        except LinkError as error:
            log.warning("not enrolled yet, trying again: %s", error)
            if wait(pause_after(min(tries, 5), 0.5)):
                return None
            tries += 1


def credentials(folder: DataFolder) -> Credentials:
    """What this device shows to broker and offload server: what it was renewed with, else what it enrolled with."""
    if folder.renewed_file.exists():
        return Credentials(folder.renewed_file, folder.renewed_file, folder.ca_file)
    return Credentials(folder.key_file, folder.certificate_file, folder.ca_file)


def post(url: str, path: str, tls: ssl.SSLContext, body: bytes, what: str, *, most: int = ANSWER_BYTES) -> bytes:
    """The controller's answer, `most` bytes of it; its TLS certificate must be of our authority. `what` is asked for,
    for people."""
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        raise UsageError(f"not the address of a controller: {url[:200]!r} (as in https://controller:8443)")
    connection = http.client.HTTPSConnection(parts.hostname, parts.port or 443, timeout=TIMEOUT_S, context=tls)
    try:
        connection.request(
            "POST", parts.path.rstrip("/") + path, body=body, headers={"content-type": "application/json"}
        )
        response = connection.getresponse()
        answer = response.read(most)
    except ssl.SSLCertVerificationError as error:
        raise TrustError(f"{url} is not the controller of our authority: {error.verify_message}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a chunk of negative length
        raise LinkError(f"cannot reach the controller at {url}: {error}") from error
    finally:
        connection.close()
    if response.status >= 500 or response.status in (408, 429):
        raise LinkError(f"the controller at {url} is not ready: {response.status}")
    if response.status not in (200, 201):
        raise TrustError(f"the controller refused {what} ({response.status}): {_reason(answer)}")
    return answer


def _reason(answer: bytes) -> str:
    try:
        said = json.loads(answer)
        return str(said.get("error") or said.get("detail"))[:300]
    except (ValueError, AttributeError):
        return answer[:100].decode("utf-8", "replace")
