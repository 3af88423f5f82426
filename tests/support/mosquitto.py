"""A real mosquitto with an authority of its own, and sessions that keep what they hear, for tests."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgesplit.mqtt.session import Session
from edgesplit.process.lifecycle import die_with_starting_thread
from edgesplit.trust import identity
from edgesplit.trust.identity import Credentials
from edgesplit_controller.messaging.broker import Broker, _find_program
from edgesplit_controller.messaging.broker_config import write_broker_files
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.settings import find_free_port, listen_problem

PATIENCE_S = 20.0
HOSTS = ("localhost", "127.0.0.1")


def enrol(authority: Authority, folder: Path, name: str) -> Credentials:
    """A device's credentials of that authority."""
    folder.mkdir(parents=True, exist_ok=True)
    key = identity.load_or_make_key(folder / f"{name}.key")
    (folder / f"{name}.pem").write_bytes(authority.sign_request(identity.certificate_request(key, name), name))
    return Credentials(folder / f"{name}.key", folder / f"{name}.pem", authority.certificate_file)


class Listener:
    """A session that keeps what it hears, and counts its connections."""

    def __init__(self, port: int, name: str, credentials: Credentials, *topics: str, **options: Any) -> None:
        self.heard: queue.Queue[tuple[str, bytes, bytes | None]] = queue.Queue()
        self.connections = threading.Semaphore(0)
        self.losses = threading.Semaphore(0)
        self.session = Session(
            "localhost", port, name, credentials.client_context(),
            on_message=lambda *message: self.heard.put(message),
            on_connect=self.connections.release,
            on_disconnect=self.losses.release,
            **options,
        )  # fmt: skip
        self._subscribed = threading.Semaphore(0)
        self.session._client.on_subscribe = lambda *_: self._subscribed.release()
        self._topics = topics
        self.session.subscribe(topics)

    def start(self) -> Listener:
        self.session.start()
        self.wait_connected()
        return self

    def wait_connected(self) -> None:
        """Until the next connection is made and its subscriptions are acknowledged."""
        assert self.connections.acquire(timeout=PATIENCE_S), self.session.problem
        if self._topics:
            assert self._subscribed.acquire(timeout=PATIENCE_S)

    def next(self) -> tuple[str, bytes, bytes | None]:
        return self.heard.get(timeout=PATIENCE_S)

    def heard_before(self, marker: str) -> list[tuple[str, bytes]]:
        """Everything heard until a message on the topic `marker` arrived: an order that needs no waiting time."""
        found = []
        while (message := self.next())[0] != marker:
            found.append(message[:2])
        return found


class ExternalMosquitto:
    """A mosquitto that no controller started, from the files that `edgectl up --print-broker-config` writes."""

    def __init__(self, authority: Authority) -> None:
        self.port = find_free_port("127.0.0.1")
        self.folder = Path(tempfile.mkdtemp(prefix="es-mq-", dir="/tmp"))  # mosquitto's user must reach it
        write_broker_files("mosquitto", self.folder, authority, authority.revocation_list([]), HOSTS, self.port)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it as the README says, and wait until it listens."""
        if os.geteuid() == 0:
            for path in (self.folder, *self.folder.iterdir()):
                shutil.chown(path, "mosquitto")
        command = [_find_program(None), "-c", str(self.folder / "mosquitto.conf")]
        self.process = subprocess.Popen(
            command, stderr=(self.folder / "log").open("wb"), preexec_fn=die_with_starting_thread()
        )
        deadline = time.monotonic() + PATIENCE_S
        while not listen_problem("127.0.0.1", self.port):
            assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.02)

    def stop(self) -> None:
        """End it and forget its files."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class BrokerHarness:
    """One broker, ours or one elsewhere, and everybody who may talk to it."""

    def __init__(self, folder: Path, *, elsewhere: bool = False) -> None:
        self.folder = folder
        self.authority = Authority(folder / "ca")
        own = Broker(folder / "broker", self.server, 0)
        self.broker: Any = ExternalMosquitto(self.authority) if elsewhere else own
        self._listeners: list[Listener] = []

    @property
    def server(self) -> Credentials:
        return self.authority.issue_server("broker", HOSTS)

    def device(self, name: str, *topics: str, **options: Any) -> Listener:
        """A connected device that listens to these topics."""
        return self._started(name, enrol(self.authority, self.folder, name), topics, options)

    def controller(self, *topics: str, **options: Any) -> Listener:
        return self._started("controller", self.authority.issue_client("controller"), topics, options)

    def _started(self, name: str, credentials: Credentials, topics: Sequence[str], options: dict[str, Any]) -> Listener:
        listener = Listener(self.broker.port, options.pop("client_id", name), credentials, *topics, **options)
        self._listeners.append(listener)
        return listener.start()

    def hang_up(self) -> None:
        """End every session that this world started."""
        for listener in self._listeners:
            listener.session.stop()
        self._listeners.clear()

    def close(self) -> None:
        self.hang_up()
        self.broker.stop()
