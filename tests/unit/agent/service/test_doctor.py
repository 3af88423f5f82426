"""`edgesplit-agent doctor`: each fault of a device is found, named, and comes with what to do."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from edgesplit.observability.doctor_findings import Finding, exit_code, format_findings
from edgesplit.trust import identity
from edgesplit.trust.identity import Claim, Credentials, encode_document
from edgesplit_agent.service.doctor import examine
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_controller.pki.authority import Authority
from support.agent_engine import folder_bytes
from support.signed_repository import DEVICE, TrustHarness

NOW = 1_800_000_000.0
"""A day within the life of no certificate made today: tests that need one say so."""


class Server:
    """A TLS server that answers HTTP, or waits to be spoken to, as a broker does."""

    def __init__(self, tls: ssl.SSLContext, *, waits: bool = False, date: float | None = None) -> None:
        self._tls, self._waits, self._date = tls, waits, date
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                with contextlib.suppress(OSError), self._tls.wrap_socket(connection, server_side=True) as secured:
                    head = secured.recv(4096)
                    if head and not self._waits:
                        said = formatdate(self._date, usegmt=True)
                        secured.sendall(f"HTTP/1.1 200 OK\r\nDate: {said}\r\nContent-Length: 0\r\n\r\n".encode())

    def stop(self) -> None:
        """From now on nobody is let in: a thread that waits in accept keeps a socket alive that is only closed."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


class Device:
    """An enrolled device, and the three servers that it goes to."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "ca")
        self.tls = self.authority.issue_server("server", ["127.0.0.1"])
        self.folder = DataFolder(folder / "data")
        self.folder.path.mkdir(mode=0o700)
        self.servers = {
            "controller": Server(self.tls.server_context(client_required=False)),
            "broker": Server(self.tls.server_context(), waits=True),
            "offload": Server(self.tls.server_context()),
        }
        self.enrol()

    def enrol(self, authority: Authority | None = None) -> None:
        key = identity.load_or_make_key(self.folder.key_file)
        signed = (authority or self.authority).sign_request(identity.certificate_request(key, DEVICE), DEVICE)
        self.folder.certificate_file.write_bytes(signed)
        self.folder.ca_file.write_text(self.authority.ca_pem)
        at = {name: f"127.0.0.1:{server.port}" for name, server in self.servers.items()}
        self.folder.write_identity(
            Identity(
                device=DEVICE, device_class="generic-x86", broker=at["broker"], offload=f"https://{at['offload']}",
                controller=f"https://{at['controller']}", tuf_root="{}",
            )
        )  # fmt: skip

    def found(self, *, online: bool = True, now: float | None = None, sysfs: Path = Path("/nowhere")) -> list[Finding]:
        return examine(self.folder.path, online=online, now=now, sysfs=sysfs)

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    made = Device(tmp_path)
    yield made
    made.stop()


def of(found: list[Finding], name: str) -> Finding:
    """The finding of that name."""
    return next(finding for finding in found if finding.name == name)


def test_healthy_device_has_no_findings(device: Device) -> None:
    """No finding is bad, and good ones give their figures."""
    found = device.found()
    assert exit_code(found) == 0, format_findings(found, as_json=False)
    for name in ("folder", "identity", "trust", "controller", "clock", "broker", "offload", "disk", "runtimes"):
        assert of(found, name).level == "good", of(found, name)
    assert DEVICE in of(found, "identity").said


def test_each_bad_finding_has_advice(device: Device) -> None:
    """On its own line as text, and in JSON; text from others cannot send terminal control codes."""
    device.servers["broker"].stop()
    found = device.found()
    assert all(finding.todo for finding in found if finding.level != "good")
    told = json.loads(format_findings(found, as_json=True))
    assert told["healthy"] is False and exit_code(found) == 1
    assert "-> is it running" in format_findings(found, as_json=False)
    assert "\x1b" not in format_findings([Finding("a", "bad", "\x1b[2J", "\x1b")], as_json=False)


def test_unreachable_server_and_unknown_name_are_told_apart(device: Device) -> None:
    """Each step of the connection is reported by itself."""
    device.servers["offload"].stop()
    assert "no connection to 127.0.0.1" in of(device.found(), "offload").said
    known = device.folder.read_identity()
    assert known is not None
    there = Identity(**{**{name: getattr(known, name) for name in known.__struct_fields__}, "broker": "no.invalid:1"})
    device.folder.write_identity(there)
    assert "the name no.invalid cannot be resolved" in of(device.found(), "broker").said


def test_server_of_another_authority_is_reported(device: Device, tmp_path: Path) -> None:
    """The device does not accept it either."""
    stranger = Authority(tmp_path / "strangers").issue_server("server", ["127.0.0.1"])
    device.servers["controller"].stop()
    device.servers["controller"] = Server(stranger.server_context(client_required=False))
    device.enrol()
    assert "is not trusted" in of(device.found(), "controller").said


def test_refused_device_certificate_is_reported(device: Device, tmp_path: Path) -> None:
    """A broker refuses a certificate after the handshake; the doctor reads on for that."""
    device.enrol(Authority(tmp_path / "former"))
    found = of(device.found(), "broker")
    assert found.level == "bad" and "revoked" in found.todo


def test_wrong_clock_is_detected(device: Device) -> None:
    """By the controller's time and by the device certificate: ahead, behind, and before the certificate was made."""
    device.servers["controller"].stop()
    device.servers["controller"] = Server(device.tls.server_context(client_required=False), date=NOW)
    device.enrol()
    assert "behind the controller's" in of(device.found(), "clock").said
    assert "before the certificate was issued" in of(device.found(online=False, now=1e9), "clock").said


def test_expiring_and_expired_certificates_are_reported(device: Device) -> None:
    """The agent renews its certificate itself, so an overdue renewal is reported; the authority's end is reported in
    good time."""
    used = device.found(online=False)
    assert of(used, "identity").level == "good"
    year = 365 * 86_400.0
    start = os.stat(device.folder.certificate_file).st_mtime
    assert "overdue" in of(device.found(online=False, now=start + 0.8 * year), "identity").said
    assert "has expired" in of(device.found(online=False, now=start + 1.2 * year), "identity").todo
    assert of(device.found(online=False, now=start + 40 * year), "authority").level == "bad"


def test_loose_file_permissions_and_foreign_owner_are_reported(device: Device) -> None:
    """With the command that repairs it."""
    device.folder.key_file.chmod(0o644)
    assert of(device.found(online=False), "folder").todo == f"chmod 600 {device.folder.key_file}"
    device.folder.key_file.chmod(0o600)
    device.folder.path.chmod(0o755)
    assert of(device.found(online=False), "folder").todo == f"chmod 700 {device.folder.path}"
    if os.geteuid() == 0:
        (device.folder.path / "stray").write_text("")
        os.chown(device.folder.path / "stray", 12345, 12345)
        assert "is not root's" in of(device.found(online=False), "owner").said


def test_a_folder_that_the_agent_made_passable_was_complained_of(device: Device) -> None:
    """0711 is what `--socket-mode 660` makes of it: others reach the socket and list nothing."""
    device.folder.make_private(passable=True)
    assert device.folder.path.stat().st_mode & 0o777 == 0o711
    assert of(device.found(online=False), "folder").level == "good"


def test_claim_of_an_unenrolled_device_is_judged(tmp_path: Path) -> None:
    """Missing, corrupt, expired, or valid and waiting for a network."""
    data = tmp_path / "data"
    assert "there is no" in of(examine(data, online=False), "folder").said
    data.mkdir(mode=0o700)
    assert "there is no claim" in of(examine(data, online=False), "identity").said
    (data / "claim.json").write_text("{")
    assert "is invalid" in of(examine(data, online=False), "identity").said
    claim = Claim(
        device=DEVICE, device_class="generic-x86", token="t", controller_url="https://no.invalid", ca_pem="",
        tuf_root="{}", expires=int(NOW),
    )  # fmt: skip
    (data / "claim.json").write_bytes(encode_document(claim))
    assert "expired on 2027-01-15" in of(examine(data, online=False, now=NOW + 1), "identity").said
    waiting = examine(data, now=NOW - 1)
    assert of(waiting, "identity").level == "warning" and "cannot be resolved" in of(waiting, "controller").said


def test_broken_trust_metadata_is_reported(device: Device, tmp_path: Path) -> None:
    """Verified as the agent does; valid metadata is good until its first expiry."""
    world = TrustHarness(tmp_path / "world")
    world.add()
    root = world.bootstrap.decode()
    known = device.folder.read_identity()
    assert known is not None
    device.folder.write_identity(
        Identity(**{**{name: getattr(known, name) for name in known.__struct_fields__}, "tuf_root": root})
    )
    world.folder = device.folder.path
    world.store("trust").refresh(world.fetch)
    assert of(device.found(online=False, now=world.now), "trust").said.startswith("root 1, releases")
    assert "expired on" in of(device.found(online=False, now=world.now + 1e10), "trust").said
    for file in (device.folder.trust).rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-40])
    assert of(device.found(online=False), "trust").level == "bad"


@pytest.mark.parametrize(
    ("bits", "level"), [("0", "good"), ("50000", "warning"), ("50005", "bad")], ids=["never", "once", "now"]
)
def test_under_voltage_is_read_from_the_firmware(device: Device, tmp_path: Path, bits: str, level: str) -> None:
    """A weak supply is the commonest fault of a Raspberry Pi."""
    file = tmp_path / "sys" / "devices/platform/soc/soc:firmware/get_throttled"
    file.parent.mkdir(parents=True)
    file.write_text(bits)
    assert of(device.found(online=False, sysfs=tmp_path / "sys"), "power").level == level


def test_hanging_agent_is_reported(device: Device) -> None:
    """No agent, one that starts, one that answers, one that does not."""
    assert "no agent runs" in of(device.found(online=False), "agent").said
    with (device.folder.path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "does not serve yet" in of(device.found(online=False), "agent").said

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told = {"models": [{"version": "digits@1"}], "broker": {"connected": False, "problem": "refused"}}
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(told).encode())

            def log_message(self, format: str, *arguments: object) -> None:
                """Nothing."""

        server = HTTPServer(("127.0.0.1", 0), Answers)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = {"device": DEVICE, "url": f"http://127.0.0.1:{server.server_address[1]}", "pid": 1, "emulated": False}
        (device.folder.path / "agent.json").write_text(json.dumps(here))
        found = device.found(online=False)
        assert "serves digits@1" in of(found, "agent").said and "refused" in of(found, "session").said
        server.shutdown()
        server.server_close()
        assert of(device.found(online=False), "agent").level == "bad"


def test_doctor_changes_nothing(device: Device, tmp_path: Path) -> None:
    """Not even a corrupt file: the agent moves it aside, or an operator looks at it."""
    for name in ("identity/enrolled.json", "agent.json", "current.json", "trust/proof.json", "trust/counters.json"):
        (device.folder.path / name).parent.mkdir(exist_ok=True)
        (device.folder.path / name).write_text("{spoilt")
    (device.folder.path / "lock").write_text("")
    before = folder_bytes(device.folder.path)
    assert of(device.found(online=False), "identity").level == "good"  # there is a copy
    assert folder_bytes(device.folder.path) == before
    for name in ("certificate.pem", "ca.pem"):
        (device.folder.identity / name).write_text("spoilt")
    assert exit_code(device.found(online=False)) == 1


def test_mismatched_credentials_are_reported(device: Device) -> None:
    """As after an incomplete copy of a card."""
    device.folder.key_file.unlink()
    identity.load_or_make_key(device.folder.key_file)
    assert of(device.found(online=False), "key").level == "bad"
    assert Credentials(device.folder.key_file, device.folder.certificate_file, device.folder.ca_file)
