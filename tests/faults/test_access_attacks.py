"""Attacks on who may call what: each against the real app, with only TLS and the socket left out."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from edgesplit_controller.access import bearer_token
from edgesplit_controller.access.authenticator import Authenticator
from edgesplit_controller.access.login_throttle import FREE_FAILURES
from edgesplit_controller.access.request_limits import BodyLimits
from edgesplit_controller.access.sessions import CODE_S, IDLE_S, MAX_SESSION_S, csrf_token
from edgesplit_controller.access.tls_peer import Peer, PeerAwareHttp
from edgesplit_controller.api.authorisation import COOKIE
from edgesplit_controller.storage.tables.operators import BrowserSessionRow, LoginCodeRow, TokenRow
from support.controller_api import HOST, OWNER_TOKEN, ApiHarness, Clock


@pytest.fixture(scope="module")
def one_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiHarness]:
    with ExitStack() as stack:
        yield ApiHarness(tmp_path_factory.mktemp("attacked"), stack)


@pytest.fixture
def world(one_world: ApiHarness) -> ApiHarness:
    return one_world.fresh()


@pytest.fixture
def clock(world: ApiHarness) -> Clock:
    return world.clock


def read(world: ApiHarness, **more: Any) -> int:
    """May the caller read?"""
    return world.call("GET", "/v1/devices", **more).status


# ---- tokens and certificates


def test_a_token_with_anothers_certificate_is_refused(world: ApiHarness) -> None:
    """A copied token, beside a certificate of one's own, of a device, of the owner, and of the same name that was not
    issued or is revoked: 401, and every refusal reads alike."""
    alice, mallory = world.person("alice", "admin"), world.person("mallory", "viewer")
    assert read(world, by=alice) == read(world, by=mallory) == 200
    shown = [mallory.peer, world.owner.peer, Peer("operator:alice", 4711)]
    told = [world.call("GET", "/v1/devices", peer=peer, headers=alice.headers) for peer in shown]
    guessed = world.call("GET", "/v1/devices", peer=alice.peer, headers={"authorization": "Bearer guess"})
    assert {answer.status for answer in [*told, guessed]} == {401}
    assert len({answer.json["error"] for answer in [*told, guessed]}) == 1
    assert world.call("GET", "/v1/devices", headers=alice.headers).status == 401


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer ", "Basic x", "bearer\tx", "Bearer a b", "é", "Bearer \x00"])
def test_a_malformed_token_is_refused(world: ApiHarness, given: str) -> None:
    """Nothing, no scheme, another scheme, letters that no token has."""
    assert read(world, peer=world.owner.peer, headers={"authorization": given}) == 401


def test_two_tokens_or_two_sessions_are_refused(world: ApiHarness) -> None:
    """Header smuggling: of two Authorization headers or two cookies neither counts, in whatever order."""
    good = f"Bearer {OWNER_TOKEN}".encode()
    for pair in ((good, b"Bearer x"), (b"Bearer x", good), (good, good)):
        assert read(world, peer=world.owner.peer, more=tuple((b"authorization", one) for one in pair)) == 401
    secret, _ = world.log_in(world.owner)
    cookie = f"{COOKIE}={secret}".encode()
    assert read(world, more=((b"cookie", cookie),)) == 200
    assert read(world, more=((b"cookie", cookie), (b"cookie", f"{COOKIE}=x".encode()))) == 401
    assert read(world, more=((b"cookie", cookie + b"; " + cookie),)) == 401
    assert read(world, more=((b"cookie", cookie), (b"authorization", b"Bearer x")), peer=world.owner.peer) == 401


def test_headers_cannot_change_the_identity_of_a_connection(world: ApiHarness) -> None:
    """Names and addresses in headers that proxies set, and methods that they override, count for nothing."""
    said = {
        "x-forwarded-for": "10.9.9.9", "x-real-ip": "10.9.9.9", "forwarded": "for=10.9.9.9",
        "x-ssl-client-cn": "operator",
        "ssl-client-cert": "x", "x-forwarded-host": "evil.test", "x-original-url": "/v1/health",
        "x-rewrite-url": "/v1/health", "x-http-method-override": "DELETE",
    }  # fmt: skip
    assert read(world, headers={**said, **world.owner.headers}) == 401
    assert read(world, by=world.owner, headers=said) == 200
    assert {line["address"] for line in world.lines()} == {"127.0.0.1"}


def test_expired_revoked_and_rotated_tokens_are_refused_at_once(world: ApiHarness, clock: Clock) -> None:
    """By token and by a session that is open, from the next call on; the new token of a rotation is good."""
    for how in ("expired", "revoked", "rotated"):
        person = world.person(how, "operator", expires_s=100)
        secret, _ = world.log_in(person)
        assert read(world, by=person) == read(world, cookie=secret) == 200
        if how == "expired":
            clock.now += 101
        elif how == "revoked":
            assert world.call("DELETE", "/v1/operators/revoked", by=world.owner).status == 200
        else:
            given = world.call("POST", "/v1/operators/rotated/rotate", {"csr_pem": world.csr}, by=world.owner).json
        assert read(world, by=person) == 401, how
        assert read(world, cookie=secret) == 401, how
    fresh = world.held(type("Given", (), given))
    assert read(world, by=fresh) == 200
    assert read(world, peer=person.peer, headers=fresh.headers) == 401  # the old certificate beside the new token


def test_an_operator_changes_their_own_token_and_nobody_elses(world: ApiHarness) -> None:
    """And lasts no longer for it; the old token and session are void."""
    viewer = world.person("vera", "viewer", expires_s=500)
    secret, _ = world.log_in(viewer)
    given = world.call("POST", "/v1/operator/token", {"csr_pem": world.csr, "expires_s": 10**8}, by=viewer).json
    assert given["operator"] == "vera" and given["expires"] == world.clock() + 500
    assert read(world, by=viewer) == read(world, cookie=secret) == 401
    again = world.held(type("Given", (), given))
    assert read(world, by=again) == 200
    assert world.call("POST", "/v1/operators/operator/rotate", {}, by=again).status == 403


def test_stored_secrets_are_hashes_that_open_nothing(world: ApiHarness) -> None:
    """Neither the database's rows nor the audit log hold a token, a code, a session or what could be made into one."""
    person = world.person("alice", "viewer")
    code = world.call("POST", "/v1/session/codes", by=person).json["code"]
    secret, csrf = world.log_in(person)
    claim = world.call("POST", "/v1/devices/claims", {"device": "cam", "device_class": "raspberrypi4"}, by=world.owner)
    world.call("POST", "/v1/enrol", {"token": claim.json["token"], "csr_pem": "x"})
    world.call("GET", f"/v1/devices/{code}", by=person)
    with world.database.read() as session:
        kept = [row.sha256 for table in (TokenRow, LoginCodeRow, BrowserSessionRow) for row in session.query(table)]
    assert bearer_token.fingerprint(person.token) in kept and bearer_token.fingerprint(secret) in kept
    for stolen in kept:
        assert read(world, peer=person.peer, headers={"authorization": f"Bearer {stolen}"}) in (401, 429)
        assert read(world, cookie=stolen) in (401, 429)
    log = json.dumps(world.lines())
    for hidden in (person.token, secret, csrf, claim.json["token"], OWNER_TOKEN):
        assert hidden not in log and hidden.removeprefix("edgesplit_") not in log


# ---- sessions


def test_a_login_code_is_good_once_and_for_two_minutes(world: ApiHarness, clock: Clock) -> None:
    """A replayed code, a late one, one that never was and a misspelt one: refused, each with its cause. A code has 256
    random bits, so the cause reveals nothing of use."""
    told = []
    code = world.call("POST", "/v1/session/codes", by=world.owner).json["code"]
    assert world.call("POST", "/v1/session", {"code": code}).status == 200
    told.append(world.call("POST", "/v1/session", {"code": code}))
    late = world.call("POST", "/v1/session/codes", by=world.owner).json["code"]
    clock.now += CODE_S + 1
    told.append(world.call("POST", "/v1/session", {"code": late}))
    told.append(world.call("POST", "/v1/session", {"code": bearer_token.make("code")}))
    told.append(world.call("POST", "/v1/session", {"code": code[:-1]}))
    assert {answer.status for answer in told} == {401}
    causes = ("used already", "older than 2 minutes", "not of this controller", "misspelt or incomplete")
    for answer, cause in zip(told, causes, strict=True):
        assert cause in answer.json["error"]
    assert not any(answer.cookies for answer in told)


def test_session_fixation_is_not_possible(world: ApiHarness) -> None:
    """Logging in with a cookie of the attacker's choice, or with another's session, makes a new secret and ends the one
    that was shown."""
    victim, attacker = world.person("victim", "operator"), world.person("attacker", "viewer")
    planted, _ = world.log_in(attacker)
    for shown in (planted, "chosen-by-me"):
        code = world.call("POST", "/v1/session/codes", by=victim).json["code"]
        answer = world.call("POST", "/v1/session", {"code": code}, cookie=shown)
        mine = answer.cookies[COOKIE]
        assert mine != shown and read(world, cookie=shown) == 401
        assert world.call("GET", "/v1/session", cookie=mine).json["operator"] == "victim"


def test_session_cookies_are_http_only_same_site_and_secure(world: ApiHarness) -> None:
    """Every attribute, and a name that browsers take from this host alone."""
    code = world.call("POST", "/v1/session/codes", by=world.owner).json["code"]
    answer = world.call("POST", "/v1/session", {"code": code})
    attributes = {part.strip().lower() for part in answer.headers["set-cookie"].split(";")[1:]}
    assert attributes == {"httponly", "secure", "samesite=strict", "path=/"} and COOKIE.startswith("__Host-")
    assert answer.headers["cache-control"] == "no-store"


def test_a_session_ends_when_idle_and_after_its_longest_life(world: ApiHarness, clock: Clock) -> None:
    """Half an hour without a call; twelve hours with one a minute; logged out."""
    secret, _ = world.log_in(world.owner)
    clock.now += IDLE_S - 1
    assert read(world, cookie=secret) == 200
    clock.now += IDLE_S + 1
    assert read(world, cookie=secret) == 401
    secret, _ = world.log_in(world.owner)
    for _ in range(int(MAX_SESSION_S / 1_700)):
        clock.now += 1_700
        assert read(world, cookie=secret) == 200
    clock.now += 1_700
    assert read(world, cookie=secret) == 401
    secret, csrf = world.log_in(world.owner)
    assert world.call("DELETE", "/v1/session", cookie=secret, headers={"x-csrf-token": csrf}).status == 200
    assert read(world, cookie=secret) == 401


@pytest.mark.parametrize("given", ["", "x", "another's", "of the code"])
def test_a_change_by_a_session_needs_its_own_csrf_token(world: ApiHarness, given: str) -> None:
    """None, a guess, another session's: 403, and nothing happens."""
    world.device("cam-1", "doors")
    secret, csrf = world.log_in(world.owner)
    other, _ = world.log_in(world.owner)
    wrong = {"another's": csrf_token(other), "of the code": csrf_token(bearer_token.make("session"))}.get(given, given)
    assert world.call("DELETE", "/v1/devices/cam-1", cookie=secret, headers={"x-csrf-token": wrong}).status == 403
    assert world.call("GET", "/v1/devices/cam-1", cookie=secret).json["state"] != "revoked"
    assert world.call("DELETE", "/v1/devices/cam-1", cookie=secret, headers={"x-csrf-token": csrf}).status == 200


@pytest.mark.parametrize(
    "said",
    [
        {"origin": "https://evil.test"},
        {"origin": "null"},
        {"origin": f"https://{HOST}.evil.test"},
        {"origin": "https://hub.test:9"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_page_of_another_origin_changes_nothing_and_logs_nobody_in(world: ApiHarness, said: dict[str, str]) -> None:
    """Also with a right CSRF token, and with a code of the attacker's own (login CSRF)."""
    world.device("cam-1", "doors")
    secret, csrf = world.log_in(world.owner)
    headers = {"x-csrf-token": csrf, **said}
    assert world.call("DELETE", "/v1/devices/cam-1", cookie=secret, headers=headers).status == 403
    code = world.call("POST", "/v1/session/codes", by=world.owner).json["code"]
    answer = world.call("POST", "/v1/session", {"code": code}, headers=said)
    assert answer.status == 403 and not answer.cookies
    assert world.call("POST", "/v1/session", {"code": code}, headers={"origin": f"https://{HOST}"}).status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_form_body_is_refused(world: ApiHarness, kind: str) -> None:
    """What a page of another site can send without asking first is not taken, whatever is in it."""
    code = world.call("POST", "/v1/session/codes", by=world.owner).json["code"]
    raw = json.dumps({"code": code}).encode()
    assert world.call("POST", "/v1/session", raw, headers={"content-type": kind}).status == 400


def test_cors_allows_no_other_origin(world: ApiHarness) -> None:
    """CORS is closed: a preflight finds no such method, and no answer names an origin."""
    headers = {"origin": "https://evil.test", "access-control-request-method": "DELETE"}
    answers = [
        world.call("OPTIONS", "/v1/devices/cam-1", headers=headers),
        world.call("GET", "/v1/devices", by=world.owner, headers=headers),
        world.call("GET", "/v1/health", headers=headers),
    ]
    assert [answer.status for answer in answers] == [405, 200, 200]
    assert not [name for answer in answers for name in answer.headers if name.startswith("access-control-")]


# ---- floods and guesses


def test_guessing_is_throttled_without_delaying_valid_credentials(world: ApiHarness) -> None:
    """Codes, tokens and sessions: after a few 401 each try is told to stay away longer, up to a minute. A right one is
    let in at once in the midst of it, from the very same address."""
    waits = []
    for _ in range(FREE_FAILURES + 12):
        answer = world.call("POST", "/v1/session", {"code": bearer_token.make("code")}, address="10.0.0.9")
        waits.append(int(answer.headers.get("retry-after", 0)))
        assert answer.status == (429 if waits[-1] else 401)
    assert (
        waits[:FREE_FAILURES] == [0] * FREE_FAILURES
        and waits[FREE_FAILURES:] == sorted(waits[FREE_FAILURES:])
        and waits[-1] == 60
    )
    assert read(world, cookie="guess", address="10.0.0.9") == 429
    assert read(world, cookie="guess", address="10.0.0.8") == 401
    code = world.call("POST", "/v1/session/codes", by=world.owner, address="10.0.0.9").json["code"]
    assert world.call("POST", "/v1/session", {"code": code}, address="10.0.0.9").status == 200


def test_clients_with_certificates_are_throttled_by_certificate(world: ApiHarness) -> None:
    """Wrong tokens beside one operator's certificate cost another at the same address nothing."""
    alice, mallory = world.person("alice", "viewer"), world.person("mallory", "viewer")
    for _ in range(FREE_FAILURES + 3):
        last = world.call("GET", "/v1/devices", peer=mallory.peer, headers=alice.headers)
    assert last.status == 429
    assert world.call("GET", "/v1/devices", peer=alice.peer, headers=mallory.headers).status == 401
    assert read(world, by=alice) == read(world, by=mallory) == 200


def test_an_operator_over_the_rate_limit_gets_429_with_retry_after(one_world: ApiHarness) -> None:
    """429 with Retry-After; others are not concerned, nor is what is open to everybody."""
    world = one_world.fresh(calls=3)
    alice, bob = world.person("alice", "viewer"), world.person("bob", "viewer")
    assert {world.call("GET", "/v1/health").status for _ in range(20)} == {200}
    answers = [world.call("GET", "/v1/devices", by=alice) for _ in range(5)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429, 429]
    assert answers[-1].headers["retry-after"] == "1"
    assert read(world, by=bob) == 200


def test_a_flood_of_refusals_does_not_fill_the_audit_log(world: ApiHarness) -> None:
    """The first are listed, the rest are counted, and the next line that is written says how many."""
    for number in range(400):
        world.call("GET", f"/v1/devices/{number}", address="10.0.0.9")
    refused = [line for line in world.lines() if line["address"] == "10.0.0.9"]
    assert len(refused) == 30
    world.call("GET", "/v1/devices", address="10.0.0.10")
    assert world.lines()[-1]["detail"]["left_out"] == 370


def test_bodies_too_long_or_unauthenticated_are_refused_unread(world: ApiHarness) -> None:
    """413 by its length; who is not let in is refused before anything of the body is read."""
    long = {"content-length": str(2**40)}
    assert world.call("POST", "/v1/plans", b"{}", by=world.owner, headers=long).status == 413
    assert world.call("POST", "/v1/plans", b"not json at all").status == 401
    assert world.call("POST", "/v1/plans", b"not json at all", by=world.owner).status == 400
    for length in ("-1", "1e3", "0x10", "9" * 40, "+5"):
        answer = world.call("POST", "/v1/plans", b"{}", by=world.owner, headers={"content-length": length})
        assert answer.status == 413, length


# ---- hosts and headers


@pytest.mark.parametrize("host", ["evil.test", "hub.test.evil.test", "hub.test@evil.test", "", "127.0.0.1:1", "[::1]"])
def test_a_foreign_host_header_is_refused(world: ApiHarness, host: str) -> None:
    """DNS rebinding: a page that made its own name point here gets no answer, with whatever it presents."""
    answer = world.call("GET", "/v1/devices", by=world.owner, host=host)
    assert answer.status == (421 if host else 400)
    assert world.call("GET", "/v1/health", host=host or HOST).status == 200


def test_our_own_host_header_is_accepted_in_every_spelling(world: ApiHarness) -> None:
    """With a port, with a dot at its end, in capitals."""
    for host in (HOST, f"{HOST}:8443", HOST.upper(), f"{HOST}.", f"{HOST}.:443"):
        assert read(world, by=world.owner, host=host) == 200, host
    assert read(world, by=world.owner, more=((b"host", b"evil.test"),)) == 400


@pytest.mark.parametrize("path", ["/v1/devices", "/v1/health", "/v1/nothing", "/", "/v1/audit/export", "/favicon.ico"])
def test_every_response_has_security_headers(world: ApiHarness, path: str) -> None:
    """Found or not, refused or not; the request's id is another each time, and never the caller's."""
    answers = [world.call("GET", path, by=world.owner, headers={"x-request-id": "mine"}) for _ in range(2)]
    assert answers[0].headers["x-request-id"] != answers[1].headers["x-request-id"] != "mine"
    for headers in (answer.headers for answer in answers):
        assert "'unsafe-inline'" not in headers["content-security-policy"]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["strict-transport-security"].startswith("max-age=")
        assert headers["cache-control"] == ("no-store" if path.startswith("/v1/") else "no-cache")
        assert "server" not in headers


def test_hsts_is_not_sent_for_localhost_and_addresses(tmp_path: Path) -> None:
    """`localhost` and addresses are other programs' as well."""
    from edgesplit_controller.api.security_headers import headers_for

    for host, promised in (("hub.test", True), ("localhost", False), ("127.0.0.1", False), ("::1", False)):
        names = [name for name, _ in headers_for({"path": "/v1/health"}, host)]
        assert (b"strict-transport-security" in names) == promised, host


def test_an_internal_error_reveals_nothing_and_has_security_headers(
    world: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 500 has an id to find it by, and no trace of the program; it is in the audit log as failed."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("a secret of the program")

    monkeypatch.setattr(type(world.controller), "revoke", broken)
    with pytest.raises(RuntimeError):  # starlette hands it on after it has been answered
        world.call("DELETE", "/v1/devices/cam-1", by=world.owner)
    assert [(line["outcome"], line["subject"]) for line in world.lines()] == [("asked", "cam-1"), ("failed", "cam-1")]


# ---- the audit log


def test_every_change_is_in_the_audit_log_before_and_after_it_is_made(world: ApiHarness) -> None:
    """Who, by which certificate, from where, what, of what: for changes, for what was refused, and not for reading."""
    alice = world.person("alice", "operator", "doors")
    world.device("cam-1", "doors")
    world.device("lab-1", "lab")
    reading = world.call("GET", "/v1/devices", by=alice, address="10.0.0.1")
    gone = world.call("DELETE", "/v1/devices/cam-1", by=alice, address="10.0.0.1")
    world.call("DELETE", "/v1/devices/lab-1", by=alice, address="10.0.0.1")
    world.call("POST", "/v1/keys/renew", by=alice, address="10.0.0.1")
    assert reading.status == gone.status == 200
    shown = [(one["what"], one["subject"], one["outcome"], one["detail"].get("status")) for one in world.lines()]
    assert shown == [
        ("DELETE /v1/devices/{name}", "cam-1", "asked", None),
        ("DELETE /v1/devices/{name}", "cam-1", "done", 200),
        ("DELETE /v1/devices/{name}", "lab-1", "asked", None),
        ("DELETE /v1/devices/{name}", "lab-1", "refused", 404),
        ("POST /v1/keys/renew", "", "refused", 403),
    ]
    lines = world.lines()
    assert {(one["operator"], one["serial"], one["address"]) for one in lines} == {
        ("alice", str(alice.peer.serial), "10.0.0.1")
    }
    assert lines[1]["request"] == lines[0]["request"] == gone.headers["x-request-id"]
    assert [one["actor"] for one in world.call("GET", "/v1/events", by=world.owner).json] == ["alice"]


def test_nothing_is_changed_where_the_audit_log_cannot_be_written(
    world: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the line cannot be written, the call is not made."""
    from edgesplit.errors import LinkError

    def full(*_: Any) -> int:
        raise LinkError("the disk is full")

    world.device("cam-1", "doors")
    monkeypatch.setattr(type(world.audit), "write", full)
    assert world.call("DELETE", "/v1/devices/cam-1", by=world.owner).status == 503
    monkeypatch.undo()
    assert world.call("GET", "/v1/devices/cam-1", by=world.owner).json["state"] != "revoked"


def test_one_authenticator_guards_every_route(world: ApiHarness) -> None:
    """What is compared in constant time, or not at all: secrets are looked up by their hash, CSRF by `same`."""
    assert isinstance(world.app.state.gate, Authenticator)
    assert (
        bearer_token.is_equal("a", "a") and not bearer_token.is_equal("a", "b") and not bearer_token.is_equal("é", "e")
    )
    made = bearer_token.make("op")
    body, check = made.removeprefix("edgesplit_op_")[:43], made[-6:]
    assert len(made) == 62 and bearer_token.checksum(body) == check and bearer_token.make("op") != made


# ---- connections that say little


class ShortHeadTimeout(PeerAwareHttp):
    head_timeout_s = 0.2


class LongHeadTimeout(PeerAwareHttp):
    head_timeout_s = 3_600.0


@contextmanager
def listening(protocol: type[PeerAwareHttp]) -> Iterator[tuple[str, int]]:
    """The address of uvicorn with this protocol in front of an application that answers every request."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while scope["type"] == "http" and (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\nX: y"])
def test_a_connection_whose_request_head_is_incomplete_is_closed_after_a_timeout(sent: bytes) -> None:
    """Nothing at all, a letter, half a header (slow loris)."""
    with listening(ShortHeadTimeout) as address, socket.create_connection(address, timeout=60) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""


def test_a_request_head_beyond_its_limit_closes_the_connection() -> None:
    """One header of megabytes: the connection is closed long before the timeout, without an answer. Bodies are not
    limited here."""
    with listening(LongHeadTimeout) as address:
        with socket.create_connection(address, timeout=60) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
            with pytest.raises(OSError):
                for _ in range(1_000):
                    connection.sendall(b"y" * 65_536)
                assert connection.recv(1) == b""
                raise OSError("it was closed with everything sent")
        with socket.create_connection(address, timeout=60) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n" + b"z" * 3_000_000)
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_an_incomplete_body_times_out_with_408() -> None:
    """408, once the time is up; what comes in time, and what follows a whole body, is not concerned."""
    statuses = []

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def told(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def never() -> Any:
        await asyncio.Event().wait()

    async def at_once() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {"type": "http", "path": "/v1/enrol", "headers": [], "query_string": b""}
    for receive in (never, at_once):
        asyncio.run(BodyLimits(reads, default=10, by_suffix={}, timeout_s=0.0)(scope, receive, told))
    assert statuses == [408, 200]
