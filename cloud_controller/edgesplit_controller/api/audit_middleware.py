"""Writes the audit log for API calls: an entry before a change is made, and one with the outcome.

Logged are: every call that changes something or returns a secret or a model (`Needs.is_listed`); every call refused for
lack of authentication or permission, limited per client, where an entry counts those that were suppressed before it.
The first entry is on disk before the change begins, the second before the response is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgesplit_controller.access.audit_log import AuditEntry
from edgesplit_controller.access.authenticator import Authenticator
from edgesplit_controller.access.login_throttle import client_key
from edgesplit_controller.access.tls_peer import SCOPE, Peer
from edgesplit_controller.api.authorisation import Permissions
from edgesplit_controller.api.security_headers import REQUEST_ID
from edgesplit_controller.caller import Caller

log = logging.getLogger(__name__)

AUDIT = "edgesplit.audit"
"""Key of the middleware in the ASGI scope."""
REFUSED_CALLER = frozenset({401, 403, 421, 429})
"""Statuses of calls that were refused because of the caller, not because of what was requested."""


class AuditMiddleware:
    """ASGI middleware; routes call `on_authorised` once the caller is authenticated and has the permission."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; write its outcome before the response starts."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[AUDIT] = self
        ended = False

        async def send_audited(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start" and not ended:
                ended = True
                await self._on_response(scope, int(message["status"]))
            await send(message)

        try:
            await self._app(scope, receive, send_audited)
        except BaseException:
            if not ended:
                await self._on_response(scope, 500)
            raise

    async def on_authorised(self, scope: Scope) -> None:
        """The caller is authenticated and has the permission: write the entry that precedes a change."""
        needs: Permissions = scope["state"]["needs"]
        if needs.role is not None and needs.is_change(scope["method"]):
            await run_in_threadpool(_authenticator(scope).audit.write, _entry(scope, "asked"))
        scope["state"]["let_in"] = True

    async def _on_response(self, scope: Scope, status: int) -> None:
        """Write the entry with the outcome, unless the route does so."""
        if status < 400 and scope.get("state", {}).get("outcome_deferred"):
            return
        listed = _is_listed(scope, status)
        if not listed and status not in REFUSED_CALLER:
            return
        suppressed = 0 if listed else _authenticator(scope).audit_limit.try_pass(_client_key(scope))
        if suppressed is None:
            return
        detail = {"status": status, **({"left_out": suppressed} if suppressed else {})}
        await run_in_threadpool(write_outcome, scope, _outcome(status), detail)


def defer_outcome(scope: Scope) -> None:
    """The outcome of this call will be known after its response has begun: the route writes it by `write_outcome`."""
    scope["state"]["outcome_deferred"] = True


def write_outcome(scope: Scope, outcome: str, detail: Mapping[str, str | int]) -> None:
    """Write the entry with the outcome of a call, after `defer_outcome`. Blocks until it is on disk."""
    try:
        _authenticator(scope).audit.write(_entry(scope, outcome, detail))
    except Exception:
        log.exception("could not write to the audit log how %s %s ended", scope["method"], scope["path"])


def _is_listed(scope: Scope, status: int) -> bool:
    """Whether this call gets an entry whatever its outcome, because its route is logged and it passed authorisation."""
    state = scope.get("state", {})
    needs: Permissions | None = state.get("needs")
    if needs is None or not needs.is_listed(scope["method"]):
        return False
    return status < 400 or (needs.role is not None and state.get("let_in", False))


def _authenticator(scope: Scope) -> Authenticator:
    gate: Authenticator = scope["app"].state.gate
    return gate


def _entry(scope: Scope, outcome: str, detail: Mapping[str, str | int] | None = None) -> AuditEntry:
    state = scope.get("state", {})
    caller: Caller | None = state.get("caller")
    peer: Peer | None = scope.get(SCOPE)
    route = getattr(scope.get("route"), "path", "") or scope["path"]
    subject = state.get("subject") or " ".join(str(part) for part in scope.get("path_params", {}).values())
    return AuditEntry(
        what=f"{scope['method']} {route}", outcome=outcome, operator=caller.operator if caller else "",
        serial=str(peer.serial) if peer else "", address=_address(scope), request=scope.get(REQUEST_ID, ""),
        subject=subject, detail={**({"certificate": peer.name} if peer and not caller else {}), **(detail or {})},
    )  # fmt: skip


def _outcome(status: int) -> str:
    return "done" if status < 400 else "refused" if status < 500 else "failed"


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "?"


def _client_key(scope: Scope) -> str:
    caller: Caller | None = scope.get("state", {}).get("caller")
    return caller.operator if caller else client_key(_address(scope))
