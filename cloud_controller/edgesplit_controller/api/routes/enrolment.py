"""Routes without operator authentication: health, and requests that devices and gateways prove with their own keys."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response

import edgesplit
from edgesplit.errors import Busy
from edgesplit.trust.identity import Renewal
from edgesplit_controller.access.login_throttle import client_key
from edgesplit_controller.access.request_limits import RateLimit
from edgesplit_controller.access.tls_peer import SCOPE, Peer
from edgesplit_controller.api.authorisation import open_routes, set_audit_subject
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.request_models import EnrolBody, GatewayBody, RenewBody
from edgesplit_controller.api.request_parsing import parse_base64
from edgesplit_controller.api.response_models import Certificate, EnrolledShape, Health, binary_response, json_response
from edgesplit_controller.errors import Unauthenticated

everybody = open_routes()
gateways = open_routes(audited=False)
"""Not in the audit log: gateways call these routes every few seconds."""


@everybody.get("/health", responses=json_response(Health))
def health() -> dict[str, Any]:
    """The API is up; its version."""
    return {"status": "ok", "version": edgesplit.__version__}


@everybody.post("/enrol", responses=json_response(EnrolledShape))
def enrol(request: Request, body: EnrolBody) -> dict[str, Any]:
    """Exchange a device's claim token and certificate request for a certificate."""
    limit, client = _check_rate(request)
    key = parse_base64(body.encryption_key, "encryption_key")
    signature = parse_base64(body.encryption_signature, "encryption_signature")
    enrolled = controller_of(request).enrol(body.token, body.csr_pem, key, signature)
    limit.refund(client)  # the token was valid: ten thousand devices may enrol from behind one address
    set_audit_subject(request, enrolled["device"])
    return enrolled


@everybody.post("/renew", responses=json_response(EnrolledShape))
def renew(request: Request, body: RenewBody) -> dict[str, Any]:
    """Renew a device's certificate, proved by its old key, also after the old certificate has expired."""
    _check_rate(request)
    peer: Peer | None = request.scope.get(SCOPE)
    signature = parse_base64(body.signature, "signature")
    renewed = controller_of(request).renew(
        Renewal(certificate_pem=body.certificate_pem, csr_pem=body.csr_pem, signature=signature),
        shown_serial=peer.serial if peer else None,
    )
    set_audit_subject(request, renewed["device"])
    return renewed


@gateways.post("/gateway/certificate", responses=json_response(Certificate))
def gateway_certificate(request: Request, body: GatewayBody) -> dict[str, Any]:
    """A server certificate for a gateway, which must present its client certificate."""
    _check_rate(request)
    peer = _require_peer(request)
    return controller_of(request).gateway_certificate(peer.name, peer.serial, body.csr_pem)


@gateways.post("/gateway/crl", responses=binary_response("application/x-pem-file", "The revocation list."))
def revoked_for(request: Request) -> Response:
    """The certificate revocation list, for a gateway, which must present its client certificate."""
    peer = _require_peer(request)
    revoked = controller_of(request).revocation_list_for(peer.name, peer.serial)
    return Response(revoked, media_type="application/x-pem-file")


def _require_peer(request: Request) -> Peer:
    peer: Peer | None = request.scope.get(SCOPE)
    if peer is None:
        raise Unauthenticated("only for gateways: no certificate of an enrolled gateway was presented")
    return peer


def _check_rate(request: Request) -> tuple[RateLimit, str]:
    """Count a call; Busy if this client makes too many. Returns the rate limit and the client's key, for a refund."""
    limit: RateLimit = request.app.state.enrolments
    client = client_key(request.client.host if request.client else "?")
    if not limit.allow(client):
        raise Busy("too many enrolments from this address; try again in a few seconds")
    return limit, client
