"""A controller's API in this process, called as a server would call it, with operators and two groups of devices.

Only TLS and the socket are left out, which are uvicorn's: whose certificate a connection shows is said with each call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import msgspec

from edgesplit.trust.identity import certificate_request, load_or_make_key
from edgesplit_controller.access.audit_log import AuditLog
from edgesplit_controller.access.authenticator import Authenticator, default_entry_limiter
from edgesplit_controller.access.login_throttle import FailureCounter
from edgesplit_controller.access.operators import NewOperator, Operators
from edgesplit_controller.access.request_limits import RateLimit
from edgesplit_controller.access.sessions import Sessions
from edgesplit_controller.access.tls_peer import SCOPE, Peer
from edgesplit_controller.api.app import create_app
from edgesplit_controller.api.authorisation import COOKIE
from edgesplit_controller.api.dispatch import HeavyJobQueue
from edgesplit_controller.caller import OWNER, Caller, Role
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.rollout.request import ALL_AT_ONCE, parse_terms
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.base import Table
from edgesplit_controller.storage.tables.core import Deployment, Device, Model, ReleaseRow
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow, RolloutRow, RolloutStageRow
from support.controller_parts import assembled

HOST = "hub.test"
OWNER_TOKEN = "the owner's"
OWNER_SERIAL = 1
ALL = Caller(OWNER, Role.ADMIN)


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes
    cookies: dict[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


@dataclass(frozen=True)
class Person:
    """An operator with what they hold."""

    name: str
    token: str
    peer: Peer

    @property
    def headers(self) -> dict[str, str]:
        """What edgectl sends for them."""
        return {"authorization": f"Bearer {self.token}"}


class Clock:
    """Time, moved by hand."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class World:
    """One controller's API and who calls it."""

    def __init__(self, folder: Path, stack: ExitStack, *, clock: Clock | None = None, calls: int = 10**9) -> None:
        self.clock = clock or Clock()
        self.controller, _ = assembled(folder, Authority(folder / "keys"), stack)
        self.database: Database = self.controller.database
        self._authority = Authority(folder / "keys" / "operators")
        self._key = load_or_make_key(folder / "person.key")
        self._loop = asyncio.new_event_loop()
        stack.callback(self._loop.close)
        self.csr = certificate_request(self._key, "somebody").decode()
        self.owner = Person(OWNER, OWNER_TOKEN, Peer(OWNER, OWNER_SERIAL))
        self.fresh(calls=calls)

    def fresh(self, *, calls: int = 10**9) -> World:
        """Nobody but the owner, no device, nothing counted; the audit log begins here for `lines`."""
        with self.database.write() as session:
            for table in reversed(Table.metadata.sorted_tables):
                if not table.name.startswith("audit"):
                    session.execute(table.delete())
        self.operators = Operators(
            self.database,
            lambda csr, name, _: self._authority.sign_operator(csr, f"operator:{name}", None),
            now=self.clock,
        )
        self.operators.adopt_owner(OWNER_TOKEN, OWNER_SERIAL)
        self.audit = AuditLog(self.database, now=self.clock)
        self._before = self.audit.head()[0]
        sessions = Sessions(self.database, self.operators, now=self.clock)
        self.gate = Authenticator(
            self.operators,
            sessions,
            self.audit,
            calls=RateLimit(per_s=calls, burst=calls, now=self.clock),
            failures=FailureCounter(self.clock),
            audit_limit=default_entry_limiter(self.clock),
        )
        if not hasattr(self, "app"):
            self.app = create_app(
                self.controller, self.gate, hosts=[HOST], model_bytes=2_000_000, heavy=HeavyJobQueue()
            )
        self.app.state.gate = self.gate
        return self

    def person(self, name: str, role: str, *groups: str, expires_s: int = 3_600) -> Person:
        """A new operator with a certificate."""
        wish = NewOperator(name, Role.parse(role), groups, expires_s)
        return self.held(self.operators.add(wish, self.csr, ALL))

    def held(self, given: Any) -> Person:
        """What an operator holds after this."""
        from cryptography import x509

        serial = x509.load_pem_x509_certificate(given.certificate_pem.encode()).serial_number
        return Person(given.operator, given.token, Peer(f"operator:{given.operator}", serial))

    def device(self, name: str, group: str, **labels: str) -> None:
        """An enrolled device."""
        with self.database.write() as session:
            session.add(
                Device(
                    name=name, device_class="raspberrypi4", group=group, labels=labels, link="wifi",
                    certificate_serial=str(int.from_bytes(name.encode(), "big")), public_key_sha256="k",
                    enrolled=self.clock(), revoked=None, statement=None, last_seen=None, birth=None, reported=None,
                    telemetry=None,
                )
            )  # fmt: skip

    def deployment(self, number: int, devices: list[str], *, targets: list[str] | None = None) -> None:
        """A deployment of the model `m@1` to these devices."""
        shown: dict[str, Any] = {"layers": [], "inputs": [], "outputs": [], "input_spec": None}
        with self.database.write() as session:
            session.merge(Model(id=7, name="m", version=1, sha256="a", optimised_sha256="b", bytes=1, input_text="",
                                bindings={}, shown=shown, created=1.0))  # fmt: skip
            session.flush()
            session.merge(ReleaseRow(digest="d" * 64, model_id=7, created=1.0, options={}))
            session.flush()
            session.add(Deployment(id=number, release="d" * 64, model="m@1", targets=targets or devices,
                                   devices=devices, options={}, created=1.0))  # fmt: skip

    def rollout(self, number: int, devices: list[str]) -> None:
        """A rollout to these devices that is paused before it told any."""
        self.deployment(number, devices)
        with self.database.write() as session:
            session.add(RolloutRow(
                id=number, model="m", release="d" * 64, terms=msgspec.to_builtins(parse_terms(ALL_AT_ONCE, 1.0)),
                state="paused", stage=0, approved=-1, excused=-1, reason="", outcome="", following=False,
                superseded_by=0, rate_state={}, who="operator", created=1.0, began=1.0, ended=0.0, changed=1.0,
            ))  # fmt: skip
            session.flush()
            session.add(RolloutStageRow(rollout=number, number=0, size="100%", began=1.0))
            for place, name in enumerate(devices):
                session.add(RolloutDeviceRow(
                    rollout=number, device=name, stage=0, position=place, state="queued", previous="", cause="",
                    kind="", counter=0, assigned_at=0.0, ran_at=0.0, rolls_back=False, sent_back=False, counts=True,
                    unjudged=False,
                ))  # fmt: skip

    def call(
        self,
        method: str,
        path: str | bytes,
        body: Any = None,
        *,
        by: Person | None = None,
        headers: Mapping[str, str] | None = None,
        more: tuple[tuple[bytes, bytes], ...] = (),
        peer: Peer | None = None,
        query: bytes = b"",
        address: str = "127.0.0.1",
        cookie: str = "",
        host: str = HOST,
    ) -> Answer:
        """One request; `by` shows certificate and token, `cookie` is a session's secret."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {"host": host, "content-type": "application/json", **(by.headers if by else {}), **(headers or {})}
        if cookie:
            given["cookie"] = f"{COOKIE}={cookie}"
        path_bytes = path.encode() if isinstance(path, str) else path
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "https",
            "path": path_bytes.decode("utf-8", "replace"), "raw_path": quote_from_bytes(path_bytes).encode(),
            "query_string": query, "root_path": "", "server": ("h", 1), "client": (address, 1),
            SCOPE: peer or (by.peer if by else None),
            "headers": [*((name.encode(), value.encode("latin-1")) for name, value in given.items() if value), *more],
        }  # fmt: skip
        incoming = [{"type": "http.request", "body": raw, "more_body": False}]
        sent: list[Any] = []
        answered_all = asyncio.Event()

        async def receive() -> Any:
            if incoming:
                return incoming.pop()
            await answered_all.wait()  # who has sent everything waits for the answer, and then leaves
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body")
            if whole or message.get("body", b"").startswith(b"event: "):  # who has heard a stream's first event leaves
                answered_all.set()

        self._loop.run_until_complete(asyncio.wait_for(self.app(scope, receive, send), 60))
        answered = [(name.decode(), value.decode("latin-1")) for name, value in sent[0]["headers"]]
        set_cookies = [value.partition(";")[0].partition("=") for name, value in answered if name == "set-cookie"]
        return Answer(
            sent[0]["status"],
            dict(answered),
            b"".join(part.get("body", b"") for part in sent[1:]),
            {name: value.strip('"') for name, _, value in set_cookies},
        )

    def log_in(self, by: Person) -> tuple[str, str]:
        """A browser's session for them: its secret and its CSRF token."""
        code = self.call("POST", "/v1/session/codes", by=by).json["code"]
        answer = self.call("POST", "/v1/session", {"code": code})
        assert answer.status == 200, answer.body
        return answer.cookies[COOKIE], answer.json["csrf"]

    def lines(self) -> list[dict[str, Any]]:
        """The audit log, since `fresh`."""
        return [line for line in self.audit.all() if line["number"] > self._before]
