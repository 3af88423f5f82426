"""For everybody, by no operator's right: health, and what devices and gateways ask for with their own keys."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response

import edgesplit
from edgesplit.errors import Busy
from edgesplit.trust.identity import Renewal
from edgesplit_controller.access.login_throttle import place_of
from edgesplit_controller.access.request_limits import RateLimit
from edgesplit_controller.access.tls_peer import SCOPE, Peer
from edgesplit_controller.api.authorisation import about, open_routes
from edgesplit_controller.api.dispatch import controller_of
from edgesplit_controller.api.request_models import EnrolBody, GatewayBody, RenewBody
from edgesplit_controller.api.request_parsing import from_base64
from edgesplit_controller.api.response_models import Certificate, EnrolledShape, Health, answers, answers_with
from edgesplit_controller.errors import Forbidden

everybody = open_routes()
gateways = open_routes(audited=False)
"""They ask every few seconds."""


@everybody.get("/health", responses=answers(Health))
def health() -> dict[str, Any]:
    """It answers."""
    return {"status": "ok", "version": edgesplit.__version__}


@everybody.post("/enrol", responses=answers(EnrolledShape))
def enrol(request: Request, body: EnrolBody) -> dict[str, Any]:
    """A device turns its claim token and a certificate request into a certificate."""
    limit, place = _not_too_often(request)
    key = from_base64(body.encryption_key, "encryption_key")
    signature = from_base64(body.encryption_signature, "encryption_signature")
    enrolled = controller_of(request).enrol(body.token, body.csr_pem, key, signature)
    limit.give_back(place)  # it had a good token: ten thousand devices may come from behind one address
    about(request, enrolled["device"])
    return enrolled


@everybody.post("/renew", responses=answers(EnrolledShape))
def renew(request: Request, body: RenewBody) -> dict[str, Any]:
    """A device gets a new certificate by the right of its old key, also when the old certificate has expired."""
    _not_too_often(request)
    peer: Peer | None = request.scope.get(SCOPE)
    signature = from_base64(body.signature, "signature")
    renewed = controller_of(request).renew(
        Renewal(certificate_pem=body.certificate_pem, csr_pem=body.csr_pem, signature=signature),
        shown_serial=peer.serial if peer else None,
    )
    about(request, renewed["device"])
    return renewed


@gateways.post("/gateway/certificate", responses=answers(Certificate))
def gateway_certificate(request: Request, body: GatewayBody) -> dict[str, Any]:
    """A gateway gets a certificate for its server, over a connection that shows its own."""
    _not_too_often(request)
    peer = _shown(request)
    return controller_of(request).gateway_certificate(peer.name, peer.serial, body.csr_pem)


@gateways.post("/gateway/revoked", responses=answers_with("application/x-pem-file", "The revocation list."))
def revoked_for(request: Request) -> Response:
    """The revocation list, for a gateway's server to go by."""
    peer = _shown(request)
    return Response(controller_of(request).revoked_for(peer.name, peer.serial), media_type="application/x-pem-file")


def _shown(request: Request) -> Peer:
    peer: Peer | None = request.scope.get(SCOPE)
    if peer is None:
        raise Forbidden("this is for gateways, by the certificate that they enrolled with, and none was shown")
    return peer


def _not_too_often(request: Request) -> tuple[RateLimit, str]:
    """What counts the calls, and under which name."""
    limit: RateLimit = request.app.state.enrolments
    place = place_of(request.client.host if request.client else "?")
    if not limit.allow(place):
        raise Busy("too many enrolments from this address; try again in a few seconds")
    return limit, place
