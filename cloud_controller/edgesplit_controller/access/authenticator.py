"""Who calls, by what was presented: an operator's certificate with their token, or a browser's session. Knows no HTTP.

Promises: one way in at a time, and never a second one tried after the first failed; a token opens nothing without the
certificate of the same operator; a session changes nothing without its CSRF token, nor for a page of another origin;
every refusal of what was presented is alike, and slows down whoever presents more of it (`throttle`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edgesplit.errors import EdgeError
from edgesplit_controller.access import bearer_token
from edgesplit_controller.access.audit_log import Audit
from edgesplit_controller.access.login_throttle import Failures, Trickle, place_of
from edgesplit_controller.access.operators import Operators, caller_of
from edgesplit_controller.access.request_limits import RateLimit
from edgesplit_controller.access.sessions import Opened, Sessions, csrf_token
from edgesplit_controller.access.tls_peer import Peer
from edgesplit_controller.caller import OWNER, Caller
from edgesplit_controller.errors import Forbidden, NotAllowed, TooOften
from edgesplit_controller.storage.tables.operators import OperatorRow

CERTIFICATE_PREFIX = "operator:"
"""What an operator's certificate says before the name; no device's name can have it."""
WRONG_TOKEN = (
    "an operator's token is needed: `Authorization: Bearer ...`, from operator.token in the data folder, or from the"
    " file of `edgectl operator add`; this one is unknown, revoked or expired, or not of the certificate that was shown"
)
NO_SESSION = "this session has ended: `edgectl dashboard` opens another"
NOTHING = "nothing was presented: an operator's certificate and token are needed, or a browser's session"


@dataclass(frozen=True, slots=True)
class Presented:
    """What came with a request, as far as it says who calls."""

    address: str
    peer: Peer | None = None
    authorization: tuple[str, ...] = ()
    """The headers of that name, each."""
    session: tuple[str, ...] = ()
    """The cookies of that name, each."""
    changes: bool = False
    """Is something else asked for than to read?"""
    csrf: str = ""
    foreign: bool = False
    """Does the browser say that a page of another origin asks?"""


def a_trickle(now: Callable[[], float] = time.monotonic) -> Trickle:
    """Which refusals get a line: the first thirty from one place and one in five seconds after that, three hundred from
    everywhere and two a second."""
    return Trickle(RateLimit(per_s=0.2, burst=30, now=now), RateLimit(per_s=2.0, burst=300, now=now))


@dataclass(frozen=True)
class Gate:
    """The one gate of an API."""

    operators: Operators
    sessions: Sessions
    audit: Audit
    calls: RateLimit = field(default_factory=lambda: RateLimit(per_s=100.0, burst=1_000))
    """Per operator."""
    failures: Failures = field(default_factory=Failures)
    listed: Trickle = field(default_factory=a_trickle)
    """Which refusals get a line of their own in the audit log."""

    def let_in(self, presented: Presented) -> Caller:
        """Who calls; Forbidden where that was not shown, TooOften for an operator who calls more than is good."""
        if len(presented.authorization) > 1 or (not presented.authorization and len(presented.session) > 1):
            raise Forbidden("a request presents one token, or one session")
        if presented.authorization:
            caller = self._by_token(presented)
        elif presented.session:
            caller = self._by_session(presented)
        else:
            raise Forbidden(NOTHING)
        if not self.calls.allow(caller.operator):
            raise TooOften(f"{caller.operator} calls more than a hundred times a second; try again soon", 1.0)
        return caller

    def log_in(self, presented: Presented, code: str) -> Opened:
        """A new session: by a one-time code, or where that is empty by what is presented."""
        if presented.foreign:
            raise NotAllowed("a page of another origin opens no session here")
        if code:
            try:
                opened = self.sessions.open_by_code(code, presented.address)
            except Forbidden as error:
                raise self._failed(presented, str(error)) from error
            self.failures.succeeded(_place(presented))
        else:
            row = self._token_of(presented)
            opened = self.sessions.open(row, presented.address)
        for old in presented.session:
            self.sessions.end(old)
        return opened

    def _by_token(self, presented: Presented) -> Caller:
        row = self._token_of(presented)
        self.operators.seen(row)
        serial = str(presented.peer.serial) if presented.peer else ""
        return caller_of(row, serial=serial, address=presented.address)

    def _token_of(self, presented: Presented) -> OperatorRow:
        """The operator whose certificate and token these are."""
        name = certified_operator(presented.peer)
        if not presented.authorization:
            raise Forbidden(NOTHING)
        scheme, _, token = presented.authorization[0].partition(" ")
        serial = presented.peer.serial if presented.peer else 0
        row = self.operators.holding(token.strip(), serial) if scheme.lower() == "bearer" else None
        if row is None or row.name != name:
            raise self._failed(presented, WRONG_TOKEN)
        self.failures.succeeded(_place(presented))
        return row

    def _by_session(self, presented: Presented) -> Caller:
        secret = presented.session[0]
        row = self.sessions.operator_of(secret)
        if row is None:
            raise self._failed(presented, NO_SESSION)
        if presented.changes and presented.foreign:
            raise NotAllowed("a page of another origin changes nothing here")
        if presented.changes and not bearer_token.same(presented.csrf, csrf_token(secret)):
            raise NotAllowed("a change by a session needs its CSRF token: `X-CSRF-Token`, from GET /v1/session")
        self.operators.seen(row)
        return caller_of(row, serial="", address=presented.address)

    def _failed(self, presented: Presented, text: str) -> EdgeError:
        wait_s = self.failures.failed(_place(presented))
        return TooOften(f"{text} (too many failures from there)", wait_s) if wait_s else Forbidden(text)


def certified_operator(peer: Peer | None) -> str:
    """The operator whose certificate was shown; Forbidden for none and for a device's."""
    if peer is not None and peer.name == OWNER:
        return OWNER
    if peer is not None and peer.name.startswith(CERTIFICATE_PREFIX):
        return peer.name.removeprefix(CERTIFICATE_PREFIX)
    shown = f"that of {peer.name!r}" if peer else "none"
    raise Forbidden(
        f"the operator's certificate is needed (keys/{OWNER}.pem in the data folder, or in the file of"
        f" `edgectl operator add`), and {shown} was shown"
    )


def _place(presented: Presented) -> str:
    """Where failures are counted: who shows a certificate of ours slows nobody else down."""
    return presented.peer.name if presented.peer else place_of(presented.address)
