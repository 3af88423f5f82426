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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import edgesplit
from edgesplit.concurrency import THREADS, Pace, Running
from edgesplit.errors import LinkError
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import Birth, Death, Job, Kept, ModelState, Reported
from edgesplit.mqtt.session import OnMessage, Session, Will
from edgesplit_agent.control.fetcher import ChunkFetcher, MetadataFetcher, own_chunk
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_agent.telemetry.outbox import Outbox

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
    """Until the controller says how often it wants some (`Kept.every_s`)."""
    at_once_s: float = 1.0
    """Between messages when something changed."""
    offline_every_s: float = 60.0
    """Between messages that are kept for later: each stands for all that happened since the one before it."""
    offline_at_once_s: float = 10.0

    def is_due(self, connected: bool, changed: bool, since_s: float) -> bool:
        """Whether it is time for telemetry, so long after the last."""
        if connected:
            return changed or since_s >= self.every_s - SLACK_S
        return since_s >= self.offline_every_s or (changed and since_s >= self.offline_at_once_s)


class Connection(Protocol):
    """What is needed of `edgesplit.mqtt.session.Session`, whose words these are."""

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
        """As `edgesplit.mqtt.session.Session` does."""
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
        built_for: str = "",
        rhythm: Rhythm | None = None,
        connect: Connect = Session,
        pace: Pace = THREADS,
        outbox: Outbox | None = None,
        on_job: Callable[[Job], None] = lambda job: None,
    ) -> None:
        """`certificate` tells the serial number of the certificate that a new connection shows; `connect` and `pace`
        are a simulation's own. `outbox` keeps telemetry while the link is gone; without one it is lost. `on_job` is
        called on the network's thread."""
        self._outbox = outbox
        self._on_job = on_job
        self._reports = 0
        self._certificate = certificate
        self._simulated = simulated
        self._built_for = built_for
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
        self._session.subscribe([messages.topic(device, kind) for kind in ("fetched", "kept")], qos=0)
        self._session.subscribe([messages.topic(device, kind) for kind in ("desired", "job")], qos=1)
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
        if self._outbox is not None:
            self._outbox.lost()
            self._outbox.tend(self._pace.monotonic(), at_once=True)

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
        self._reports += 1
        said = Reported(self.session_number, counter, models, safe_mode, trouble, kept, number=self._reports)
        self._publish("reported", said, wait_s=REPORT_S)

    def answer(self, pieces: Iterable[messages.BundlePiece | messages.JobRefused], wait_s: float) -> None:
        """Answer a job, piece by piece; LinkError where the broker does not take one in time."""
        topic = messages.topic(self._identity.device, "bundle")
        for piece in pieces:
            self._session.publish(topic, messages.encode(piece), qos=1, wait_s=wait_s)

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
            built_for=self._built_for,
        )
        self._publish("birth", birth, wait_s=None)
        if self._outbox is not None:
            self._outbox.connected(self._pace.monotonic(), self._pace.dice.random())
        log.info("connected to the broker, session %d", self.session_number)
        self._on_change(True)

    def _disconnected(self) -> None:
        if self._outbox is not None:
            self._outbox.lost()
        self._on_change(False)

    def _received(self, topic: str, payload: bytes, correlation: bytes | None) -> None:
        if topic.startswith(_CHUNK_PREFIX):
            self.chunks.received(topic[len(_CHUNK_PREFIX) :], payload)
        elif topic == messages.topic(self._identity.device, "fetched"):
            if sha256 := own_chunk(correlation):
                self.chunks.received(sha256, payload)
            else:
                self.metadata.received(payload, correlation)
        elif topic == messages.topic(self._identity.device, "desired") and payload:
            self._on_offer(payload)  # an empty one is unsigned and says nothing: what runs stays
        elif topic == messages.topic(self._identity.device, "kept"):
            self._kept(messages.decode(payload, Kept))
        elif topic == messages.topic(self._identity.device, "job"):
            self._on_job(messages.decode(payload, Job))

    def _kept(self, kept: Kept) -> None:
        if kept.every_s is not None:
            self._rhythm = replace(self._rhythm, every_s=kept.every_s)
        if self._outbox is not None:
            self._outbox.kept(kept, self._pace.monotonic())

    def _tell(self) -> None:
        """Telemetry, every so often and soon after a change, for as long as we live; and what is late, as it may go."""
        pulse = _Pulse(last_sent=self._pace.monotonic())
        while not self._stops_within(self._rhythm.at_once_s):
            try:
                self._beat(pulse)
                if self._outbox is not None:
                    self._send_late(self._outbox)
            except Exception:
                log.exception("no telemetry this time")

    def _beat(self, pulse: _Pulse) -> None:
        session, connected, now = self.session_number, self._session.connected, self._pace.monotonic()
        if not session or (not connected and self._outbox is None):
            return  # without a number it could not be told from another start's
        pulse.begin(session)
        _, worth = self._sample(session, pulse.sequence, take=False)
        if not self._rhythm.is_due(connected, worth != pulse.last_seen, now - pulse.last_sent):
            return
        message, worth = self._sample(session, pulse.sequence, take=True)
        pulse.last_sent, pulse.last_seen = now, worth
        if message is None:
            return
        pulse.sequence += 1
        payload = messages.encode(message)
        sent = connected and self._session.publish(messages.topic(self._identity.device, "telemetry"), payload)
        if self._outbox is not None and sent:
            self._outbox.sent(message, payload, now)
        elif self._outbox is not None:
            self._outbox.unsent(message, payload)

    def _send_late(self, outbox: Outbox) -> None:
        now = self._pace.monotonic()
        outbox.tend(now)
        late = outbox.due(now, self._pace.dice.random()) if self._session.connected else None
        if late is not None:
            self._session.publish(messages.topic(self._identity.device, "late"), messages.encode(late), qos=1)

    def _stops_within(self, seconds: float) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._stopping, seconds))


@dataclass
class _Pulse:
    """Where the telemetry of this agent stands."""

    last_sent: float
    session: int = 0
    sequence: int = 0
    last_seen: object = None

    def begin(self, session: int) -> None:
        """Sequences count within their session."""
        if session != self.session:
            self.session, self.sequence = session, 0
