"""The HTTP API: JSON over TLS. The operator's certificate and token on all but health, enrolment and renewal.
docs/protocol.md lists it.

Promises: bodies are bounded before they are read, errors are `{"error": text, "kind": name}` with the status of their
kind, and heavy work runs one at a time in a thread of its own, so that nothing else waits for it. What the calls do is
`controller.Controller`'s.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import edgesplit
from edgesplit import errors
from edgesplit.errors import Busy, EdgeError, InfeasibleLimits, LinkError, ModelRefused, TrustError, UsageError
from edgesplit.identity import Renewal
from edgesplit.limits import LIMITS
from edgesplit.seen.ledger import Ledger
from edgesplit_controller.bounds import BodyBounds, RateLimit
from edgesplit_controller.controller import Controller
from edgesplit_controller.devices import CLAIM_S, ClaimWish
from edgesplit_controller.key_changes import KeyChange, PublicKey
from edgesplit_controller.metrics import CountedRequests
from edgesplit_controller.peers import SCOPE, Peer
from edgesplit_controller.planning import OWN_CLASS, Wish
from edgesplit_controller.refusals import Conflict, Forbidden
from edgesplit_controller.rotation import GivenSignature

log = logging.getLogger(__name__)

OPERATOR = "operator"
"""Whose certificate the operator's calls must show."""
JSON_BYTES = 1_000_000
SAMPLES_BYTES = 128 * 2**20
BLOCK_BYTES = 1 << 20
WAITING_HEAVY = 16
"""Heavy calls that may wait; more are told to come back."""
STATUS: tuple[tuple[type[EdgeError], int], ...] = (
    (errors.NotFound, 404),
    (Conflict, 409),
    (Forbidden, 401),
    (InfeasibleLimits, 409),
    (ModelRefused, 422),
    (Busy, 429),
    (LinkError, 503),
    (TrustError, 403),
    (UsageError, 400),
    (errors.MalformedMessage, 400),
)
T = TypeVar("T")
Newest = Annotated[int, Query(ge=1, le=10_000)]


class Body(BaseModel):
    """A JSON body: what is not known is refused."""

    model_config = ConfigDict(extra="forbid")


class ProfileBody(Body):
    """Where to measure."""

    on: str = "local"
    codecs: bool = False
    """Also what every lossy codec does to the answers for the model's samples."""
    device: str = OWN_CLASS
    """The device profile whose predictions stand beside what is measured."""


class SampleBody(Body):
    """One sample: a JPEG, or tensors by name as .npz; base64."""

    frame: str | None = None
    tensors: str | None = None
    label: int | None = None
    """The class that it shows, as the model counts them."""


class SamplesBody(Body):
    """Sample inputs."""

    samples: list[SampleBody] = Field(max_length=256)


class WishBody(Body):
    """What is asked of a plan."""

    model: str
    partition: str = "auto"
    limits: dict[str, Any] = {}
    codecs: list[str] | None = None
    link: str | None = None
    objective: str | dict[str, float] = "latency"
    offload: str = Field(default="", max_length=500)
    """A server that is not ours, where the far halves run."""

    def wish(self) -> Wish:
        """As planning takes it."""
        codecs = tuple(self.codecs) if self.codecs else None
        return Wish(
            partition=self.partition,
            limits=self.limits,
            codecs=codecs,
            objective=self.objective,
            offload=self.offload,
        )


class PlanBody(WishBody):
    """A plan to be made."""

    device: str


class DeployBody(WishBody):
    """A deployment to be made."""

    to: list[str] = Field(max_length=10_000)
    now: bool = False
    """Fetched at once, whatever hours devices keep for fetching."""
    encrypt: bool = False
    """Slices and golden inputs travel and are kept as ciphertext."""
    recut: bool = False
    """Signed by the planner, as another cut of a release."""
    elsewhere: bool = False
    """The release key lies elsewhere: answer what it must sign."""

    def wish(self) -> Wish:
        """As planning and releasing take it."""
        return msgspec.structs.replace(super().wish(), encrypt=self.encrypt)


class SignedBody(DeployBody):
    """A deployment that was prepared, and the list of releases with it, signed."""

    release: str = Field(max_length=64)
    next_targets: str


class PublicKeyBody(Body):
    """A key without its private part."""

    keyid: str = Field(max_length=128)
    public: dict[str, Any]


class KeyChangeBody(Body):
    """What shall become of the keys (`key_changes.KeyChange`)."""

    root_keys: list[PublicKeyBody] = Field(default=[], max_length=64)
    threshold: int = Field(default=0, ge=0, le=64)
    release_key: PublicKeyBody | None = None
    anew: list[str] = Field(default=[], max_length=16)

    def change(self) -> KeyChange:
        """As `rotation` takes it."""
        release = PublicKey(self.release_key.keyid, self.release_key.public) if self.release_key else None
        root = tuple(PublicKey(one.keyid, one.public) for one in self.root_keys)
        return KeyChange(root, self.threshold, release, tuple(self.anew))


class SignatureBody(Body):
    """A signature that was made elsewhere."""

    keyid: str = Field(max_length=128)
    sig: str = Field(max_length=16_384, pattern="^[0-9a-f]+$")


class SignaturesBody(Body):
    """Signatures for the change that waits."""

    root: list[SignatureBody] = Field(default=[], max_length=64)
    targets: list[SignatureBody] = Field(default=[], max_length=64)


class RenewedBody(Body):
    """A list of releases with a later end, signed."""

    next_targets: str


class ClaimBody(Body):
    """A device to come."""

    device: str
    device_class: str
    group: str | None = None
    labels: dict[str, str] = {}
    link: str | None = None
    expires_s: int = CLAIM_S
    replace: bool = False
    gateway: str = Field(default="", max_length=300)
    """HOST:PORT at which it finishes inferences for others; empty for a device like any other."""


class LeadBody(Body):
    """Through whom devices offload."""

    devices: list[str] = Field(max_length=10_000)
    gateway: str
    """A gateway's name, or `none`."""
    link: str = ""
    """Theirs from now on."""


class GatewayBody(Body):
    """A gateway's server that wants a certificate."""

    csr_pem: str = Field(max_length=8_192)


class EnrolBody(Body):
    """A device that has come."""

    token: str = Field(max_length=256)
    csr_pem: str = Field(max_length=8_192)
    encryption_key: str = Field(default="", max_length=64)
    """Base64."""
    encryption_signature: str = Field(default="", max_length=256)
    """Base64."""


class RenewBody(Body):
    """A device whose certificate grows old."""

    certificate_pem: str = Field(max_length=8_192)
    csr_pem: str = Field(max_length=8_192)
    signature: str = Field(max_length=256)
    """Base64."""


class Heavy:
    """One thread for what measures, plans, cuts and signs; the rest of the API never waits for it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._waiting = 0
        # A daemon: at the end nothing waits for a plan, and what is half done is done again.
        threading.Thread(target=self._work, name="heavy", daemon=True).start()

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work` when its turn comes; Busy when too many wait. Called on the event loop."""
        if self._waiting >= WAITING_HEAVY:
            raise Busy(f"{self._waiting} plans and deployments wait already; try again later")
        future: Future[T] = Future()
        self._waiting += 1
        try:
            self._queue.put((future, lambda: work(*arguments)))
            return await asyncio.wrap_future(future)
        finally:
            self._waiting -= 1

    def _work(self) -> None:
        while True:
            future, work = self._queue.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)


def create_app(
    controller: Controller, token: str, *, model_bytes: int, heavy: Heavy, ledger: Ledger | None = None
) -> FastAPI:
    """The API over one controller."""
    app = FastAPI(
        title="edgesplit controller",
        version=edgesplit.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.controller, app.state.heavy, app.state.token = controller, heavy, token.encode()
    app.state.model_bytes, app.state.enrolments = model_bytes, RateLimit(per_s=5.0, burst=50)
    app.state.pushing = threading.BoundedSemaphore(4)
    lists = 2 * LIMITS.metadata_bytes  # quoted in JSON
    bounds = {
        "/v1/models": model_bytes,
        "/samples": SAMPLES_BYTES,
        "/deployments/signed": lists,
        "/keys/renewed": lists,
    }
    app.add_middleware(BodyBounds, default=JSON_BYTES, by_suffix=bounds)
    app.add_middleware(CountedRequests, ledger=ledger or Ledger())
    app.add_exception_handler(EdgeError, _on_edge_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_anything)
    app.include_router(open_routes)
    app.include_router(operator_routes)
    return app


def _operator(request: Request) -> None:
    """Forbidden without the operator's certificate and token."""
    peer: Peer | None = request.scope.get(SCOPE)
    if peer is None or peer.name != OPERATOR:
        shown = f"that of {peer.name!r}" if peer else "none"
        raise Forbidden(
            f"the operator's certificate is needed (keys/{OPERATOR}.pem in the data folder), and {shown} was shown"
        )
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), request.app.state.token):
        raise Forbidden(
            "an operator's token is needed: `Authorization: Bearer ...`, from operator.token in the data folder"
        )


open_routes = APIRouter(prefix="/v1")
operator_routes = APIRouter(prefix="/v1", dependencies=[Depends(_operator)])


def _controller(request: Request) -> Controller:
    controller: Controller = request.app.state.controller
    return controller


async def _heavily(request: Request, work: Callable[..., T], *arguments: Any) -> T:
    heavy: Heavy = request.app.state.heavy
    return await heavy.run(work, *arguments)


# ---- for everybody ----------------------------------------------------------------------------------------------


@open_routes.get("/health")
def health() -> dict[str, Any]:
    """It answers."""
    return {"status": "ok", "version": edgesplit.__version__}


@open_routes.post("/enrol")
def enrol(request: Request, body: EnrolBody) -> dict[str, Any]:
    """A device turns its claim token and a certificate request into a certificate."""
    _not_too_often(request)
    key = _base64(body.encryption_key, "encryption_key")
    signature = _base64(body.encryption_signature, "encryption_signature")
    return _controller(request).enrol(body.token, body.csr_pem, key, signature)


@open_routes.post("/renew")
def renew(request: Request, body: RenewBody) -> dict[str, Any]:
    """A device gets a new certificate by the right of its old key, also when the old certificate has expired."""
    _not_too_often(request)
    peer: Peer | None = request.scope.get(SCOPE)
    signature = _base64(body.signature, "signature")
    return _controller(request).renew(
        Renewal(certificate_pem=body.certificate_pem, csr_pem=body.csr_pem, signature=signature),
        shown_serial=peer.serial if peer else None,
    )


@open_routes.post("/gateway/certificate")
def gateway_certificate(request: Request, body: GatewayBody) -> dict[str, Any]:
    """A gateway gets a certificate for its server, over a connection that shows its own."""
    _not_too_often(request)
    peer = _shown(request)
    return _controller(request).gateway_certificate(peer.name, peer.serial, body.csr_pem)


@open_routes.post("/gateway/revoked")
def revoked_for(request: Request) -> Response:
    """The revocation list, for a gateway's server to go by."""
    peer = _shown(request)
    return Response(_controller(request).revoked_for(peer.name, peer.serial), media_type="application/x-pem-file")


def _shown(request: Request) -> Peer:
    peer: Peer | None = request.scope.get(SCOPE)
    if peer is None:
        raise Forbidden("this is for gateways, by the certificate that they enrolled with, and none was shown")
    return peer


def _not_too_often(request: Request) -> None:
    limit: RateLimit = request.app.state.enrolments
    if not limit.allow(request.client.host if request.client else "?"):
        raise Busy("too many enrolments from this address; try again in a few seconds")


# ---- models -----------------------------------------------------------------------------------------------------


@operator_routes.post("/models")
async def push_model(
    request: Request, name: str, input: str = "", bind: Annotated[list[str] | None, Query()] = None
) -> dict[str, Any]:
    """The body is the model file."""
    bindings = parse_bindings(bind or [])
    controller = _controller(request)
    if not request.app.state.pushing.acquire(blocking=False):
        raise Busy("four model files are on their way already; try again later")
    try:
        part = controller.blobs.incoming_file()
        try:
            await _receive(request, part)
            return await _heavily(request, controller.push, part, name, input, bindings)
        finally:
            part.unlink(missing_ok=True)
    finally:
        request.app.state.pushing.release()


@operator_routes.get("/models")
def models(request: Request) -> list[dict[str, Any]]:
    """Every model and version."""
    return _controller(request).models()


@operator_routes.get("/models/{reference}")
def model(request: Request, reference: str) -> dict[str, Any]:
    """One model: inputs, outputs, layers."""
    return _controller(request).model(reference)


@operator_routes.get("/models/{reference}/file")
def model_file(request: Request, reference: str) -> FileResponse:
    """The file as it was pushed."""
    return FileResponse(_controller(request).file(reference, optimised=False), media_type="application/octet-stream")


@operator_routes.get("/models/{reference}/optimised")
def optimised_file(request: Request, reference: str) -> FileResponse:
    """The file that is measured and cut."""
    return FileResponse(_controller(request).file(reference, optimised=True), media_type="application/octet-stream")


@operator_routes.post("/models/{reference}/samples")
async def add_samples(request: Request, reference: str, body: SamplesBody) -> dict[str, Any]:
    """Keep sample inputs with the model."""
    if any((sample.frame is None) == (sample.tensors is None) for sample in body.samples):
        raise UsageError("each sample has either `frame` or `tensors`")
    frames = [_base64(sample.frame) for sample in body.samples if sample.frame is not None]
    tensors = [_base64(sample.tensors) for sample in body.samples if sample.tensors is not None]
    labels = {
        _base64(sample.frame or sample.tensors or ""): sample.label
        for sample in body.samples
        if sample.label is not None
    }
    return await _heavily(request, _controller(request).add_samples, reference, frames, tensors, labels)


@operator_routes.post("/models/{reference}/profile")
async def profile(request: Request, reference: str, body: ProfileBody | None = None) -> dict[str, Any]:
    """Measure per layer, and if asked for per codec, on this machine."""
    where = body.on if body else "local"
    if where != "local":
        raise UsageError(f"cannot measure on {where[:80]!r} yet: on=local measures on the controller's machine")
    asked = body or ProfileBody()
    return await _heavily(request, _controller(request).profile, reference, asked.codecs, asked.device)


@operator_routes.get("/models/{reference}/costs")
async def costs(
    request: Request,
    reference: str,
    device: str,
    lossy: bool = False,
    tier: Annotated[list[str] | None, Query(max_length=8)] = None,
) -> dict[str, Any]:
    """The costs file for one device profile (docs/costs.md), with further tiers as in `tier=edge=jetson-nano`."""
    tiers = {name: profile for name, _, profile in (word.partition("=") for word in tier or [])}
    return await _heavily(request, _controller(request).costs, reference, device, lossy, tiers)


# ---- plans and deployments ----------------------------------------------------------------------------------------


@operator_routes.post("/plans")
async def plan(request: Request, body: PlanBody) -> dict[str, Any]:
    """Plan a model for a device profile and a link."""
    return await _heavily(request, _controller(request).plan, body.model, body.device, body.link or "", body.wish())


@operator_routes.post("/deployments")
async def deploy(request: Request, body: DeployBody) -> dict[str, Any]:
    """Plan, cut, sign, and tell the devices."""
    deploy = partial(_controller(request).deploy, recut=body.recut, elsewhere=body.elsewhere, now=body.now)
    return await _heavily(request, deploy, body.model, body.to, body.link or "", body.wish())


@operator_routes.post("/deployments/signed")
async def deploy_signed(request: Request, body: SignedBody) -> dict[str, Any]:
    """Publish what was prepared and signed elsewhere, and tell the devices."""
    deploy = partial(_controller(request).deploy_signed, now=body.now)
    return await _heavily(request, deploy, body.model, body.to, body.wish(), body.release, body.next_targets.encode())


@operator_routes.get("/deployments")
def deployments(request: Request) -> list[dict[str, Any]]:
    """Every deployment, oldest first."""
    return _controller(request).deployments()


@operator_routes.get("/releases")
def releases(request: Request) -> list[dict[str, Any]]:
    """Every release, oldest first."""
    return _controller(request).releases()


@operator_routes.get("/releases/{reference}/halves")
def halves(request: Request, reference: str) -> dict[str, Any]:
    """The far halves of a release, or of a model's newest, for servers that are not ours."""
    return _controller(request).exporting.halves(reference)


@operator_routes.get("/releases/{reference}/half")
async def half(request: Request, reference: str, device_class: str, row: str, decrypt: bool = False) -> Response:
    """One of them as an ONNX file."""
    export = partial(_controller(request).exporting.half, decrypt=decrypt)
    raw = await _heavily(request, export, reference, device_class, row)
    return Response(raw, media_type="application/octet-stream")


# ---- keys ---------------------------------------------------------------------------------------------------------


@operator_routes.get("/keys")
def keys(request: Request) -> dict[str, Any]:
    """Every role's keys, what waits for signatures, what is due."""
    return _controller(request).signing.shown()


@operator_routes.post("/keys/change")
async def change_keys(request: Request, body: KeyChangeBody) -> dict[str, Any]:
    """Begin a change of the keys, or go on with it: done, or what is to be signed."""
    return await _heavily(request, _controller(request).signing.change, body.change())


@operator_routes.get("/keys/change")
def waiting_change(request: Request) -> dict[str, Any]:
    """The change that waits, as it must be signed now."""
    return _controller(request).signing.waiting()


@operator_routes.delete("/keys/change")
def drop_change(request: Request) -> dict[str, Any]:
    """Give the change that waits up."""
    return _controller(request).signing.drop()


@operator_routes.post("/keys/signatures")
async def sign_change(request: Request, body: SignaturesBody) -> dict[str, Any]:
    """Add signatures to the change that waits: done, or what is still to be signed."""
    root = [GivenSignature(one.keyid, one.sig) for one in body.root]
    targets = [GivenSignature(one.keyid, one.sig) for one in body.targets]
    return await _heavily(request, _controller(request).signing.add_signatures, root, targets)


@operator_routes.post("/keys/renew")
async def renew_list(request: Request) -> dict[str, Any]:
    """A later end for the list of releases: done, or what the release key must sign."""
    return await _heavily(request, _controller(request).signing.renew)


@operator_routes.post("/keys/renewed")
async def renewed_list(request: Request, body: RenewedBody) -> dict[str, Any]:
    """The same, signed elsewhere."""
    return await _heavily(request, _controller(request).signing.renewed, body.next_targets.encode())


# ---- devices ------------------------------------------------------------------------------------------------------


@operator_routes.post("/devices/claims")
def claim(request: Request, body: ClaimBody) -> dict[str, Any]:
    """A one-time claim; it holds a secret."""
    wish = ClaimWish(
        device=body.device,
        device_class=body.device_class,
        group=body.group or "",
        labels=body.labels,
        link=body.link or "",
        expires_s=body.expires_s,
        replace=body.replace,
    )
    return _controller(request).claim(wish, body.gateway)


@operator_routes.post("/devices/gateway")
def lead(request: Request, body: LeadBody) -> dict[str, Any]:
    """Let devices offload through a gateway, or to the cloud again."""
    return _controller(request).lead(body.devices, body.gateway, body.link)


@operator_routes.get("/devices")
def all_devices(request: Request) -> list[dict[str, Any]]:
    """Every device and every open claim."""
    return _controller(request).all_devices()


@operator_routes.get("/devices/{name}")
def device(request: Request, name: str) -> dict[str, Any]:
    """One device."""
    return _controller(request).device(name)


@operator_routes.delete("/devices/{name}")
def revoke(request: Request, name: str) -> dict[str, Any]:
    """Take a device's right away."""
    return _controller(request).revoke(name)


@operator_routes.get("/telemetry/{name}")
def telemetry(request: Request, name: str, newest: Newest = 1_000) -> list[dict[str, Any]]:
    """What a device told of itself, oldest first."""
    return _controller(request).telemetry(name, newest)


@operator_routes.get("/events")
def events(request: Request, newest: Newest = 200) -> list[dict[str, Any]]:
    """The newest events, oldest first."""
    return _controller(request).events(newest)


# ---- from and to HTTP -----------------------------------------------------------------------------------------------


def parse_bindings(words: list[str]) -> dict[str, int]:
    """`DIM=N` each; UsageError for anything else."""
    bindings = {}
    for word in words:
        name, _, length = word.rpartition("=")
        if not (name and length.isascii() and length.isdigit() and 0 < int(length[:10]) < 10**9):
            raise UsageError(f"bind {word[:80]!r}: it must be DIMENSION=LENGTH, as in batch=1")
        bindings[name] = int(length)
    return bindings


async def _receive(request: Request, part: Path) -> None:
    """The body into a file; its size was bounded on the way here."""
    with part.open("wb") as file:
        block = bytearray()
        try:
            async for piece in request.stream():
                block += piece
                if len(block) >= BLOCK_BYTES:
                    await run_in_threadpool(file.write, bytes(block))
                    block.clear()
            await run_in_threadpool(file.write, bytes(block))
        except ClientDisconnect as error:
            raise LinkError("the upload was cut short") from error
        except OSError as error:
            raise EdgeError(f"the upload cannot be kept: {error.strerror}") from error


def _base64(text: str, what: str = "a sample") -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"{what}: not base64 ({error})") from error


def status_of(error: EdgeError) -> int:
    """The HTTP status of this kind of error."""
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def kind_of(error: EdgeError) -> str:
    """The class in `edgesplit.errors` that a client can raise again."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


Handler = Callable[[Request, Exception], Awaitable[JSONResponse]]


async def _on_edge_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, EdgeError)
    status = status_of(error)
    if status == 500:
        log.error("%s: %s", type(error).__name__, error)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "2"}}.get(status)
    return JSONResponse({"error": str(error), "kind": kind_of(error)}, status, headers)


async def _on_invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    return JSONResponse({"error": f"{where or 'body'}: {first['msg']}", "kind": "UsageError"}, 400)


async def _on_http(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": str(error.detail), "kind": "UsageError"}, error.status_code, error.headers)


async def _on_anything(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
    text = f"the controller failed ({type(error).__name__}); its log says more"
    return JSONResponse({"error": text, "kind": "EdgeError"}, 500)
