"""Generates docs/openapi.json: the API as OpenAPI 3.1, from the routes, `request_models` and `response_models`.

`python -m edgesplit_controller.api.reference openapi > docs/openapi.json` writes it; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi

import edgesplit
from edgesplit_controller.api.access_reference import declared_routes
from edgesplit_controller.api.authorisation import COOKIE, Authentication, Permissions
from edgesplit_controller.api.response_models import Problem

CERTIFICATE, TOKEN, SESSION, CSRF = "operatorCertificate", "operatorToken", "session", "csrf"
SCHEMES: dict[str, Any] = {
    CERTIFICATE: {"type": "mutualTLS", "description": "An operator's certificate, from `edgectl operator add`."},
    TOKEN: {"type": "http", "scheme": "bearer", "description": "The token of the operator whose certificate is shown."},
    SESSION: {
        "type": "apiKey",
        "in": "cookie",
        "name": COOKIE,
        "description": "A browser's session, opened by POST /v1/session with a code from `edgectl dashboard`.",
    },
    CSRF: {
        "type": "apiKey",
        "in": "header",
        "name": "X-CSRF-Token",
        "description": "CSRF token of the session, from GET /v1/session: required by every method but GET.",
    },
}
"""OpenAPI security schemes."""
ERROR_DESCRIPTIONS = {
    400: "The request is malformed or invalid.",
    401: "The credentials are missing or not valid.",
    403: "The caller lacks the permission.",
    404: "The object does not exist, or the caller cannot see it.",
    409: "Not possible in the present state.",
    413: "The body is too long.",
    422: "The model is refused.",
    429: "Too many calls, or the queue is full: retry after `Retry-After` seconds.",
    503: "A component that the call needs does not answer.",
}
"""Description of each error status."""
DEFAULT_ERROR_DESCRIPTION = "Any other error; of 500 the controller's log says more."
"""Description of the default error response."""
INFO = (
    "The API of edgectl and the dashboard. Errors are objects with `error` (for people) and `kind` (for programs)."
    " Each answer has an `X-Request-Id`, which the controller's log and its audit log name too."
)
"""Description of the API."""


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of this application."""
    document = get_openapi(
        title="edgesplit controller", version=edgesplit.__version__, description=INFO, routes=app.routes
    )
    needs = {(route.method.lower(), route.path): route.needs for route in declared_routes(list(app.router.routes))}
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = Problem.model_json_schema()
    document["components"]["securitySchemes"] = SCHEMES
    document["components"]["responses"] = {
        **{f"Problem{status}": _problem_response(text) for status, text in ERROR_DESCRIPTIONS.items()},
        "Problem": _problem_response(DEFAULT_ERROR_DESCRIPTION),
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete_operation(operation, method, needs.get((method, path)))
    return document


def _complete_operation(operation: dict[str, Any], method: str, needs: Permissions | None) -> None:
    """Add what FastAPI does not know of an operation: its permissions, and every error response."""
    operation["responses"].pop("422", None)
    for response in operation["responses"].values():
        for content in response.get("content", {}).values():
            _only_reference(content.get("schema", {}))
    for status in ERROR_DESCRIPTIONS:
        operation["responses"].setdefault(str(status), {"$ref": f"#/components/responses/Problem{status}"})
    operation["responses"]["default"] = {"$ref": "#/components/responses/Problem"}
    operation["security"] = list(_security(method, needs))
    if needs is not None and needs.role is not None:
        scope = ", for all groups of devices" if needs.everywhere else ""
        operation["description"] = f"{operation.get('description', '')}\n\nFor: {needs.role.word}{scope}.".strip()


def _security(method: str, needs: Permissions | None) -> Iterator[dict[str, list[str]]]:
    if needs is None or needs.role is None:
        return
    yield {CERTIFICATE: [], TOKEN: []}
    if needs.authentication is not Authentication.CERTIFICATE:
        yield {SESSION: []} if method == "get" else {SESSION: [], CSRF: []}


def _only_reference(schema: dict[str, Any]) -> None:
    """Remove what FastAPI adds beside a `$ref` from the handler's return annotation."""
    for part in (schema, schema.get("items", {})):
        if "$ref" in part:
            reference = part["$ref"]
            part.clear()
            part["$ref"] = reference


def _problem_response(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}}


def document_of_routers(routers: Iterable[APIRouter]) -> dict[str, Any]:
    """The OpenAPI document of an application with only these routers."""
    app = FastAPI(openapi_url=None)
    for router in routers:
        app.include_router(router)
    return openapi_document(app)
