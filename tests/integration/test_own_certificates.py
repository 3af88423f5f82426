"""The certificates of a controller that runs for years, with its real broker, offload server and API."""

from __future__ import annotations

import queue
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from edgesplit.controller_client.client import ControllerClient
from edgesplit.trust.identity import Credentials
from edgesplit_controller.app import housekeeping
from edgesplit_controller.app.main import run
from edgesplit_controller.caller import OWNER
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.settings import Settings
from support.edgesplit_processes import eventually
from support.mosquitto import Listener, enrol

SERVERS = ("broker", "api", "offload")


def presented(port: int, shown: Credentials) -> int:
    """Serial number of the certificate that a server presents in a new connection."""
    with socket.create_connection(("127.0.0.1", port), 20) as link:
        tls = shown.client_context().wrap_socket(link, server_hostname="127.0.0.1")
        return x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"").serial_number


def in_file(keys: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((keys / f"{name}.pem").read_bytes())


def test_a_broker_that_ran_for_335_days_got_no_new_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All certificates of a running controller come near their end: broker, API and offload server present new ones,
    no session of a device is lost, and the owner's programs go on, those that began before it too."""
    monkeypatch.setattr(housekeeping, "RENEWAL_INTERVAL_S", 0.1)
    stop, started, keys = threading.Event(), queue.Queue[dict[str, Any]](), tmp_path / "cloud" / "keys"
    settings = Settings(data=tmp_path / "cloud", api_port=0, mqtt_port=0, offload_port=0)
    thread = threading.Thread(target=run, args=(settings, started.put), kwargs={"stop": stop})
    thread.start()
    try:
        addresses = started.get(timeout=60)
        device = enrol(Authority(keys), tmp_path, "cam-1")
        listener = Listener(addresses["mqtt_port"], "cam-1", device, "edgesplit/v1/cam-1/desired").start()
        api_port = int(addresses["api_url"].rpartition(":")[2])
        ports = dict(zip(SERVERS, (addresses["mqtt_port"], api_port, addresses["offload_port"]), strict=True))
        earlier = ControllerClient.connect(tmp_path / "cloud")
        assert earlier.get("/v1/devices") == []
        before = {name: in_file(keys, name) for name in (*SERVERS, "controller", OWNER)}
        assert {name: presented(ports[name], device) for name in SERVERS} == {
            name: before[name].serial_number for name in SERVERS
        }

        ending = Authority(keys, leaf_life=timedelta(hours=6))
        for name, certificate in before.items():
            (keys / f"{name}.pem").unlink()
            if name in SERVERS:
                hosts = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
                ending.issue_server(name, [str(host.value) for host in hosts], for_browsers=name == "api")
            else:
                ending.issue_client(name)

        def is_renewed(name: str) -> bool:
            found = in_file(keys, name)
            life = found.not_valid_after_utc - found.not_valid_before_utc
            return found.serial_number != before[name].serial_number and life > timedelta(days=365)

        eventually("new certificates", lambda: all(map(is_renewed, before)))
        for name in SERVERS:
            expected = in_file(keys, name).serial_number
            eventually(f"{name} presents it", lambda n=name, e=expected: presented(ports[n], device) == e)
        eventually("the owner's new certificate is accepted", lambda: accepts_owner(tmp_path / "cloud"))
        assert earlier.get("/v1/devices") == []
        assert not listener.losses.acquire(blocking=False) and listener.session.connected
        listener.session.stop()
    finally:
        stop.set()
        thread.join(30)


def accepts_owner(data: Path) -> bool:
    """Whether the API accepts the owner's certificate that is in the data folder now."""
    return ControllerClient.connect(data).get("/v1/devices") == []
