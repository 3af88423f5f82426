"""Operators of a real controller: over TLS, with edgectl as they type it, and where their certificates do not count."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography import x509

from edgesplit.controller_client import credentials
from edgesplit.errors import EdgeError, TrustError, UsageError
from edgesplit.mqtt.session import Session
from edgesplit.trust.identity import Credentials as Files
from edgesplit.trust.identity import enrolment_context
from edgesplit_cli.main import cli
from edgesplit_controller.access.bootstrap import open_authenticator
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.pki.own_certificates import OwnCertificates
from edgesplit_controller.storage.database import Database
from support.controller_process import Device, Up, enrolled, eventually


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("controller") / "data")
    assert running.start() == "ready"
    yield running
    running.end()


@pytest.fixture(scope="module")
def devices(up: Up, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Device]]:
    folder = tmp_path_factory.mktemp("devices")
    made = [enrolled(up, name, folder, group=group) for name, group in (("doors-1", "doors"), ("lab-1", "lab"))]
    yield made
    for device in made:
        device.session.stop()


class Edgectl:
    """edgectl, typed on an operator's own machine."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        home.mkdir()
        self.home = home
        for name, folder in (("XDG_CONFIG_HOME", "config"), ("XDG_DATA_HOME", "data")):
            monkeypatch.setenv(name, str(home / folder))
        for name in ("EDGESPLIT_DATA", "EDGESPLIT_CREDENTIALS"):
            monkeypatch.delenv(name, raising=False)

    def __call__(self, *words: str) -> str:
        """What it printed; its error is raised."""
        result = CliRunner().invoke(cli, words, catch_exceptions=True)
        if isinstance(result.exception, EdgeError):
            raise result.exception
        assert result.exit_code == 0, (words, result.output, result.exception)
        return result.output

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))


@pytest.fixture
def edgectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Edgectl:
    return Edgectl(tmp_path / "home", monkeypatch)


def added(up: Up, edgectl: Edgectl, name: str, *options: str) -> Path:
    """Credentials of a new operator, in a file."""
    out = edgectl.home / f"{name}.json"
    said = edgectl("--data", str(up.data), "operator", "add", name, "--out", str(out), *options)
    assert str(out) in said and credentials.read(out).token not in said
    return out


def test_an_operator_of_a_group_works_from_another_machine(up: Up, devices: list[Device], edgectl: Edgectl) -> None:
    """Added by the owner; logged in with the file; sees and may what is theirs; is told why not elsewhere."""
    file = added(up, edgectl, "alice", "--role", "operator", "--group", "doors", "--expires", "12h")
    assert file.stat().st_mode & 0o777 == 0o600
    assert "you are alice (operator of doors)" in edgectl("login", str(file))
    assert edgectl.json("whoami") == {
        "url": up.addresses["api_url"],
        "operator": "alice",
        "role": "operator",
        "groups": ["doors"],
    }
    assert [one["name"] for one in edgectl.json("device", "list")] == ["doors-1"]
    with pytest.raises(EdgeError, match="no device 'lab-1'"):
        edgectl("device", "show", "lab-1")
    with pytest.raises(UsageError, match="needs the role admin, and alice is operator"):
        edgectl("operator", "list")
    with pytest.raises(UsageError, match="your groups"):
        edgectl("device", "claim", "new-1", "--profile", "raspberrypi4", "--group", "lab")
    assert json.loads(edgectl("device", "claim", "new-1", "--profile", "raspberrypi4"))["device"] == "new-1"
    assert "is deleted" in edgectl("logout")
    with pytest.raises(UsageError, match="edgectl login"):
        edgectl("whoami")


def test_rotation_and_revocation_take_effect_at_the_next_call(up: Up, edgectl: Edgectl, tmp_path: Path) -> None:
    """Token and certificate both; a file that was left behind opens nothing."""
    old = added(up, edgectl, "bob", "--role", "viewer")
    fresh = tmp_path / "fresh.json"
    edgectl("--data", str(up.data), "operator", "rotate", "bob", "--out", str(fresh))
    with pytest.raises(UsageError, match="unknown, revoked or expired"):
        edgectl("--credentials", str(old), "whoami")
    assert edgectl.json("--credentials", str(fresh), "whoami")["operator"] == "bob"
    edgectl("--data", str(up.data), "operator", "revoke", "bob", "--yes")
    with pytest.raises(UsageError, match="unknown, revoked or expired"):
        edgectl("--credentials", str(fresh), "whoami")
    states = {one["name"]: one["state"] for one in edgectl.json("--data", str(up.data), "operator", "list")}
    assert states["bob"] == "revoked" and states["operator"] == "active"


def test_an_operator_changes_their_own_token_in_place(up: Up, edgectl: Edgectl) -> None:
    """The file that is used holds the new one; what was copied from it before is void."""
    file = added(up, edgectl, "frank", "--role", "viewer")
    edgectl("login", str(file))
    assert "frank's old credentials are void" in edgectl("operator", "rotate")
    assert edgectl.json("whoami")["operator"] == "frank"
    with pytest.raises(UsageError, match="unknown, revoked or expired"):
        edgectl("--credentials", str(file), "whoami")
    with pytest.raises(UsageError, match="only an admin"):
        edgectl("operator", "rotate", "--expires", "1y")
    with pytest.raises(UsageError, match=r"deleting operator\.token"):
        edgectl("--data", str(up.data), "operator", "rotate")


def test_options_take_precedence_over_environment_and_stored_login(
    up: Up, edgectl: Edgectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--data before the environment before `login`; two that are both said are refused."""
    carol, dave = (added(up, edgectl, name, "--role", "viewer") for name in ("carol", "dave"))
    edgectl("login", str(carol))
    monkeypatch.setenv("EDGESPLIT_CREDENTIALS", str(dave))
    assert edgectl.json("whoami")["operator"] == "dave"
    assert edgectl.json("--data", str(up.data), "whoami")["operator"] == "operator"
    monkeypatch.delenv("EDGESPLIT_CREDENTIALS")
    assert edgectl.json("whoami")["operator"] == "carol"
    with pytest.raises(UsageError, match="give one of them"):
        edgectl("--data", str(up.data), "--credentials", str(dave), "whoami")


def test_a_browser_logs_in_by_the_address_that_edgectl_prints(up: Up, edgectl: Edgectl) -> None:
    """Without a certificate, over TLS that it verifies; once; its cookie reads, and changes with the CSRF token."""
    url = edgectl.json("--data", str(up.data), "dashboard")["url"]
    address, _, code = url.partition("/#login=")
    assert address == up.addresses["api_url"] and code.startswith("edgesplit_code_")
    browser = Browser(up)
    status, session, headers = browser("POST", "/v1/session", {"code": code})
    assert status == 200 and session["operator"] == "operator" and session["csrf"]
    cookie = {"Cookie": headers["set-cookie"].partition(";")[0]}
    assert browser("GET", "/v1/devices", headers=cookie)[0] == 200
    assert browser("GET", "/v1/session", headers=cookie)[1] == session
    assert browser("DELETE", "/v1/session", headers=cookie)[0] == 403
    assert browser("POST", "/v1/session", {"code": code})[0] == 401
    assert browser("DELETE", "/v1/session", headers={**cookie, "X-CSRF-Token": session["csrf"]})[0] == 200
    assert browser("GET", "/v1/devices", headers=cookie)[0] == 401
    assert browser("GET", "/v1/devices", headers={"Host": "evil.test"})[0] == 421
    assert browser("GET", "/v1/devices", headers={"X-Forwarded-For": "1.2.3.4"})[0] == 401


class Browser:
    """An HTTPS client that has no certificate."""

    def __init__(self, up: Up) -> None:
        self.up = up

    def __call__(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        context = enrolment_context((self.up.data / "ca.pem").read_text())
        host, port = self.up.addresses["api_url"].removeprefix("https://").split(":")
        connection = http.client.HTTPSConnection(host, int(port), timeout=60, context=context)
        try:
            given = {"Content-Type": "application/json", **(headers or {})}
            connection.request(method, path, json.dumps(body) if body is not None else None, given)
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, json.loads(answer.read()), told
        finally:
            connection.close()


def test_an_operators_certificate_opens_the_api_and_nothing_else(up: Up, edgectl: Edgectl, tmp_path: Path) -> None:
    """The broker does not let it in: operators hear no chunk and say nothing to devices. Without its token the API
    neither; nor is an operator's name a device's."""
    held = credentials.read(added(up, edgectl, "eve", "--role", "admin"))
    (tmp_path / "key.pem").write_text(held.key_pem)
    (tmp_path / "cert.pem").write_text(held.certificate_pem)
    files = Files(tmp_path / "key.pem", tmp_path / "cert.pem", up.data / "ca.pem")
    session = Session("127.0.0.1", up.addresses["mqtt_port"], "eve", files.client_context(), on_message=lambda *_: None)
    session.start()
    try:
        eventually("the broker refuses it", lambda: session.problem)
        assert not session.connected
    finally:
        session.stop()
    assert up.call("GET", "/v1/devices", token=None, as_=files)[0] == 401
    assert up.call("POST", "/v1/gateway/crl", {}, token=None, as_=files)[0] in (401, 404)
    assert up.call("GET", "/v1/devices", token=held.token)[0] == 401  # beside the owner's certificate


def test_the_audit_log_names_operators_and_is_verified_offline(up: Up, edgectl: Edgectl, tmp_path: Path) -> None:
    """Shown, exported, verified; a changed export is not what was written; no token is in it."""
    edgectl("--data", str(up.data), "device", "claim", "logged-1", "--profile", "raspberrypi4")
    shown = edgectl.json("--data", str(up.data), "audit", "show", "--newest", "2")
    assert [(one["operator"], one["what"], one["outcome"]) for one in shown] == [
        ("operator", "POST /v1/devices/claims", "asked"),
        ("operator", "POST /v1/devices/claims", "done"),
    ]
    assert shown[1]["subject"] == "logged-1" and shown[1]["address"] == "127.0.0.1" and shown[1]["serial"]
    out = tmp_path / "log.jsonl"
    edgectl("--data", str(up.data), "audit", "export", "--out", str(out))
    whole = edgectl.json("audit", "verify", str(out))
    assert whole["problem"] == "" and whole["lines"] >= 2
    assert edgectl.json("--data", str(up.data), "audit", "verify", "--expect", whole["hash"])["problem"] == ""
    lines = out.read_text().splitlines()
    out.write_text("\n".join(lines).replace("logged-1", "logged-2"))
    with pytest.raises(TrustError, match="was changed"):
        edgectl("audit", "verify", str(out))
    owner = (up.data / "operator.token").read_text().strip()
    assert owner not in "\n".join(lines) and "edgesplit_" not in "\n".join(lines)


def test_the_owners_token_in_the_data_folder_is_accepted(tmp_path: Path) -> None:
    """A token from before there were operators goes on working; without the file there is a new one, and the old one
    is void; a further process changes nothing."""
    database = Database(f"sqlite:///{tmp_path / 'controller.db'}")
    certificates = OwnCertificates(Authority(tmp_path / "keys"))
    file = tmp_path / "operator.token"
    file.write_text("an-old-token-of-another-form\n")
    gate, believed = open_authenticator(tmp_path, database, certificates)
    serial = x509.load_pem_x509_certificate((tmp_path / "keys" / "operator.pem").read_bytes()).serial_number
    assert gate.operators.by_token_and_certificate("an-old-token-of-another-form", serial)
    file.unlink()
    gate, _ = open_authenticator(tmp_path, database, certificates)
    further, _ = open_authenticator(tmp_path, database, certificates, first=False)
    for one in (gate, further):
        assert one.operators.by_token_and_certificate(file.read_text().strip(), serial)
        assert not one.operators.by_token_and_certificate("an-old-token-of-another-form", serial)
    assert believed == tmp_path / "keys" / "operators" / "ca.pem" and believed.is_file()
    assert {path.stat().st_mode & 0o777 for path in (file, believed.with_suffix(".key"))} == {0o600}
    database.close()
