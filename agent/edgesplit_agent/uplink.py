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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import edgesplit
from edgesplit import messages
from edgesplit.errors import LinkError
from edgesplit.messages import Birth, Death, ModelState, Reported
from edgesplit.mqtt import OnMessage, Session, Will
from edgesplit.pace import THREADS, Pace, Running
from edgesplit_agent.delivery import ChunkFetcher, MetadataFetcher
from edgesplit_agent.folder import DataFolder, Identity

log = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often telemetry is sent."""

    every_s: float = 2.0
    at_once_s: float = 1.0
    """Between messages when something changed."""


class Connection(Protocol):
    """What is needed of `edgesplit.mqtt.Session`, whose words these are."""

    problem: str

    @property
    def connected(self) -> bool: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def reconnect(self) -> None: ...
    def publish(
        self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False, correlation: bytes | None = None,
        wait_s: float | None = None,
    ) -> bool: ...  # fmt: skip
    def subscribe(self, topics: Sequence[str], qos: int = 1) -> None: ...
    def unsubscribe(self, topics: Sequence[str]) -> None: ...


class Connect(Protocol):
    """Makes a connection that is still to be started."""

    def __call__(
        self,
        host: str,
        port: int,
        client_id: str,
        tls: ssl.SSLContext,
        /,
        *,
        on_message: OnMessage,
        on_connect: Callable[[], None],
        on_disconnect: Callable[[], None],
        will: Callable[[], Will],
        keepalive_s: int,
    ) -> Connection:
        """As `edgesplit.mqtt.Session` does."""
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
        simulated: bool = False,
        rhythm: Rhythm | None = None,
        connect: Connect = Session,
        pace: Pace = THREADS,
    ) -> None:
        """`certificate` tells the serial number of the certificate that a new connection shows; `connect` and `pace`
        are a simulation's own."""
        self._certificate = certificate
        self._simulated = simulated
        self._rhythm = rhythm or Rhythm()
        self._pace = pace
        self._start_mark = secrets.token_hex(8)
        self._folder = folder
        self._identity = identity
        self._sample = sample
        self._emulated = emulated
        self._local_url = local_url
        self._started = pace.monotonic()
        self._on_offer: Callable[[bytes], None] = lambda raw: None
        self._on_change: Callable[[bool], None] = lambda online: None
        self._stopping = False
        self._changed = pace.condition()
        self._telling: Running | None = None
        self.session_number = 0
        device = identity.device
        self._session = connect(
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
        self.metadata = MetadataFetcher(self._session, device, pace=pace)
        self.chunks = ChunkFetcher(self._session, device, cap_bytes_per_s=fetch_bytes_per_s, pace=pace)

    def start(self, on_offer: Callable[[bytes], None], on_change: Callable[[bool], None]) -> None:
        """Connect, and stay connected. `on_offer(signed statement)`, `on_change(is online)`."""
        self._on_offer, self._on_change = on_offer, on_change
        device = self._identity.device
        self._session.subscribe([messages.topic(device, "fetched")], qos=0)
        self._session.subscribe([messages.topic(device, "desired")], qos=1)
        self._session.start()
        self._telling = self._pace.start(self._tell, "telemetry")

    def stop(self) -> None:
        """Say goodbye in our own words, and go."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
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
        self.session_number = self._folder.next_session(self._pace.time())
        return messages.topic(self._identity.device, "birth"), messages.encode(Death(self.session_number)), True

    def _connected(self) -> None:
        birth = Birth(
            session=self.session_number,
            boot_s=self._pace.monotonic() - self._started,
            version=edgesplit.__version__,
            device_class=self._identity.device_class,
            emulated=self._emulated,
            local_url=self._local_url,
            start=self._start_mark,
            certificate=self._certificate(),
            simulated=self._simulated,
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
        sequence, last_sent = 0, self._pace.monotonic()
        last_seen: object = None
        every_s = self._rhythm.every_s - SLACK_S
        while not self._stops_within(self._rhythm.at_once_s):
            try:
                _, worth = self._sample(self.session_number, sequence, take=False)
                now = self._pace.monotonic()
                if not self._session.connected or (worth == last_seen and now - last_sent < every_s):
                    continue
                message, worth = self._sample(self.session_number, sequence, take=True)
                if message is not None:
                    self._session.publish(messages.topic(self._identity.device, "telemetry"), messages.encode(message))
                sequence, last_sent, last_seen = sequence + 1, now, worth
            except Exception:
                log.exception("no telemetry this time")

    def _stops_within(self, seconds: float) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._stopping, seconds))
