"""A controller process with its real broker, and devices made of the SDK alone, for tests from outside."""

from __future__ import annotations

import copy
import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import msgspec
import numpy as np
import onnx
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from edgesplit.crypto.key_wrapping import sign_encryption_key
from edgesplit.errors import LinkError
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.session import Session
from edgesplit.release.manifest import Statement
from edgesplit.trust.identity import (
    Credentials,
    EnrolmentRequest,
    certificate_request,
    encode_document,
    enrolment_context,
    load_or_make_key,
)
from edgesplit.trust.store import TrustStore

PATIENCE_S = 60.0
RUN = """
import sys
from pathlib import Path
from edgesplit.errors import EdgeError
from edgesplit.process.start_up import imports_not_collected
with imports_not_collected():
    from edgesplit_controller.settings import Settings
    from edgesplit_controller.app.main import run
given = (a.split("=", 1) for a in sys.argv[2:])
ports = dict(api_port=0, mqtt_port=0, offload_port=0, offload=False)
ports |= {k: int(v) if v.isdigit() else v for k, v in given}
try:
    run(Settings(data=Path(sys.argv[1]), **ports), ready=lambda _: print("ready", flush=True))
except EdgeError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(error.exit_code)
"""
T = TypeVar("T")


def eventually(what: str, holds: Callable[[], T | None]) -> T:
    """Poll until `holds` gives something true."""
    until = monotonic() + PATIENCE_S
    tick = threading.Event()
    while monotonic() < until:
        if found := holds():
            return found
        tick.wait(0.03)
    raise AssertionError(f"never came: {what}")


def tiny_model(seed: int = 0) -> bytes:
    """Two convolutions, a pool and a classifier, as an ONNX file."""
    rng = np.random.default_rng(seed)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) * 0.3, name)

    nodes = [
        onnx.helper.make_node("Conv", ["image", "w1"], ["a"], "conv1", kernel_shape=[3, 3], strides=[2, 2]),
        onnx.helper.make_node("Relu", ["a"], ["b"], "relu1"),
        onnx.helper.make_node("Conv", ["b", "w2"], ["c"], "conv2", kernel_shape=[3, 3]),
        onnx.helper.make_node("Relu", ["c"], ["d"], "relu2"),
        onnx.helper.make_node("GlobalAveragePool", ["d"], ["e"], "pool"),
        onnx.helper.make_node("Flatten", ["e"], ["f"], "flatten"),
        onnx.helper.make_node("Gemm", ["f", "w3"], ["scores"], "classify"),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "tiny",
        [onnx.helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [1, 3, 32, 32])],
        [onnx.helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, [1, 10])],
        [weight("w1", 8, 3, 3, 3), weight("w2", 64, 8, 3, 3), weight("w3", 64, 10)],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    raw: bytes = model.SerializeToString()
    return raw


class Up:
    """A controller process on one data folder."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.process: subprocess.Popen[str] | None = None

    def start(self, *ports: str) -> str:
        """Start it, with settings as NAME=VALUE; what it said first."""
        command = [sys.executable, "-c", RUN, str(self.data), *ports]
        log = (self.data.parent / "up.log").open("ab")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it; its status."""
        assert self.process is not None
        self.process.send_signal(how)
        status = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    @property
    def addresses(self) -> dict[str, Any]:
        """Contents of controller.json."""
        found: dict[str, Any] = json.loads((self.data / "controller.json").read_text())
        return found

    def shown(self, name: str) -> Credentials:
        """Credentials in the controller's folder."""
        keys = self.data / "keys"
        return Credentials(keys / f"{name}.key", keys / f"{name}.pem", self.data / "ca.pem")

    def call(
        self, method: str, path: str, body: Any = None, token: str | None = "", as_: Credentials | None = None
    ) -> tuple[int, Any]:
        """One HTTPS call: status and decoded JSON.

        `token` None: without one, and without a certificate but `as_`; empty: the operator's, and its certificate.
        """
        bare = enrolment_context((self.data / "ca.pem").read_text())
        shows = as_ or (self.shown("operator") if token is not None else None)
        context = shows.client_context() if shows else bare
        host, port = self.addresses["api_url"].removeprefix("https://").split(":")
        connection = http.client.HTTPSConnection(host, int(port), timeout=PATIENCE_S, context=context)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        shown = (self.data / "operator.token").read_text().strip() if token == "" else token
        headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {shown}"} if shown else {})
        try:
            connection.request(method, path, raw, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def ok(self, method: str, path: str, body: Any = None) -> Any:
        """The answer of a call that must succeed."""
        status, answer = self.call(method, path, body)
        assert status == 200, answer
        return answer


class Device:
    """A device made of the SDK alone: enrols, connects, fetches over MQTT."""

    def __init__(self, up: Up, claim: dict[str, Any], folder: Path, start: str = "", *, encrypted: bool = True) -> None:
        self.name = claim["device"]
        self.claim = claim
        folder.mkdir(parents=True)
        key = load_or_make_key(folder / "device.key")
        self.csr = certificate_request(key, self.name).decode()
        self.encryption_key = X25519PrivateKey.generate()
        asked = EnrolmentRequest(token=claim["token"], csr_pem=self.csr)
        if encrypted:
            public, signature = sign_encryption_key(self.encryption_key, key, self.csr)
            asked = msgspec.structs.replace(asked, encryption_key=public, encryption_signature=signature)
        status, enrolled = up.call("POST", "/v1/enrol", json.loads(encode_document(asked)), token=None)
        assert status == 200, enrolled
        (folder / "device.pem").write_text(enrolled["certificate_pem"])
        (folder / "ca.pem").write_text(enrolled["ca_pem"])
        self.credentials = Credentials(folder / "device.key", folder / "device.pem", folder / "ca.pem")
        self.address = enrolled["broker_host"], enrolled["broker_port"]
        self.start = start
        self.came: dict[str, queue.Queue[tuple[bytes, bytes | None]]] = {}
        self.number = 1
        self.session = self._make_session()
        self.trust = TrustStore(folder / "trust", claim["tuf_root"].encode())

    def _make_session(self) -> Session:
        session = Session(
            *self.address,
            self.name,
            self.credentials.client_context(),
            on_message=lambda topic, payload, correlation: self._queue(topic).put((payload, correlation)),
            will=(messages.topic(self.name, "birth"), messages.encode(messages.Death(self.number)), True),
        )
        session.subscribe([messages.topic(self.name, kind) for kind in ("desired", "fetch_reply")], qos=1)
        return session

    def again(self, start: str = "") -> Device:
        """The same identity once more: a session of its own."""
        twin = copy.copy(self)
        twin.came, twin.start = {}, start
        twin.session = twin._make_session()
        return twin

    def vanish_on_loss(self) -> None:
        """Stay away once the connection is lost."""
        self.session._callbacks = (*self.session._callbacks[:2], self.session._stopping.set)

    def connect_or_raise(self) -> None:
        """LinkError where the broker refuses the connection: three times, for a handshake may fail for other
        reasons."""
        self.session._stopping.clear()
        self.session.start()
        problems = []
        for _ in range(3):
            if self.session.wait_connected(1.0):
                return
            problems.append(self.session.problem)
        self.session.stop()
        raise LinkError("; ".join(problems))

    def _queue(self, topic: str) -> queue.Queue[tuple[bytes, bytes | None]]:
        return self.came.setdefault(topic, queue.Queue())

    def connect(self) -> None:
        """Connect and say so."""
        self.session.start()
        assert self.session.wait_connected(PATIENCE_S), self.session.problem
        birth = messages.Birth(
            self.number, 0.1, "test", self.claim["device_class"], True, "http://127.0.0.1:1", self.start
        )
        self.say("birth", birth, qos=1, retain=True)

    def say(self, kind: messages.TopicKind, message: messages.Message, *, qos: int = 0, retain: bool = False) -> None:
        self.session.publish(
            messages.topic(self.name, kind), messages.encode(message), qos=qos, retain=retain, wait_s=10
        )

    def next(self, topic: str) -> tuple[bytes, bytes | None]:
        return self._queue(topic).get(timeout=PATIENCE_S)

    def statement(self) -> Statement:
        """The next statement, believed."""
        raw = self.next(messages.topic(self.name, "desired"))[0]
        self.trust.refresh(self.fetch)
        return self.trust.verify_statement(raw, self.name, for_install=True)

    def fetch(self, path: str, max_bytes: int) -> bytes:
        """A metadata file over MQTT."""
        correlation = os.urandom(8)
        topic, wish = messages.topic(self.name, "fetch"), messages.encode(messages.FetchMetadata(path))
        self.session.publish(topic, wish, correlation=correlation, wait_s=10)
        data = b""
        while True:
            raw, answered = self.next(messages.topic(self.name, "fetch_reply"))
            assert answered == correlation
            piece = messages.decode(raw, messages.FetchReply)
            if piece.total < 0:
                raise FileNotFoundError(path)
            assert piece.offset == len(data) and len(piece.data) <= 65_536
            data += piece.data
            if len(data) == piece.total:
                assert len(data) <= max_bytes
                return data

    def chunks(self, release: str, listed: list[str]) -> dict[str, bytes]:
        """All chunks of a release that lists them so, by digest, in windows."""
        found: dict[str, bytes] = {}
        for start in range(0, len(listed), LIMITS.fetch_window_chunks):
            window = listed[start : start + LIMITS.fetch_window_chunks]
            self.session.subscribe([messages.chunk_topic(one) for one in window], qos=0)
            self.say("fetch", messages.FetchChunks.from_indexes(release, range(start, start + len(window))))
            found.update({one: self.next(messages.chunk_topic(one))[0] for one in window})
        return found

    def vanish(self) -> None:
        """Lose the connection without a goodbye, for good."""
        self.session._stopping.set()
        connection = self.session._client.socket()
        assert connection is not None
        connection.shutdown(socket.SHUT_RDWR)


def enrolled(up: Up, name: str, folder: Path, start: str = "", **more: Any) -> Device:
    """A device that was claimed, has enrolled and is connected."""
    claim = up.ok("POST", "/v1/devices/claims", {"device": name, "device_class": "raspberrypi4", **more})
    device = Device(up, claim, folder / name, start)
    device.connect()
    return device
