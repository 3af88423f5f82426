"""The device's MQTT session: announces the device, receives the desired state, reports the actual state, sends
telemetry.

Each connection has a number of its own, which is on disk before it is used; its last will carries the same number, so
that the controller can tell the death of this session from that of an older one. Callbacks of the network's thread only
hand over: no step of an update and no wait happens there.
"""

from __future__ import annotations

import logging
import math
import secrets
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

import edgesplit
from edgesplit.concurrency import THREAD_CONCURRENCY, Concurrency, TaskHandle
from edgesplit.errors import LinkError
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages, remote_inference
from edgesplit.mqtt.messages import Ack, Birth, Death, DeviceJob, ModelState, Reported
from edgesplit.mqtt.session import OnMessage, Session, Will
from edgesplit.terminal_text import shorten
from edgesplit_agent.control.fetcher import ChunkFetcher, MetadataFetcher, chunk_digest
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_agent.telemetry.outbox import Outbox

log = logging.getLogger(__name__)

SLACK_S = 0.1
"""Tolerance of the telemetry interval."""
KEEPALIVE_S = 10
"""MQTT keep-alive."""
GOODBYE_S = 2.0
"""Timeout of the orderly `Death` message."""
REPORT_S = 5.0
"""Timeout of a report's acknowledgement."""
DETAIL_CHARS = (LIMITS.detail_chars, 400, 40)
"""Characters of each reason in a report; the next smaller number where the report would become too long."""
_CHUNK_PREFIX = messages.chunk_topic("")


class SampleTelemetry(Protocol):
    """Samples telemetry."""

    def __call__(self, session: int, sequence: int, take: bool) -> tuple[messages.Telemetry | None, object]:
        """Telemetry (with `take`, which begins new telemetry windows; otherwise None), and a value whose change makes a
        message due early."""
        ...


@dataclass(frozen=True, slots=True)
class TelemetrySchedule:
    """How often telemetry is sent."""

    every_s: float = 2.0
    """Interval, until the controller sets it (`Ack.telemetry_interval_s`)."""
    at_once_s: float = 1.0
    """Least seconds between messages when something changed."""
    offline_every_s: float = 60.0
    """Interval between messages that are stored while the link is lost: each covers everything since the one before it.
    """
    offline_at_once_s: float = 10.0
    """Least seconds between stored messages when something changed."""

    def is_due(self, connected: bool, changed: bool, since_s: float) -> bool:
        """Whether telemetry is due, `since_s` after the last."""
        if connected:
            return changed or since_s >= self.every_s - SLACK_S
        return since_s >= self.offline_every_s or (changed and since_s >= self.offline_at_once_s)


class Connection(Protocol):
    """The part of `edgesplit.mqtt.session.Session` that is needed here."""

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
    """Makes a connection, which is still to be started."""

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
        """The connection; the parameters are those of `edgesplit.mqtt.session.Session`."""
        ...


class Uplink:
    """One device's MQTT session and everything that is sent and received over it."""

    def __init__(
        self,
        folder: DataFolder,
        identity: Identity,
        address: tuple[str, int],
        tls: ssl.SSLContext,
        *,
        sample: SampleTelemetry,
        emulated: bool,
        local_url: str,
        certificate: Callable[[], str] = str,
        fetch_bytes_per_s: float = math.inf,
        simulated: bool = False,
        built_for: str = "",
        schedule: TelemetrySchedule | None = None,
        connect: Connect = Session,
        concurrency: Concurrency = THREAD_CONCURRENCY,
        outbox: Outbox | None = None,
        on_job: Callable[[DeviceJob], None] = lambda job: None,
        on_inference: Callable[[bytes], None] = lambda payload: None,
    ) -> None:
        """`certificate` returns the serial number of the certificate that a new connection presents; `connect` and
        `concurrency` are replaced by a simulation. `outbox` stores telemetry while the link is lost; without one it is
        dropped. `on_job`, and `on_inference` with each message about remote inferences, are called on the network's
        thread."""
        self._outbox = outbox
        self._on_job = on_job
        self._on_inference = on_inference
        self._report_count = 0
        self._certificate = certificate
        self._simulated = simulated
        self._built_for = built_for
        self._schedule = schedule or TelemetrySchedule()
        self._concurrency = concurrency
        self._start_mark = secrets.token_hex(8)
        self._folder = folder
        self._identity = identity
        self._sample = sample
        self._emulated = emulated
        self._local_url = local_url
        self._started = concurrency.monotonic()
        self._on_statement: Callable[[bytes], None] = lambda raw: None
        self._on_connection: Callable[[bool], None] = lambda online: None
        self._stopping = False
        self._changed = concurrency.condition()
        self._telemetry_thread: TaskHandle | None = None
        self.session_number = 0
        device = identity.device
        self._session = connect(
            address[0], address[1], device, tls, on_message=self._on_message, on_connect=self._on_session_connected,
            on_disconnect=self._on_session_disconnected, will=self._will, keepalive_s=KEEPALIVE_S,
        )  # fmt: skip
        self.metadata = MetadataFetcher(self._session, device, concurrency=concurrency)
        self.chunks = ChunkFetcher(self._session, device, cap_bytes_per_s=fetch_bytes_per_s, concurrency=concurrency)

    def start(self, on_statement: Callable[[bytes], None], on_connection: Callable[[bool], None]) -> None:
        """Connect, and stay connected. `on_statement` receives each signed statement, `on_connection` whether the
        broker is connected."""
        self._on_statement, self._on_connection = on_statement, on_connection
        device = self._identity.device
        self._session.subscribe([messages.topic(device, kind) for kind in ("fetch_reply", "ack")], qos=0)
        self._session.subscribe([messages.topic(device, kind) for kind in ("desired", "job", "infer")], qos=1)
        self._session.start()
        self._telemetry_thread = self._concurrency.start(self._telemetry_loop, "telemetry")

    def stop(self) -> None:
        """Publish an orderly `Death`, then disconnect."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._session.connected:
            try:
                self._publish("birth", Death(self.session_number), wait_s=GOODBYE_S)
            except LinkError as error:
                log.info("disconnected without a Death message: %s", error)
        self._session.stop()
        if self._outbox is not None:
            self._outbox.on_disconnected()
            self._outbox.flush(self._concurrency.monotonic(), at_once=True)

    def reconnect(self) -> None:
        """Reconnect, with the certificate that has been renewed."""
        self._session.reconnect()

    @property
    def connected(self) -> bool:
        """Whether the broker is connected."""
        return self._session.connected

    @property
    def problem(self) -> str:
        """Why the broker is not connected; empty where it is."""
        return self._session.problem

    def report(
        self,
        counter: int,
        models: tuple[ModelState, ...],
        safe_mode: str = "",
        trouble: str = "",
        kept: tuple[ModelState, ...] = (),
    ) -> None:
        """Publish the reported state: what runs, and what is stored for other devices. LinkError unless the broker
        acknowledges it."""
        self._report_count += 1
        message = Reported(
            self.session_number, counter, models, safe_mode, trouble, kept, report_number=self._report_count
        )
        self._publish("reported", within_limits(message), wait_s=REPORT_S)

    def answer(self, pieces: Iterable[messages.LogPiece | messages.JobRefused], wait_s: float) -> None:
        """Publish the pieces that answer a job; LinkError where the broker does not acknowledge one within `wait_s`."""
        topic = messages.topic(self._identity.device, "log")
        for piece in pieces:
            self._session.publish(topic, messages.encode(piece), qos=1, wait_s=wait_s)

    def reply_inference(self, process: int, message: remote_inference.Reply, wait_s: float | None) -> None:
        """Publish a message about a remote inference to a controller process. With `wait_s`, LinkError where the broker
        does not acknowledge it in that time."""
        topic = messages.infer_reply_topic(self._identity.device, process)
        self._session.publish(topic, messages.encode(message), qos=1, wait_s=wait_s)

    def _publish(self, kind: messages.TopicKind, message: messages.Message, wait_s: float | None) -> None:
        topic = messages.topic(self._identity.device, kind)
        self._session.publish(topic, messages.encode(message), qos=1, retain=True, wait_s=wait_s)

    def _will(self) -> tuple[str, bytes, bool]:
        """The last will. Called before each connection, which gets its session number here."""
        self.session_number = self._folder.next_session(self._concurrency.time())
        return messages.topic(self._identity.device, "birth"), messages.encode(Death(self.session_number)), True

    def _on_session_connected(self) -> None:
        birth = Birth(
            session=self.session_number, agent_uptime_s=self._concurrency.monotonic() - self._started,
            agent_version=edgesplit.__version__, device_class=self._identity.device_class, emulated=self._emulated,
            local_url=self._local_url, start_id=self._start_mark, certificate_serial=self._certificate(),
            simulated=self._simulated, build_tag=self._built_for,
        )  # fmt: skip
        self._publish("birth", birth, wait_s=None)
        if self._outbox is not None:
            self._outbox.on_connected(self._concurrency.monotonic(), self._concurrency.rng.random())
        log.info("connected to the broker, session %d", self.session_number)
        self._on_connection(True)

    def _on_session_disconnected(self) -> None:
        if self._outbox is not None:
            self._outbox.on_disconnected()
        self._on_connection(False)

    def _on_message(self, topic: str, payload: bytes, correlation: bytes | None) -> None:
        """Dispatch a message by its topic. Called on the network's thread."""
        if topic.startswith(_CHUNK_PREFIX):
            self.chunks.on_message(topic[len(_CHUNK_PREFIX) :], payload)
        elif topic == messages.topic(self._identity.device, "fetch_reply"):
            if sha256 := chunk_digest(correlation):
                self.chunks.on_message(sha256, payload)
            else:
                self.metadata.on_message(payload, correlation)
        elif topic == messages.topic(self._identity.device, "desired") and payload:
            self._on_statement(payload)  # an empty payload (a cleared retained message) is not signed: ignored
        elif topic == messages.topic(self._identity.device, "ack"):
            self._on_ack(messages.decode(payload, Ack))
        elif topic == messages.topic(self._identity.device, "job"):
            self._on_job(messages.decode(payload, DeviceJob))
        elif topic == messages.topic(self._identity.device, "infer"):
            self._on_inference(payload)

    def _on_ack(self, kept: Ack) -> None:
        if kept.telemetry_interval_s is not None:
            self._schedule = replace(self._schedule, every_s=kept.telemetry_interval_s)
        if self._outbox is not None:
            self._outbox.on_ack(kept, self._concurrency.monotonic())

    def _telemetry_loop(self) -> None:
        """Send telemetry periodically and soon after a change, and stored telemetry as the outbox permits, until the
        agent stops."""
        cursor = TelemetryCursor(last_sent=self._concurrency.monotonic())
        while not self._is_stopping_within(self._schedule.at_once_s):
            try:
                self._send_telemetry(cursor)
                if self._outbox is not None:
                    self._send_backlog(self._outbox)
            except Exception:
                log.exception("telemetry could not be sent")

    def _send_telemetry(self, cursor: TelemetryCursor) -> None:
        """Send or store telemetry, if it is due."""
        session, connected, now = self.session_number, self._session.connected, self._concurrency.monotonic()
        if not session or (not connected and self._outbox is None):
            return  # without a session number the message could not be distinguished from another start's
        cursor.use_session(session)
        _, notable = self._sample(session, cursor.sequence, take=False)
        if not self._schedule.is_due(connected, notable != cursor.last_seen, now - cursor.last_sent):
            return
        message, notable = self._sample(session, cursor.sequence, take=True)
        cursor.last_sent, cursor.last_seen = now, notable
        if message is None:
            return
        cursor.sequence += 1
        payload = messages.encode(message)
        sent = connected and self._session.publish(messages.topic(self._identity.device, "telemetry"), payload)
        if self._outbox is not None and sent:
            self._outbox.on_sent(message, payload, now)
        elif self._outbox is not None:
            self._outbox.on_unsent(message, payload)

    def _send_backlog(self, outbox: Outbox) -> None:
        now = self._concurrency.monotonic()
        outbox.flush(now)
        backlog = outbox.next_batch(now, self._concurrency.rng.random()) if self._session.connected else None
        if backlog is not None:
            self._session.publish(messages.topic(self._identity.device, "backlog"), messages.encode(backlog), qos=1)

    def _is_stopping_within(self, seconds: float) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._stopping, seconds))


@dataclass
class TelemetryCursor:
    """Position in the stream of telemetry messages."""

    last_sent: float
    session: int = 0
    sequence: int = 0
    last_seen: object = None

    def use_session(self, session: int) -> None:
        """Restart the sequence numbers where the session is a new one."""
        if session != self.session:
            self.session, self.sequence = session, 0


def within_limits(report: Reported) -> Reported:
    """The report as a controller accepts it: reasons are cut, so that the text of one failure cannot make the whole
    report too long, and models beyond the limits are left out."""
    cut = report
    for detail_chars in DETAIL_CHARS:
        cut = msgspec.structs.replace(
            report,
            models=_with_short_details(report.models[: LIMITS.reported_models], detail_chars),
            gateway_models=_with_short_details(report.gateway_models[: LIMITS.gateway_releases], detail_chars),
            safe_mode=shorten(report.safe_mode, detail_chars),
            statement_problem=shorten(report.statement_problem, detail_chars),
        )
        if len(messages.encode(cut)) <= LIMITS.message_bytes:
            break
    return cut


def _with_short_details(models: Sequence[ModelState], detail_chars: int) -> tuple[ModelState, ...]:
    return tuple(
        msgspec.structs.replace(model, detail=shorten(model.detail, detail_chars))
        if len(model.detail) > detail_chars
        else model
        for model in models
    )
