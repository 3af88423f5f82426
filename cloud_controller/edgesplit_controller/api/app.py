"""The HTTP API: JSON over TLS. An operator's certificate and token, or a browser's session, on all but health, logging
in, enrolment and renewal (`access`). docs/openapi.json describes it.

Promises: bodies are bounded before they are read, errors are `{"error": text, "kind": name}` with the status of their
kind, and heavy work runs one at a time in a thread of its own, so that nothing else waits for it. What the calls do is
`controller.Controller`'s; each topic's routes are a module here, and `ROUTERS` names them all.
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
from edgesplit.observability.registry import Ledger
from edgesplit_controller.access.authenticator import Gate
from edgesplit_controller.access.request_limits import BodyBounds, RateLimit
from edgesplit_controller.api.audit_middleware import Audited
from edgesplit_controller.api.dispatch import Heavy
from edgesplit_controller.api.errors import on_anything, on_edge_error, on_http, on_invalid
from edgesplit_controller.api.request_logging import NamedRequests
from edgesplit_controller.api.routes import (
    agents,
    audit,
    bundles,
    dashboard,
    deployments,
    devices,
    enrolment,
    fleet,
    keys,
    live,
    models,
    openapi,
    operators,
    profiles,
    replans,
    rollouts,
    sessions,
    status,
    telemetry,
    views,
)
from edgesplit_controller.api.security_headers import Hygiene
from edgesplit_controller.controller import Controller
from edgesplit_controller.dashboard.assets import load_assets
from edgesplit_controller.fleet.change_feed import Changes
from edgesplit_controller.fleet.live_events import Hub
from edgesplit_controller.observability.metrics import CountedRequests
from edgesplit_controller.status import Condition

JSON_BYTES = 1_000_000
SAMPLES_BYTES = 128 * 2**20
ROUTERS: tuple[APIRouter, ...] = (
    enrolment.everybody,
    enrolment.gateways,
    sessions.everybody,
    sessions.viewers,
    sessions.certified,
    operators.admins,
    operators.certified,
    audit.admins,
    status.viewers,
    openapi.viewers,
    profiles.viewers,
    models.viewers,
    models.operators,
    models.certified,
    agents.viewers,
    agents.operators,
    agents.certified,
    deployments.viewers,
    deployments.operators,
    deployments.certified,
    rollouts.viewers,
    rollouts.operators,
    keys.viewers,
    keys.admins,
    devices.viewers,
    devices.operators,
    devices.certified,
    bundles.certified,
    telemetry.viewers,
    fleet.viewers,
    fleet.operators,
    views.viewers,
    live.viewers,
    dashboard.everybody,
    replans.viewers,
    replans.operators,
    replans.operators_of_all,
)


def create_app(
    controller: Controller,
    gate: Gate,
    *,
    hosts: Collection[str],
    model_bytes: int,
    heavy: Heavy,
    ledger: Ledger | None = None,
    own: Condition | None = None,
) -> FastAPI:
    """The API over one controller; `hosts`: names and addresses by which it is reached; `own`: how this process is."""
    app = FastAPI(
        title="edgesplit controller",
        version=edgesplit.__version__,
        docs_url=None,
        openapi_url=None,  # `description` answers, and not to everybody
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.controller, app.state.heavy, app.state.gate = controller, heavy, gate
    app.state.condition = own or Condition()
    app.state.model_bytes, app.state.enrolments = model_bytes, RateLimit(per_s=5.0, burst=50)
    app.state.pushing = threading.BoundedSemaphore(4)
    changes = Changes(controller.database, stale_after_s=controller.devices.stale_after_s)
    app.state.hub, app.state.assets = Hub(changes.begin, changes.read), load_assets()
    lists = 2 * LIMITS.metadata_bytes  # quoted in JSON
    bounds = {
        "/v1/models": model_bytes,
        "/v1/agents": model_bytes,
        "/samples": SAMPLES_BYTES,
        "/deployments/signed": lists,
        "/keys/renewed": lists,
    }
    app.add_middleware(BodyBounds, default=JSON_BYTES, by_suffix=bounds)
    app.add_middleware(Audited)
    app.add_middleware(CountedRequests, ledger=ledger or Ledger())
    app.add_middleware(NamedRequests)
    app.add_middleware(Hygiene, hosts=hosts)
    app.add_exception_handler(EdgeError, on_edge_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_anything)
    for router in ROUTERS:
        app.include_router(router)
    return app
