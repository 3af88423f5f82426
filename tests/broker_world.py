"""A real mosquitto with an authority of its own, and sessions that keep what they hear, for tests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgesplit import identity
from edgesplit.identity import Credentials
from edgesplit.mqtt import Session
from edgesplit_controller.broker import Broker
from edgesplit_controller.ca import Authority

PATIENCE_S = 20.0


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


class BrokerWorld:
    """One broker and everybody who may talk to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder / "ca")
        self.broker = Broker(folder / "broker", self.server, 0)
        self._listeners: list[Listener] = []

    @property
    def server(self) -> Credentials:
        return self.authority.issue_server("broker", ["localhost", "127.0.0.1"])

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
