"""Authenticates callers: an operator's client certificate with a bearer token, or a browser session. Independent of
HTTP.

Guarantees: one method per request, and never a second one after the first failed; a token is valid only with a
certificate of the same operator; a session changes nothing without its CSRF token, nor for a page of another origin;
every refusal of a token has the same text, and repeated failures are delayed (`login_throttle`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edgesplit.errors import EdgeError
from edgesplit_controller.access import bearer_token
from edgesplit_controller.access.audit_log import AuditLog
from edgesplit_controller.access.login_throttle import EntryLimiter, FailureCounter, client_key
from edgesplit_controller.access.operators import Operators, to_caller
from edgesplit_controller.access.request_limits import RateLimit
from edgesplit_controller.access.sessions import OpenedSession, Sessions, csrf_token
from edgesplit_controller.access.tls_peer import Peer
from edgesplit_controller.caller import OWNER, Caller
from edgesplit_controller.errors import PermissionDenied, RateLimited, Unauthenticated
from edgesplit_controller.storage.tables.operators import OperatorRow

CERTIFICATE_PREFIX = "operator:"
"""Prefix of the operator's name in the subject of an operator's certificate; no device name can contain it."""
WRONG_TOKEN = (
    "an operator's token is needed: `Authorization: Bearer ...`, from operator.token in the data folder, or from the"
    " file of `edgectl operator add`; this one is unknown, revoked or expired, or not of the certificate that was shown"
)
NO_SESSION = "this session has ended: `edgectl dashboard` opens another"
NO_CREDENTIALS = "no credentials: an operator's certificate and token are needed, or a browser session"


@dataclass(frozen=True, slots=True)
class PresentedCredentials:
    """The credentials of a request, and what decides whether they are sufficient."""

    address: str
    peer: Peer | None = None
    authorization: tuple[str, ...] = ()
    """Values of all `Authorization` headers."""
    session: tuple[str, ...] = ()
    """Values of all session cookies."""
    is_change: bool = False
    """Whether the method may change something (not GET, HEAD or OPTIONS)."""
    csrf: str = ""
    is_cross_origin: bool = False
    """Whether the browser reports that a page of another origin sent the request."""


def default_entry_limiter(now: Callable[[], float] = time.monotonic) -> EntryLimiter:
    """Limit of audit log entries for refused calls: per client 30 at once and then one in five seconds, over all
    clients 300 at once and then two a second."""
    return EntryLimiter(RateLimit(per_s=0.2, burst=30, now=now), RateLimit(per_s=2.0, burst=300, now=now))


@dataclass(frozen=True)
class Authenticator:
    """Authenticates the callers of one API."""

    operators: Operators
    sessions: Sessions
    audit: AuditLog
    calls: RateLimit = field(default_factory=lambda: RateLimit(per_s=100.0, burst=1_000))
    """Rate limit per operator."""
    failures: FailureCounter = field(default_factory=FailureCounter)
    audit_limit: EntryLimiter = field(default_factory=default_entry_limiter)
    """Limits how many refused calls get an entry of their own in the audit log."""

    def authenticate(self, presented: PresentedCredentials) -> Caller:
        """The caller. Unauthenticated if the credentials are missing or not valid, RateLimited for an operator with too
        many calls."""
        if len(presented.authorization) > 1 or (not presented.authorization and len(presented.session) > 1):
            raise Unauthenticated("a request must carry either one token or one session")
        # The token decides if there is one, even if a valid session cookie came with it: a second method after a failed
        # first would double an attacker's tries.
        if presented.authorization:
            caller = self._authenticate_token(presented)
        elif presented.session:
            caller = self._authenticate_session(presented)
        else:
            raise Unauthenticated(NO_CREDENTIALS)
        if not self.calls.allow(caller.operator):
            raise RateLimited(f"{caller.operator} makes more than a hundred calls a second; try again soon", 1.0)
        return caller

    def confirm(self, presented: PresentedCredentials) -> Caller:
        """The caller of a request that was authenticated and is still being answered; Unauthenticated once its
        credentials have ended. Counts neither as a call nor as a failed attempt."""
        if presented.authorization:
            row = self._valid_token(presented)
        else:
            row = self.sessions.operator_of(presented.session[0]) if presented.session else None
        if row is None:
            raise Unauthenticated(NO_SESSION)
        return to_caller(row, serial=str(presented.peer.serial) if presented.peer else "", address=presented.address)

    def log_in(self, presented: PresentedCredentials, code: str) -> OpenedSession:
        """Open a browser session: by a one-time code or, if `code` is empty, by the certificate and token. Sessions
        that were open in this browser end."""
        if presented.is_cross_origin:
            raise PermissionDenied("login from a page of another origin is refused")
        if code:
            try:
                opened = self.sessions.open_by_code(code, presented.address)
            except Unauthenticated as error:
                raise self._on_failure(presented, str(error)) from error
            self.failures.on_success(_client_key(presented))
        else:
            row = self._operator_by_token(presented)
            opened = self.sessions.open(row, presented.address)
        # The new session id replaces the browser's old one: an id that was planted before the login stays worthless.
        for old in presented.session:
            self.sessions.end(old)
        return opened

    def _authenticate_token(self, presented: PresentedCredentials) -> Caller:
        row = self._operator_by_token(presented)
        self.operators.on_call(row)
        serial = str(presented.peer.serial) if presented.peer else ""
        return to_caller(row, serial=serial, address=presented.address)

    def _operator_by_token(self, presented: PresentedCredentials) -> OperatorRow:
        """The operator to whom this certificate and this token belong."""
        row = self._valid_token(presented)
        if row is None:
            raise self._on_failure(presented, WRONG_TOKEN)
        self.failures.on_success(_client_key(presented))
        return row

    def _valid_token(self, presented: PresentedCredentials) -> OperatorRow | None:
        """The operator to whom this certificate and this token belong; None where they are not valid."""
        name = certified_operator(presented.peer)
        if not presented.authorization:
            raise Unauthenticated(NO_CREDENTIALS)
        scheme, _, token = presented.authorization[0].partition(" ")
        serial = presented.peer.serial if presented.peer else 0
        row = self.operators.by_token_and_certificate(token.strip(), serial) if scheme.lower() == "bearer" else None
        return row if row is not None and row.name == name else None

    def _authenticate_session(self, presented: PresentedCredentials) -> Caller:
        secret = presented.session[0]
        row = self.sessions.operator_of(secret)
        if row is None:
            raise self._on_failure(presented, NO_SESSION)
        if presented.is_change and presented.is_cross_origin:
            raise PermissionDenied("a change from a page of another origin is refused")
        if presented.is_change and not bearer_token.is_equal(presented.csrf, csrf_token(secret)):
            raise PermissionDenied("a change by a session needs its CSRF token: `X-CSRF-Token`, from GET /v1/session")
        self.operators.on_call(row)
        return to_caller(row, serial="", address=presented.address)

    def _on_failure(self, presented: PresentedCredentials, text: str) -> EdgeError:
        wait_s = self.failures.on_failure(_client_key(presented))
        return (
            RateLimited(f"{text} (too many failed attempts from this address)", wait_s)
            if wait_s
            else Unauthenticated(text)
        )


def certified_operator(peer: Peer | None) -> str:
    """Name of the operator whose certificate was presented; Unauthenticated for no certificate and for a device's."""
    if peer is not None and peer.name == OWNER:
        return OWNER
    if peer is not None and peer.name.startswith(CERTIFICATE_PREFIX):
        return peer.name.removeprefix(CERTIFICATE_PREFIX)
    certificate = f"that of {peer.name!r}" if peer else "none"
    raise Unauthenticated(
        f"the operator's certificate is needed (keys/{OWNER}.pem in the data folder, or in the file of"
        f" `edgectl operator add`), and {certificate} was shown"
    )


def _client_key(presented: PresentedCredentials) -> str:
    """Key under which failures are counted: the certificate's name, so that a certificate holder delays only itself,
    else the address."""
    return presented.peer.name if presented.peer else client_key(presented.address)
