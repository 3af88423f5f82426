"""The device's side of MQTT: who is here, what is wanted, what runs, how it goes.

Each connection has a number of its own, on disk before it is used; its last will carries the same number, so the
controller can tell this session's death from an older one's. Callbacks only hand over: no step of an update and no
wait happens on the network's thread.
"""

from __future__ import annotations

import logging
import math
import secrets
import ssl
import threading
from collections.abc import Callable
from time import monotonic, time
from typing import Protocol

import edgesplit
from edgesplit import messages
from edgesplit.errors import LinkError
from edgesplit.messages import Birth, Death, ModelState, Reported
from edgesplit.mqtt import Session
from edgesplit_agent.delivery import ChunkFetcher, MetadataFetcher
from edgesplit_agent.folder import DataFolder, Identity

log = logging.getLogger(__name__)

EVERY_S = 2.0
AT_ONCE_S = 1.0
"""Between telemetry messages when something changed."""
SLACK_S = 0.1
KEEPALIVE_S = 10
GOODBYE_S = 2.0
REPORT_S = 5.0
_CHUNK_PREFIX = messages.chunk_topic("")


class Sample(Protocol):
    """Where telemetry comes from."""

    def __call__(self, session: int, sequence: int, take: bool) -> tuple[messages.Telemetry | None, object]:
        """Telemetry (with `take`, which begins new windows), and what is worth being told early when it changes."""
        ...


class Uplink:
    """One device's MQTT session with everything that goes over it."""

    def __init__(
        self,
        folder: DataFolder,
        identity: Identity,
        address: tuple[str, int],
        tls: ssl.SSLContext,
        *,
        sample: Sample,
        emulated: bool,
        local_url: str,
        certificate: Callable[[], str] = str,
        fetch_bytes_per_s: float = math.inf,
    ) -> None:
        """`certificate` tells the serial number of the certificate that a new connection shows."""
        self._certificate = certificate
        self._start_mark = secrets.token_hex(8)
        self._folder = folder
        self._identity = identity
        self._sample = sample
        self._emulated = emulated
        self._local_url = local_url
        self._started = monotonic()
        self._on_offer: Callable[[bytes], None] = lambda raw: None
        self._on_change: Callable[[bool], None] = lambda online: None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="telemetry", daemon=True)
        self.session_number = 0
        device = identity.device
        self._session = Session(
            address[0],
            address[1],
            device,
            tls,
            on_message=self._received,
            on_connect=self._connected,
            on_disconnect=self._disconnected,
            will=self._will,
            keepalive_s=KEEPALIVE_S,
        )
        self.metadata = MetadataFetcher(self._session, device)
        self.chunks = ChunkFetcher(self._session, device, cap_bytes_per_s=fetch_bytes_per_s)

    def start(self, on_offer: Callable[[bytes], None], on_change: Callable[[bool], None]) -> None:
        """Connect, and stay connected. `on_offer(signed statement)`, `on_change(is online)`."""
        self._on_offer, self._on_change = on_offer, on_change
        device = self._identity.device
        self._session.subscribe([messages.topic(device, "fetched")], qos=0)
        self._session.subscribe([messages.topic(device, "desired")], qos=1)
        self._session.start()
        self._thread.start()

    def stop(self) -> None:
        """Say goodbye in our own words, and go."""
        self._stopping.set()
        if self._session.connected:
            try:
                self._publish("birth", Death(self.session_number), wait_s=GOODBYE_S)
            except LinkError as error:
                log.info("left without a goodbye: %s", error)
        self._session.stop()

    def renew(self) -> None:
        """Connect anew, for our certificate has changed."""
        self._session.reconnect()

    @property
    def connected(self) -> bool:
        """The broker is there."""
        return self._session.connected

    @property
    def problem(self) -> str:
        """Why it is not."""
        return self._session.problem

    def report(
        self,
        counter: int,
        models: tuple[ModelState, ...],
        safe_mode: str = "",
        trouble: str = "",
        kept: tuple[ModelState, ...] = (),
    ) -> None:
        """Tell what runs, and what is kept for others; LinkError unless the broker has it."""
        said = Reported(self.session_number, counter, models, safe_mode, trouble, kept)
        self._publish("reported", said, wait_s=REPORT_S)

    def _publish(self, kind: messages.Kind, message: messages.Message, wait_s: float | None) -> None:
        topic = messages.topic(self._identity.device, kind)
        self._session.publish(topic, messages.encode(message), qos=1, retain=True, wait_s=wait_s)

    def _will(self) -> tuple[str, bytes, bool]:
        """Asked before each connection, which so gets its number."""
        self.session_number = self._folder.next_session(time())
        return messages.topic(self._identity.device, "birth"), messages.encode(Death(self.session_number)), True

    def _connected(self) -> None:
        birth = Birth(
            session=self.session_number,
            boot_s=monotonic() - self._started,
            version=edgesplit.__version__,
            device_class=self._identity.device_class,
            emulated=self._emulated,
            local_url=self._local_url,
            start=self._start_mark,
            certificate=self._certificate(),
        )
        self._publish("birth", birth, wait_s=None)
        log.info("connected to the broker, session %d", self.session_number)
        self._on_change(True)

    def _disconnected(self) -> None:
        self._on_change(False)

    def _received(self, topic: str, payload: bytes, correlation: bytes | None) -> None:
        if topic.startswith(_CHUNK_PREFIX):
            self.chunks.received(topic[len(_CHUNK_PREFIX) :], payload)
        elif topic == messages.topic(self._identity.device, "fetched"):
            self.metadata.received(payload, correlation)
        elif topic == messages.topic(self._identity.device, "desired") and payload:
            self._on_offer(payload)  # an empty one is unsigned and says nothing: what runs stays

    def _tell(self) -> None:
        """Telemetry, every so often and soon after a change, for as long as we live."""
        sequence, last_sent = 0, monotonic()
        last_seen: object = None
        while not self._stopping.wait(AT_ONCE_S):
            try:
                _, worth = self._sample(self.session_number, sequence, take=False)
                if not self._session.connected or (worth == last_seen and monotonic() - last_sent < EVERY_S - SLACK_S):
                    continue
                message, worth = self._sample(self.session_number, sequence, take=True)
                if message is not None:
                    self._session.publish(messages.topic(self._identity.device, "telemetry"), messages.encode(message))
                sequence, last_sent, last_seen = sequence + 1, monotonic(), worth
            except Exception:
                log.exception("no telemetry this time")
