"""Who may call what. Every route is made by one of the functions here, which say whom it lets in: before its body is
read, it is found out who calls (`gate`), and whether their role is enough.

A routes module makes its routers with `viewer_routes()`, `operator_routes()` or `admin_routes()`. What a caller may not
see is kept from them by `work.controller_of(request)`: its devices are those of the caller's groups, and for a caller
the others do not exist (404). `caller_of(request)` says who calls, for what is not about devices; `about(request, ...)`
says for the audit log what a call was about, where its path does not.
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
from edgesplit_controller.access.authenticator import Gate, Presented
from edgesplit_controller.access.tls_peer import SCOPE, Peer
from edgesplit_controller.caller import OWNER as OPERATOR
from edgesplit_controller.caller import Caller, Role, asks
from edgesplit_controller.errors import NotAllowed

__all__ = ["OPERATOR", "Caller", "Role", "about", "admin_routes", "caller_of", "operator_routes", "viewer_routes"]

COOKIE = "__Host-edgesplit"
CSRF_HEADER = "x-csrf-token"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


class Door(enum.Enum):
    """By what a caller may come."""

    ANY = "certificate and token, or session"
    CERTIFICATE = "certificate and token"
    """What hands out a secret or a model, brings code in, or changes who may what: not for a browser's session, which
    needs no key that somebody holds."""
    OPEN = "anybody"


@dataclass(frozen=True, slots=True)
class Needs:
    """What a route asks of its caller."""

    role: Role | None
    """None: nothing, or what the route finds out itself."""
    door: Door = Door.ANY
    everywhere: bool = False
    """Only for who is not limited to some groups."""
    audited: bool = True
    """Calls that change something are in the audit log; so are those that hand something out."""

    def check(self, caller: Caller) -> None:
        """NotAllowed for whoever lacks the role."""
        if self.role is not None and caller.role < self.role:
            raise NotAllowed(f"this takes the role {self.role.word}, and {caller.operator} is {caller.role.word}")
        if self.everywhere and not caller.everywhere:
            raise NotAllowed(f"this is about all groups, and {caller.operator} is for some of them")
        if self.door is Door.CERTIFICATE and not caller.serial:
            raise NotAllowed("not from a browser's session: use edgectl, with the operator's certificate")

    def changes(self, method: str) -> bool:
        """Is something changed by such a call? Then it is in the audit log before it is done."""
        return self.audited and method not in SAFE

    def is_listed(self, method: str) -> bool:
        """Does each such call get a line in the audit log that says how it ended?"""
        return self.changes(method) or (self.audited and self.door is Door.CERTIFICATE)


class GuardedRoute(APIRoute):
    """A route that lets in who has what it needs, and nobody else."""

    needs: ClassVar[Needs]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler behind the door."""
        handle, needs = super().get_route_handler(), self.needs

        async def guarded(request: Request) -> Response:
            request.state.needs = needs
            if needs.role is not None:
                gate: Gate = request.app.state.gate
                request.state.caller = caller = await run_in_threadpool(gate.let_in, presented_by(request))
                needs.check(caller)
                asks(caller.operator)
                log_format.note(operator=caller.operator)
            await request.scope["edgesplit.audit"].asked(request.scope)
            return await handle(request)

        return guarded


def viewer_routes(*, certificate: bool = False, everywhere: bool = False) -> APIRouter:
    """Routes that read. `certificate`: not for browser sessions; `everywhere`: not for operators of some groups."""
    return _routes(Needs(Role.VIEWER, _door(certificate), everywhere))


def operator_routes(*, certificate: bool = False, everywhere: bool = False) -> APIRouter:
    """Routes that change models, devices and deployments; the words as above."""
    return _routes(Needs(Role.OPERATOR, _door(certificate), everywhere))


def admin_routes(*, everywhere: bool = True) -> APIRouter:
    """Routes that change keys and operators: never for browser sessions; `everywhere`: for admins of all groups."""
    return _routes(Needs(Role.ADMIN, Door.CERTIFICATE, everywhere))


def open_routes(*, audited: bool = True) -> APIRouter:
    """Routes for everybody, or that find out themselves who calls."""
    return _routes(Needs(None, Door.OPEN, audited=audited))


def page_routes() -> APIRouter:
    """The dashboard's own files, below `/` itself: for everybody."""
    return _routes(Needs(None, Door.OPEN, audited=False), prefix="")


def caller_of(request: Request) -> Caller:
    """Who calls; only on routes that let in operators."""
    caller: Caller = request.state.caller
    return caller


def about(request: Request, *subjects: str) -> None:
    """For the audit log: what this call is about. Never a secret."""
    request.state.subject = " ".join(subject for subject in subjects if subject)


def presented_by(request: Request) -> Presented:
    """What a request shows of who sent it."""
    peer: Peer | None = request.scope.get(SCOPE)
    headers = request.headers
    return Presented(
        address=request.client.host if request.client else "?",
        peer=peer,
        authorization=tuple(headers.getlist("authorization")),
        session=tuple(_cookies(headers.getlist("cookie"))),
        changes=request.method not in SAFE,
        csrf=headers.get(CSRF_HEADER, ""),
        foreign=_is_foreign(request),
    )


def _routes(needs: Needs, prefix: str = "/v1") -> APIRouter:
    guarded = type("GuardedRoute", (GuardedRoute,), {"needs": needs})
    return APIRouter(prefix=prefix, route_class=guarded, generate_unique_id_function=lambda route: route.name)


def _door(certificate: bool) -> Door:
    return Door.CERTIFICATE if certificate else Door.ANY


def _cookies(headers: list[str]) -> Iterator[str]:
    """Every value that our cookie has, twice if it was sent twice; a header that is none has none."""
    for header in headers:
        for part in header.split(";"):
            name, equals, value = part.strip().partition("=")
            if equals and name == COOKIE:
                yield value


def _is_foreign(request: Request) -> bool:
    """Does the browser say that another origin's page sent this? Who says nothing is no browser of today."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return True
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != request.headers.get("host", "")
