"""Authorisation of API calls. Every route is created by one of the functions here, which declare the permissions that
it needs; before its body is read, the caller is authenticated (`access.authenticator`) and its role is checked.

A routes module creates its routers with `viewer_routes()`, `operator_routes()` or `admin_routes()`. Visibility of
devices is enforced by `dispatch.controller_of(request)`: devices outside of the caller's groups do not exist for it
(404). `caller_of(request)` returns the caller, for what is not about devices; `about(request, ...)` sets the subject in
the audit log where the path does not contain it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from edgesplit.observability import log_format
from edgesplit_controller.access.authenticator import Authenticator, PresentedCredentials
from edgesplit_controller.access.tls_peer import SCOPE, Peer
from edgesplit_controller.caller import Caller, Role, set_current_operator
from edgesplit_controller.errors import PermissionDenied

COOKIE = "__Host-edgesplit"
"""Name of the session cookie."""
CSRF_HEADER = "x-csrf-token"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""


class Authentication(enum.Enum):
    """Ways of authentication that a route accepts."""

    ANY = "certificate and token, or session"
    CERTIFICATE = "certificate and token"
    """For routes that return a secret or a model, accept code, or change permissions: a browser session is not enough,
    because it needs no private key."""
    OPEN = "anybody"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Permissions that a route needs."""

    role: Role | None
    """None: any caller, or the route checks the caller itself."""
    authentication: Authentication = Authentication.ANY
    everywhere: bool = False
    """Only for callers that are not limited to some groups."""
    audited: bool = True
    """Whether changes, and calls that return a secret or a model, are in the audit log."""

    def check(self, caller: Caller) -> None:
        """Raise PermissionDenied unless the caller has these permissions."""
        if self.role is not None and caller.role < self.role:
            raise PermissionDenied(f"this needs the role {self.role.word}, and {caller.operator} is {caller.role.word}")
        if self.everywhere and caller.groups is not None:
            raise PermissionDenied(f"this concerns all groups, and {caller.operator} is limited to some of them")
        if self.authentication is Authentication.CERTIFICATE and not caller.serial:
            raise PermissionDenied("not available to a browser session: use edgectl, with the operator's certificate")

    def is_change(self, method: str) -> bool:
        """Whether a call with this method changes something, and so has an entry in the audit log before it is done."""
        return self.audited and method not in SAFE_METHODS

    def is_listed(self, method: str) -> bool:
        """Whether each call with this method gets an audit log entry with its outcome."""
        return self.is_change(method) or (self.audited and self.authentication is Authentication.CERTIFICATE)


class GuardedRoute(APIRoute):
    """A route that runs its handler only for callers with the permissions in `needs`."""

    needs: ClassVar[Permissions]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, preceded by authentication, authorisation and the audit log."""
        handle, needs = super().get_route_handler(), self.needs

        async def guarded(request: Request) -> Response:
            request.state.needs = needs
            if needs.role is not None:
                authenticate = authenticator_of(request).authenticate
                request.state.caller = caller = await run_in_threadpool(authenticate, parse_credentials(request))
                needs.check(caller)
                set_current_operator(caller.operator)
                log_format.add_to_log_context(operator=caller.operator)
            # After the checks and before the body is read: a refused call changes nothing and precedes no entry.
            await request.scope["edgesplit.audit"].on_authorised(request.scope)
            return await handle(request)

        return guarded


def viewer_routes(*, certificate: bool = False) -> APIRouter:
    """Router for routes that read. `certificate`: not for browser sessions."""
    return _routes(Permissions(Role.VIEWER, _authentication(certificate)))


def operator_routes(*, certificate: bool = False, everywhere: bool = False) -> APIRouter:
    """Router for routes that change models, devices and deployments. `certificate`: not for browser sessions;
    `everywhere`: not for operators of some groups."""
    return _routes(Permissions(Role.OPERATOR, _authentication(certificate), everywhere))


def admin_routes(*, everywhere: bool = True) -> APIRouter:
    """Router for routes that change keys and operators, never for browser sessions; `everywhere`: not for admins of
    some groups."""
    return _routes(Permissions(Role.ADMIN, Authentication.CERTIFICATE, everywhere))


def open_routes(*, audited: bool = True) -> APIRouter:
    """Router for routes without authentication, or which authenticate the caller themselves."""
    return _routes(Permissions(None, Authentication.OPEN, audited=audited))


def page_routes() -> APIRouter:
    """Router for the dashboard's own files, below `/`, without authentication."""
    return _routes(Permissions(None, Authentication.OPEN, audited=False), prefix="")


def authenticator_of(request: Request) -> Authenticator:
    """The authenticator of the API."""
    gate: Authenticator = request.app.state.gate
    return gate


def caller_of(request: Request) -> Caller:
    """The authenticated caller; only on routes that need a role."""
    caller: Caller = request.state.caller
    return caller


def set_audit_subject(request: Request, *subjects: str) -> None:
    """Set the subject of this call in the audit log. Must never contain a secret."""
    request.state.subject = " ".join(subject for subject in subjects if subject)


def parse_credentials(request: Request) -> PresentedCredentials:
    """The credentials in a request."""
    peer: Peer | None = request.scope.get(SCOPE)
    headers = request.headers
    return PresentedCredentials(
        address=request.client.host if request.client else "?", peer=peer,
        authorization=tuple(headers.getlist("authorization")), session=tuple(_cookies(headers.getlist("cookie"))),
        is_change=request.method not in SAFE_METHODS, csrf=headers.get(CSRF_HEADER, ""),
        is_cross_origin=_is_cross_origin(request),
    )  # fmt: skip


def _routes(needs: Permissions, prefix: str = "/v1") -> APIRouter:
    guarded = type("GuardedRoute", (GuardedRoute,), {"needs": needs})
    return APIRouter(prefix=prefix, route_class=guarded, generate_unique_id_function=lambda route: route.name)


def _authentication(certificate: bool) -> Authentication:
    return Authentication.CERTIFICATE if certificate else Authentication.ANY


def _cookies(headers: list[str]) -> Iterator[str]:
    """Every value of the session cookie, twice if it was sent twice; malformed parts are skipped."""
    for header in headers:
        for part in header.split(";"):
            name, equals, value = part.strip().partition("=")
            if equals and name == COOKIE:
                yield value


def _is_cross_origin(request: Request) -> bool:
    """Whether the browser reports that a page of another origin sent the request. A client that sends neither header is
    not a current browser."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return True
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != request.headers.get("host", "")
