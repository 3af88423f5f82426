"""The audit log's side of the API: a line before a change is made, and one when it is known how it ended.

What is listed: every call that changes something or hands out a secret or a model (`access.Needs.is_listed`), every
call that was refused for who made it, and the first of many refusals from one place, which counts those left out. The
first line is on disk before anything is done, the second before the answer leaves.
"""

from __future__ import annotations

import logging

from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgesplit_controller.access.audit_log import Line
from edgesplit_controller.access.authenticator import Gate
from edgesplit_controller.access.login_throttle import place_of
from edgesplit_controller.access.tls_peer import SCOPE, Peer
from edgesplit_controller.api.authorisation import Needs
from edgesplit_controller.api.security_headers import REQUEST_ID
from edgesplit_controller.caller import Caller

log = logging.getLogger(__name__)

AUDIT = "edgesplit.audit"
NOT_WHO = frozenset({401, 403, 421, 429})
"""Refused for who called, whatever was asked."""


class Audited:
    """ASGI middleware; `asked` is called by the routes once they know who calls."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[AUDIT] = self
        ended = False

        async def told(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start" and not ended:
                ended = True
                await self._end(scope, int(message["status"]))
            await send(message)

        try:
            await self._app(scope, receive, told)
        except BaseException:
            if not ended:
                await self._end(scope, 500)
            raise

    async def asked(self, scope: Scope) -> None:
        """It is known who calls and they may: from here on something may happen."""
        needs: Needs = scope["state"]["needs"]
        if needs.role is not None and needs.changes(scope["method"]):
            await run_in_threadpool(_gate(scope).audit.write, _line(scope, "asked"))
        scope["state"]["let_in"] = True

    async def _end(self, scope: Scope, status: int) -> None:
        """How it ended, before the answer leaves."""
        listed = _is_listed(scope, status)
        if not listed and status not in NOT_WHO:
            return
        left_out = 0 if listed else _gate(scope).listed.let_through(_place(scope))
        if left_out is None:
            return
        detail = {"status": status, **({"left_out": left_out} if left_out else {})}
        try:
            await run_in_threadpool(_gate(scope).audit.write, _line(scope, _outcome(status), detail))
        except Exception:
            log.exception("could not write to the audit log how %s %s ended", scope["method"], scope["path"])


def _is_listed(scope: Scope, status: int) -> bool:
    """Is this one of the calls that get a line however they end, once they were let in?"""
    state = scope.get("state", {})
    needs: Needs | None = state.get("needs")
    if needs is None or not needs.is_listed(scope["method"]):
        return False
    return status < 400 or (needs.role is not None and state.get("let_in", False))


def _gate(scope: Scope) -> Gate:
    gate: Gate = scope["app"].state.gate
    return gate


def _line(scope: Scope, outcome: str, detail: dict[str, int] | None = None) -> Line:
    state = scope.get("state", {})
    caller: Caller | None = state.get("caller")
    peer: Peer | None = scope.get(SCOPE)
    route = getattr(scope.get("route"), "path", "") or scope["path"]
    subject = state.get("subject") or " ".join(str(part) for part in scope.get("path_params", {}).values())
    return Line(
        what=f"{scope['method']} {route}",
        outcome=outcome,
        operator=caller.operator if caller else "",
        serial=str(peer.serial) if peer else "",
        address=_address(scope),
        request=scope.get(REQUEST_ID, ""),
        subject=subject,
        detail={**({"certificate": peer.name} if peer and not caller else {}), **(detail or {})},
    )


def _outcome(status: int) -> str:
    return "done" if status < 400 else "refused" if status < 500 else "failed"


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "?"


def _place(scope: Scope) -> str:
    caller: Caller | None = scope.get("state", {}).get("caller")
    return caller.operator if caller else place_of(_address(scope))
