"""The device's side of MQTT: who is here, what is wanted, what runs, how it goes.

Each connection has a number of its own, on disk before it is used; its last will carries the same number, so the
controller can tell this session's death from an older one's. Callbacks only hand over: no step of an update and no
wait happens on the network's thread.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic, time
from typing import Protocol

import edgesplit
from edgesplit import messages
from edgesplit.errors import LinkError
from edgesplit.messages import Birth, Death, Job, Kept, ModelState, Reported
from edgesplit.mqtt import Session
from edgesplit_agent.delivery import ChunkFetcher, MetadataFetcher
from edgesplit_agent.folder import DataFolder, Identity
from edgesplit_agent.moments import moment
from edgesplit_agent.outbox import Outbox
from edgesplit_agent.ring import Ring

log = logging.getLogger(__name__)

EVERY_S = 2.0
AT_ONCE_S = 1.0
"""Between telemetry messages when something changed."""
OFFLINE_EVERY_S = 60.0
"""Between messages that are kept for later: each stands for all that happened since the one before it."""
OFFLINE_AT_ONCE_S = 10.0
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
        outbox: Outbox | None = None,
        on_job: Callable[[Job], None] = lambda job: None,
    ) -> None:
        """`certificate` tells the serial number of the certificate that a new connection shows. `outbox`: where
        telemetry waits that could not be sent. `on_job` is called on the network's thread."""
        self._certificate = certificate
        self.outbox = outbox or Outbox(Ring(folder.late))
        self._on_job = on_job
        self._reports = 0
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
        self._session.subscribe([messages.topic(device, kind) for kind in ("fetched", "kept")], qos=0)
        self._session.subscribe([messages.topic(device, kind) for kind in ("desired", "job")], qos=1)
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
        self.outbox.lost()
        self.outbox.tend(moment(), monotonic(), at_once=True)

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
        self.outbox.connected(monotonic(), random.random())
        log.info("connected to the broker, session %d", self.session_number)
        self._on_change(True)

    def _disconnected(self) -> None:
        self.outbox.lost()
        self._on_change(False)

    def _received(self, topic: str, payload: bytes, correlation: bytes | None) -> None:
        if topic.startswith(_CHUNK_PREFIX):
            self.chunks.received(topic[len(_CHUNK_PREFIX) :], payload)
        elif topic == messages.topic(self._identity.device, "fetched"):
            self.metadata.received(payload, correlation)
        elif topic == messages.topic(self._identity.device, "desired") and payload:
            self._on_offer(payload)  # an empty one is unsigned and says nothing: what runs stays
        elif topic == messages.topic(self._identity.device, "kept"):
            self.outbox.kept(messages.decode(payload, Kept), monotonic())
        elif topic == messages.topic(self._identity.device, "job"):
            self._on_job(messages.decode(payload, Job))

    def _tell(self) -> None:
        """Telemetry, every so often and soon after a change, for as long as we live; and what is late, as it may go."""
        pulse = _Pulse()
        while not self._stopping.wait(AT_ONCE_S):
            try:
                self._beat(pulse)
                self._send_late()
            except Exception:
                log.exception("no telemetry this time")

    def _beat(self, pulse: _Pulse) -> None:
        session, connected, now = self.session_number, self._session.connected, monotonic()
        if not session:
            return  # it has no number yet that would tell its messages from another start's
        pulse.begin(session)
        _, worth = self._sample(session, pulse.sequence, take=False)
        if not is_due(connected, worth != pulse.last_seen, now - pulse.last_sent):
            return
        message, worth = self._sample(session, pulse.sequence, take=True)
        pulse.sequence, pulse.last_sent, pulse.last_seen = pulse.sequence + 1, now, worth
        if message is None:
            return
        payload, at = messages.encode(message), message.moment or moment()
        if connected and self._session.publish(messages.topic(self._identity.device, "telemetry"), payload):
            self.outbox.sent(message, payload, at, now)
        else:
            self.outbox.unsent(message, payload, at)

    def _send_late(self) -> None:
        at, now = moment(), monotonic()
        self.outbox.tend(at, now)
        if not self._session.connected:
            return
        late = self.outbox.due(at, now, random.random())
        if late is not None:
            self._session.publish(messages.topic(self._identity.device, "late"), messages.encode(late), qos=1)


@dataclass
class _Pulse:
    """Where the telemetry of this agent stands."""

    session: int = 0
    sequence: int = 0
    last_sent: float = -math.inf
    last_seen: object = None

    def begin(self, session: int) -> None:
        """Sequences count within their session."""
        if session != self.session:
            self.session, self.sequence = session, 0


def is_due(connected: bool, changed: bool, since_s: float) -> bool:
    """Whether it is time for telemetry, so long after the last: more seldom where it can only be kept for later."""
    if connected:
        return changed or since_s >= EVERY_S - SLACK_S
    return since_s >= OFFLINE_EVERY_S or (changed and since_s >= OFFLINE_AT_ONCE_S)
