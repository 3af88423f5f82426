"""docs/openapi.json: the API as OpenAPI 3.1 describes it, made of the routes, their bodies and `shapes`.

`python -m edgesplit_controller.api.openapi > docs/openapi.json` writes it; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi

import edgesplit
from edgesplit_controller.api.access_reference import declared
from edgesplit_controller.api.authorisation import COOKIE, Door, Needs
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
        "description": "Of the session, from GET /v1/session: needed for whatever is not a GET.",
    },
}
REASONS = {
    400: "What was sent is not what this takes.",
    401: "It was not shown who calls, or not by what is good.",
    403: "Who calls may not.",
    404: "There is no such thing, or none for who calls.",
    409: "Not in the present state.",
    413: "The body is too long.",
    422: "The model is refused.",
    429: "Too often, or too much waits: come back after `Retry-After` seconds.",
    503: "Something that is needed does not answer.",
}
OTHERWISE = "Any other error; of 500 the controller's log says more."
INFO = (
    "What edgectl and the dashboard speak. Errors are objects with `error` (for people) and `kind` (for programs)."
    " Each answer has an `X-Request-Id`, which the controller's log and its audit log name too."
)


def describe(app: FastAPI) -> dict[str, Any]:
    """The description of this application."""
    made = get_openapi(title="edgesplit controller", version=edgesplit.__version__, description=INFO, routes=app.routes)
    needs = {(one.method.lower(), one.path): one.needs for one in declared(list(app.router.routes))}
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = Problem.model_json_schema()
    made["components"]["securitySchemes"] = SCHEMES
    made["components"]["responses"] = {
        **{f"Problem{status}": _problem(text) for status, text in REASONS.items()},
        "Problem": _problem(OTHERWISE),
    }
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            _finish(operation, method, needs.get((method, path)))
    return made


def _finish(operation: dict[str, Any], method: str, needs: Needs | None) -> None:
    """What FastAPI does not know of an operation: who may, and every way in which it can fail."""
    operation["responses"].pop("422", None)
    for answer in operation["responses"].values():
        for content in answer.get("content", {}).values():
            _only_reference(content.get("schema", {}))
    for status in REASONS:
        operation["responses"].setdefault(str(status), {"$ref": f"#/components/responses/Problem{status}"})
    operation["responses"]["default"] = {"$ref": "#/components/responses/Problem"}
    operation["security"] = list(_security(method, needs))
    if needs is not None and needs.role is not None:
        scope = ", for all groups of devices" if needs.everywhere else ""
        operation["description"] = f"{operation.get('description', '')}\n\nFor: {needs.role.word}{scope}.".strip()


def _security(method: str, needs: Needs | None) -> Iterator[dict[str, list[str]]]:
    if needs is None or needs.role is None:
        return
    yield {CERTIFICATE: [], TOKEN: []}
    if needs.door is not Door.CERTIFICATE:
        yield {SESSION: []} if method == "get" else {SESSION: [], CSRF: []}


def _only_reference(schema: dict[str, Any]) -> None:
    """Where a shape is named, what FastAPI made of the function's annotation beside it goes."""
    for part in (schema, schema.get("items", {})):
        if "$ref" in part:
            reference = part["$ref"]
            part.clear()
            part["$ref"] = reference


def _problem(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}}


def described_routers(routers: Iterable[APIRouter]) -> dict[str, Any]:
    """The description of an application of these routers alone."""
    app = FastAPI(openapi_url=None)
    for router in routers:
        app.include_router(router)
    return describe(app)


def main() -> None:
    """Print it."""
    from edgesplit_controller.api.app import ROUTERS

    print(json.dumps(described_routers(ROUTERS), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
