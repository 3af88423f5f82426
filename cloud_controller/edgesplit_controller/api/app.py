"""The HTTP API application: JSON over TLS. Every route but health, login, enrolment and renewal needs an operator's
certificate and token or a browser session (`api.authorisation`). docs/openapi.json describes it.

Guarantees: body sizes are limited before bodies are read; errors are `{"error": text, "kind": name}` with the HTTP
status of their kind; heavy work runs one at a time on a thread of its own and blocks no other call. The operations are
in `controller.Controller`; `ROUTERS` lists the routes.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import edgesplit
from edgesplit.errors import EdgeError
from edgesplit.limits import LIMITS
from edgesplit.observability.registry import MetricRegistry
from edgesplit_controller.access.authenticator import Authenticator
from edgesplit_controller.access.request_limits import BodyLimits, RateLimit
from edgesplit_controller.api.audit_middleware import AuditMiddleware
from edgesplit_controller.api.dispatch import HeavyJobQueue
from edgesplit_controller.api.errors import on_edge_error, on_http_exception, on_internal_error, on_invalid_request
from edgesplit_controller.api.request_logging import RequestLoggingMiddleware
from edgesplit_controller.api.routes import (
    agents,
    audit,
    bundles,
    dashboard,
    deployments,
    devices,
    enrolment,
    families,
    fleet,
    inference,
    keys,
    live,
    models,
    openapi,
    operators,
    profiles,
    replans,
    retention,
    rollouts,
    sessions,
    status,
    telemetry,
    views,
)
from edgesplit_controller.api.security_headers import SecurityHeadersMiddleware
from edgesplit_controller.controller import Controller
from edgesplit_controller.dashboard.assets import load_assets
from edgesplit_controller.fleet.change_feed import ChangeFeed
from edgesplit_controller.fleet.live_events import LiveEventHub
from edgesplit_controller.observability.metrics import CountedRequests
from edgesplit_controller.status import ProcessStatus

JSON_BYTES = 1_000_000
"""Size limit of a JSON body."""
SAMPLES_BYTES = 128 * 2**20
"""Size limit of a body with sample inputs."""
ROUTERS: tuple[APIRouter, ...] = (
    enrolment.everybody, enrolment.gateways,
    sessions.everybody, sessions.viewers, sessions.certified,
    operators.admins, operators.certified, audit.admins,
    status.viewers, openapi.viewers, profiles.viewers,
    models.viewers, models.operators, models.certified, families.viewers, families.certified,
    agents.viewers, agents.operators, agents.certified,
    deployments.viewers, deployments.operators, deployments.certified,
    rollouts.viewers, rollouts.operators, retention.operators, retention.certified, keys.viewers, keys.admins,
    devices.viewers, devices.operators, devices.certified, bundles.certified,
    telemetry.viewers, fleet.viewers, fleet.operators, inference.operators, views.viewers, live.viewers,
    dashboard.everybody,
    replans.viewers, replans.operators, replans.operators_of_all,
)  # fmt: skip


def create_app(
    controller: Controller, gate: Authenticator, *, hosts: Collection[str], model_bytes: int, heavy: HeavyJobQueue,
    ledger: MetricRegistry | None = None, status: ProcessStatus | None = None,
) -> FastAPI:  # fmt: skip
    """The application over one controller.

    `hosts` are the names and addresses at which it is reached, `model_bytes` is the size limit of an uploaded model,
    `heavy` runs heavy work, `ledger` holds the metrics and `status` the state of this process.
    """
    app = FastAPI(
        title="edgesplit controller",
        version=edgesplit.__version__,
        docs_url=None,
        openapi_url=None,  # `routes.openapi` serves it, with authentication
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.controller, app.state.heavy, app.state.gate = controller, heavy, gate
    app.state.condition = status or ProcessStatus()
    app.state.model_bytes, app.state.enrolments = model_bytes, RateLimit(per_s=5.0, burst=50)
    app.state.pushing = threading.BoundedSemaphore(4)
    changes = ChangeFeed(controller.database, stale_after_s=controller.devices.stale_after_s)
    app.state.hub, app.state.assets = LiveEventHub(changes.start, changes.read), load_assets()
    gate.operators.on_change(app.state.hub.check_access)
    metadata_bytes = 2 * LIMITS.metadata_bytes  # escaped as a JSON string, metadata is up to twice as long
    bounds = {
        "/v1/models": model_bytes, "/v1/agents": model_bytes, "/variants": model_bytes, "/samples": SAMPLES_BYTES,
        "/v1/families": SAMPLES_BYTES,
        # Beyond the size that a device accepts, so that the error can say what to do instead.
        "/infer": 2 * LIMITS.remote_inference_bytes,
        "/deployments/signed": metadata_bytes, "/keys/renew/signed": metadata_bytes,
    }  # fmt: skip
    # Starlette runs the middleware that is added last first: the security headers are outermost, the body limits
    # innermost.
    app.add_middleware(BodyLimits, default=JSON_BYTES, by_suffix=bounds)
    app.add_middleware(AuditMiddleware)
    app.add_middleware(CountedRequests, ledger=ledger or MetricRegistry())
    app.add_middleware(RequestLoggingMiddleware)
    app.add_middleware(SecurityHeadersMiddleware, hosts=hosts)
    app.add_exception_handler(EdgeError, on_edge_error)
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_internal_error)
    for router in ROUTERS:
        app.include_router(router)
    return app
