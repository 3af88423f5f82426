"""A device with a valid certificate that does as it likes at the broker: made of paho and of bare sockets, because no
client of ours would do what it does."""

from __future__ import annotations

import json
import queue
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paho.mqtt.client import Client as Paho
from paho.mqtt.client import MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from edgesplit.trust.identity import Credentials, certificate_request, load_or_make_key
from support.edgesplit_processes import Cloud

PATIENCE_S = 60.0
PING_PACKET = b"\xc0\x00"


class HostileDevice:
    """A device that enrolled as it should, and then does as it likes."""

    def __init__(self, cloud: Cloud, name: str) -> None:
        """Claim and enrol a device of this name."""
        self.name = name
        folder = cloud.folder / name
        folder.mkdir()
        claim = folder / "claim.json"
        cloud.edgectl("device", "claim", name, "--profile", "raspberrypi4", "--out", str(claim))
        self.claim = json.loads(claim.read_text())
        csr = certificate_request(load_or_make_key(folder / "key"), name).decode()
        enrolled = cloud.api.post("/v1/enrol", {"token": self.claim["token"], "csr_pem": csr})
        (folder / "pem").write_text(enrolled["certificate_pem"])
        (folder / "ca").write_text(enrolled["ca_pem"])
        self.credentials = Credentials(folder / "key", folder / "pem", folder / "ca")
        self.address = enrolled["broker_host"], int(enrolled["broker_port"])
        self.folder = folder

    @contextmanager
    def client(self, client_id: str = "", *topics: str, will: str = "") -> Iterator[HostileClient]:
        """A connected client of this device."""
        loose = HostileClient(self, client_id or self.name, will)
        loose.start(topics)
        try:
            yield loose
        finally:
            loose.end()

    def socket(self, receive_bytes: int = 0) -> ssl.SSLSocket:
        """A TLS connection to the broker, on which anything can be said; `receive_bytes` is the kernel's buffer for
        what is not read (0: its default)."""
        plain = socket.create_connection(self.address, PATIENCE_S)
        if receive_bytes:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        return self.credentials.client_context().wrap_socket(plain, server_hostname=self.address[0])

    def is_let_in(self) -> bool:
        """Whether the broker answers this device's CONNECT."""
        try:
            with self.socket() as link:
                link.sendall(connect_packet(self.name))
                return link.recv(1) == b"\x20"
        except OSError:
            return False


class HostileClient:
    """A paho client that keeps no rule."""

    def __init__(self, hostile: HostileDevice, client_id: str, will: str) -> None:
        self._hostile = hostile
        self.heard: queue.Queue[tuple[str, bytes]] = queue.Queue()
        self.answers: queue.Queue[tuple[int, int]] = queue.Queue()
        """Message number and reason code of each acknowledged publish."""
        self._ready = threading.Event()
        self.lost = threading.Event()
        self.client = Paho(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=MQTTProtocolVersion.MQTTv5)
        self.client.tls_set_context(hostile.credentials.client_context())
        self.client.on_message = self._on_message
        self.client.on_publish = lambda client, data, mid, reason, properties: self.answers.put((mid, reason.value))
        self.client.on_subscribe = lambda *_: self._ready.set()
        self.client.on_connect = lambda *_: self._ready.set()
        self.client.on_disconnect = lambda *_: self.lost.set()
        if will:
            self.client.will_set(will, b"dead", qos=1, retain=True)

    def _on_message(self, client: Paho, data: object, message: MQTTMessage) -> None:
        self.heard.put((message.topic, bytes(message.payload)))

    def start(self, topics: tuple[str, ...]) -> None:
        self.client.connect(*self._hostile.address, keepalive=30)
        self.client.loop_start()
        assert self._ready.wait(PATIENCE_S)
        for one in topics:
            self.subscribe(one)

    def subscribe(self, *topics: str) -> None:
        """Ask for these and wait for the broker's word."""
        self._ready.clear()
        self.client.subscribe([(one, 1) for one in topics])
        assert self._ready.wait(PATIENCE_S)

    def refused(self, name: str, payload: bytes, retain: bool = False) -> bool:
        """Publish and wait for the answer: was it refused?"""
        number = self.client.publish(name, payload, qos=1, retain=retain).mid
        while (answer := self.answers.get(timeout=PATIENCE_S))[0] != number:
            pass
        return answer[1] >= 0x80

    def heard_before(self, marker: str) -> list[str]:
        """The topics heard before that one: an order that needs no waiting time."""
        found = []
        while (one := self.heard.get(timeout=PATIENCE_S)[0]) != marker:
            found.append(one)
        return found

    def end(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


def connect_packet(name: str, properties: bytes = b"\x00") -> bytes:
    body = b"\x00\x04MQTT\x05\x02\x00\x1e" + properties + _text(name.encode())
    return b"\x10" + _length(len(body)) + body


def _length(count: int) -> bytes:
    """MQTT's variable byte integer."""
    out = bytearray()
    while True:
        count, low = divmod(count, 128)
        out.append(low | (0x80 if count else 0))
        if not count:
            return bytes(out)


def bridge_connect_packet(name: str) -> bytes:
    """CONNECT of MQTT 3.1.1 with the bit by which mosquitto's bridges introduce themselves."""
    body = b"\x00\x04MQTT\x84\x02\x00\x1e" + _text(name.encode())
    return b"\x10" + _length(len(body)) + body


def publish_packet(name: bytes, payload: bytes) -> bytes:
    body = _text(name) + b"\x00" + payload
    return b"\x30" + _length(len(body)) + body


def subscribe_packet(*names: bytes) -> bytes:
    body = b"\x00\x01\x00" + b"".join(_text(name) + b"\x00" for name in names)
    return b"\x82" + _length(len(body)) + body


def _text(raw: bytes) -> bytes:
    return len(raw).to_bytes(2, "big") + raw


def resident_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024
