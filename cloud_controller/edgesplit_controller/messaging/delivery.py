"""The controller's side of MQTT: ingests device messages, answers fetch requests, and publishes signed statements
(desired state).

The network thread only sorts messages into bounded queues; worker threads empty them. A device that floods loses its
own messages and no others: every kind of message is requested or sent again. The flood is reported (`flood_control`),
and messages of that device are dropped until it has calmed down. Payloads are decoded within size limits; malformed
ones are counted and dropped. The broker authenticated the device: the device in a topic is the name in its certificate.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgesplit.concurrency import THREAD_CONCURRENCY, Concurrency, TaskHandle
from edgesplit.errors import EdgeError, LinkError, MalformedMessage
from edgesplit.identifiers import sha256_hex
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.remote_inference import Reply, Request
from edgesplit_controller.messaging import flood_control
from edgesplit_controller.messaging.broker import CONTROLLERS
from edgesplit_controller.messaging.broker_traffic import Peer, TrafficMeter
from edgesplit_controller.messaging.chunk_queue import ChunkQueue, Due
from edgesplit_controller.messaging.process_sharding import (
    MOST_FORWARDED,
    ForwardedChunks,
    ProcessSharding,
    SingleProcess,
    forwarded_topic,
)

log = logging.getLogger(__name__)

PIECE_BYTES = LIMITS.metadata_piece_bytes
"""Piece of a metadata file in one `FetchReply`."""
WAITING_PER_DEVICE = 256
"""Messages of one device in an inbox; further ones are dropped."""
RETRY_S = 1.0
"""Pause before a failed publication of statements, or a failed write of messages, is retried."""
STORED_TYPES: Mapping[str, type[messages.Message]] = {
    "birth": messages.Birth | messages.Death,  # type: ignore[dict-item]
    "reported": messages.Reported,
    "telemetry": messages.Telemetry,
    "backlog": messages.Backlog,
    "log": messages.LogPiece | messages.JobRefused,  # type: ignore[dict-item]
}
"""Message types by topic kind that are stored."""
FETCH_TYPES: type[messages.FetchMetadata | messages.FetchChunks] = messages.FetchMetadata | messages.FetchChunks  # type: ignore[assignment]
"""Message types of fetch requests."""
RETAINED = tuple(messages.topic("+", kind) for kind in ("birth", "reported"))
"""Topics whose messages the broker retains and repeats to a new subscriber. One process subscribes to them; it misses
nothing when it takes over."""
SHARED = tuple(messages.topic("+", kind) for kind in ("telemetry", "fetch", "backlog", "log"))
"""Topics with continuous traffic: each message is delivered to any one of the processes (shared subscription)."""
SUBSCRIPTIONS = (*RETAINED, *SHARED)
_METADATA = re.compile(r"(?:metadata|targets)(?:/[A-Za-z0-9][A-Za-z0-9_.-]{0,127}){1,3}")


class Channel(Protocol):
    """What delivery needs of an MQTT session."""

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False, correlation: bytes | None = None,
        wait_s: float | None = None,
    ) -> bool:  # fmt: skip
        """Send one message and return whether it was queued. With `wait_s`, return when it was sent; LinkError if that
        takes longer."""
        ...


class Inbox:
    """Messages by device, each device's share bounded, taken out in batches. Thread-safe."""

    def __init__(self, concurrency: Concurrency = THREAD_CONCURRENCY) -> None:
        self._changed = concurrency.condition()
        self._waiting: deque[list[Any]] = deque()
        """Entries of (device, message, correlation)."""
        self._file_requests: dict[tuple[str, str], list[Any]] = {}
        """Queued requests for a metadata file, by device and path."""
        self._queued_of: Counter[str] = Counter()
        self._closed = False

    def put(self, device: str, message: messages.Message, correlation: bytes | None = None) -> bool:
        """Append a message; False if the device has too many in the queue already.

        A device whose request timed out and that requests the same file again keeps its place in the queue, and only
        its newest request is answered: where thousands wait, answering requests that were abandoned would double the
        work at the worst moment.
        """
        with self._changed:
            file = (device, message.path) if isinstance(message, messages.FetchMetadata) else None
            if file is not None and file in self._file_requests:
                # The entry in the queue is the same list object, so this changes the correlation there, too.
                self._file_requests[file][2] = correlation
                return True
            if self._queued_of[device] >= WAITING_PER_DEVICE:
                return False
            self._queued_of[device] += 1
            self._waiting.append([device, message, correlation])
            if file is not None:
                self._file_requests[file] = self._waiting[-1]
            self._changed.notify()
            return True

    def take(self, most: int) -> list[tuple[str, messages.Message, bytes | None]] | None:
        """Remove up to `most` messages in order; blocks while the queue is empty. None once it is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            batch = [tuple(self._waiting.popleft()) for _ in range(min(most, len(self._waiting)))]
            for device, message, _ in batch:
                if isinstance(message, messages.FetchMetadata):
                    self._file_requests.pop((device, message.path), None)
                self._queued_of[device] -= 1
                if not self._queued_of[device]:
                    del self._queued_of[device]
            return batch

    def __len__(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """Accept no further message; `take` returns None when the rest was taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Sources:
    """Callbacks that provide delivery with bytes and receive the device messages."""

    metadata: Callable[[str], bytes]
    """A TUF file by path; FileNotFoundError if there is none."""
    chunk: Callable[[str], bytes]
    """The bytes of a chunk by its SHA-256."""
    release_chunks: Callable[[str], Sequence[str]]
    """The chunks of a release as its manifest lists them; empty for an unknown release."""
    ingest: Callable[[list[tuple[str, messages.Message]]], None]
    """Store device messages. LinkError while the database is unavailable."""
    statements: Callable[[Collection[str] | None], Mapping[str, bytes]]
    """The signed statements of these devices (None: of all); empty bytes for a device whose topics are to be cleared.
    """
    on_flood: Callable[[str, int, int], None] = lambda device, dropped, unseen_bytes: None
    """Called when a device floods, with the number of its dropped messages and, where they are the reason, the bytes
    that it sent to the broker without a message."""
    confirm: Callable[[Mapping[str, bytes]], Collection[str]] = lambda published: ()
    """Note which statements were published, by device; returns the devices for which a newer one was stored meanwhile.
    """
    on_inference_reply: Callable[[str, Reply], bool] = lambda device, message: False
    """Take a device's message about a remote inference; False if it belongs to none of this device's. Returns at once.
    """
    is_leader: Callable[[], bool] = lambda: True
    """Whether this is the process that republishes everything when the broker may have lost it."""


class Delivery:
    """Worker threads around one MQTT session. `on_message` and `on_connect` are the session's callbacks."""

    def __init__(
        self, sources: Sources, concurrency: Concurrency = THREAD_CONCURRENCY, sharding: ProcessSharding | None = None,
        meter: TrafficMeter | None = None,
    ) -> None:  # fmt: skip
        """`meter` learns what explains the traffic of the broker's connections."""
        self._meter = meter
        self._sharding = sharding or SingleProcess()
        self.forwarded_topic = forwarded_topic(self._sharding.own_number)
        """Topic on which other processes forward chunk requests to this one."""
        self.reply_topic = messages.infer_reply_topic("+", self._sharding.own_number)
        """Topic on which devices answer the remote inferences of this process."""
        self._concurrency = concurrency
        self._sources = sources
        self._channel: Channel | None = None
        self._received, self._requests = Inbox(concurrency), Inbox(concurrency)
        self._chunks = ChunkQueue()
        self._chunks_changed = concurrency.condition()
        self._closed = False
        self._stopped = concurrency.condition()
        self._statements_changed = concurrency.condition()
        self._to_state: set[str] | None = set()
        """Devices whose statement is to be published; None: all of them."""
        self._to_clear: set[str] = set()
        self._buckets = flood_control.TokenBuckets()
        self._buckets_changed = concurrency.condition()
        self._floods: deque[str] = deque()
        """Devices whose flood is to be reported."""
        self._unseen: Counter[str] = Counter()
        """Unexplained bytes of these devices at the broker."""
        self._workers: list[TaskHandle] = []
        self.dropped: Counter[str] = Counter()
        """Number of malformed and excess messages that were dropped, by device."""

    def start(self, channel: Channel) -> None:
        """Start the workers, which publish on `channel`."""
        self._channel = channel
        for work in (self._ingest, self._answer, self._stream, self._publish_statements, self._report_floods):
            self._workers.append(self._concurrency.start(work, f"delivery-{work.__name__.strip('_')}"))

    def stop(self) -> None:
        """Stop the workers after the messages in the inboxes were stored."""
        self._received.close()
        self._requests.close()
        self._closed = True
        for waited_for in (self._stopped, self._buckets_changed, self._chunks_changed, self._statements_changed):
            with waited_for:
                waited_for.notify_all()
        for worker in self._workers:
            worker.join(timeout=10)

    def on_connect(self) -> None:
        """The session is up (again), or this process became leader: publish every statement, because the broker may
        have lost them, and the previous leader may have been killed."""
        if not self._sources.is_leader():
            return
        with self._statements_changed:
            self._to_state = None  # None stands for all devices and absorbs the names queued so far
            self._statements_changed.notify_all()

    def on_message(self, topic: str, payload: bytes, correlation: bytes | None) -> None:
        """Sort one message into a queue. Called on the network thread; never raises, never blocks."""
        if topic == self.forwarded_topic:
            self._queue_forwarded(payload)
            return
        device = "?"
        try:
            device = messages.device_of_topic(topic)
            kind = topic.split("/")[3]
            if self._meter is not None:
                self._meter.on_message(device, len(topic) + len(payload))
            # Charged before decoding, and for dropped messages too: a device that goes on flooding stays limited.
            self._charge(
                device, flood_control.MESSAGE_UNITS.get(kind, 1.0) + len(payload) / flood_control.BYTES_PER_UNIT
            )
            if self._buckets.is_limited(device):
                self.dropped[device] += 1
                return
            if not payload:  # our own clearing of a retained topic
                return
            if kind == "fetch":
                request = messages.decode(payload, FETCH_TYPES, LIMITS.request_bytes)
                accepted = self._requests.put(device, request, correlation)
            elif kind == "telemetry" and len(payload) > LIMITS.telemetry_bytes:
                raise MalformedMessage(f"telemetry of {len(payload)} bytes, at most {LIMITS.telemetry_bytes}")
            elif kind == messages.INFER_REPLY:
                accepted = self._sources.on_inference_reply(device, messages.decode(payload, Reply))  # type: ignore[arg-type]
            elif kind in STORED_TYPES:
                accepted = self._received.put(device, messages.decode(payload, STORED_TYPES[kind]))
            else:
                return
        except MalformedMessage as error:
            accepted = False
            self._charge(device, flood_control.MALFORMED_UNITS)
            if self.dropped[device] % 1_000 == 0:  # the log must not grow as fast as a device sends garbage
                log.warning("device %s sent a malformed message: %s", device, error)
        if not accepted:
            self.dropped[device] += 1

    def on_client_connected(self, device: str, peer: Peer | None = None) -> None:
        """The broker accepted a connection of this device; too many of them count as flooding. Any thread; returns at
        once."""
        self._charge(device, flood_control.CONNECTION_UNITS)
        if self._meter is not None and peer is not None and device not in CONTROLLERS:
            self._meter.on_client(device, peer)

    def on_unseen_flood(self, device: str, unseen_bytes: int) -> None:
        """This device sent the broker so many bytes without a message. Any thread; returns at once."""
        with self._buckets_changed:
            self._unseen[device] += unseen_bytes
        self._charge(device, flood_control.CAPACITY + 1.0)  # an empty bucket is a flood

    def _charge(self, device: str, units: float) -> None:
        """Charge a device for traffic, and queue a report if that makes it a flood."""
        with self._buckets_changed:
            if self._buckets.consume(device, units, self._concurrency.monotonic()):
                self._floods.append(device)
                self._buckets_changed.notify()

    def _next_flood(self) -> tuple[str, int] | None:
        with self._buckets_changed:
            self._buckets_changed.wait_for(lambda: self._floods or self._closed)
            if self._closed:
                return None
            device = self._floods.popleft()
            return device, self._unseen.pop(device, 0)

    def _report_floods(self) -> None:
        while (flood := self._next_flood()) is not None:
            device, unseen_bytes = flood
            what = f" ({unseen_bytes} bytes of subscriptions, pings or refused messages)" if unseen_bytes else ""
            log.warning("device %s floods the broker%s: its messages are ignored until it stops", device, what)
            try:
                self._sources.on_flood(device, self.dropped[device], unseen_bytes)
            except Exception:  # the next flood must be reported, too
                log.exception("could not stop the flood of %s", device)

    def clear_retained(self, devices: Collection[str]) -> None:
        """Clear all retained messages of these devices, soon."""
        with self._statements_changed:
            self._to_clear.update(devices)
            self._statements_changed.notify_all()

    def publish_statements(self, devices: Collection[str]) -> None:
        """Publish the statements of these devices, retained, soon."""
        with self._statements_changed:
            if self._to_state is not None:
                self._to_state.update(devices)
            self._statements_changed.notify_all()

    def queue_lengths(self) -> dict[str, int]:
        """Queue lengths, by queue."""
        return {"messages": len(self._received), "requests": len(self._requests), "chunks": len(self._chunks)}

    def acknowledge(self, acks: Collection[tuple[str, messages.Ack]]) -> None:
        """Acknowledge stored telemetry to devices, which may then delete it. A device that misses the acknowledgement
        sends the telemetry again."""
        for device, ack in acks:
            if self._channel is not None:
                self._channel.publish(messages.topic(device, "ack"), messages.encode(ack))

    def send_job(self, device: str, job: messages.DeviceJob) -> None:
        """Send a device a job, such as an upload of its logs. LinkError if the broker does not accept it."""
        if self._channel is None:
            raise LinkError("the broker is not connected yet")
        self._channel.publish(messages.topic(device, "job"), messages.encode(job), qos=1, wait_s=10.0)

    def send_inference(self, device: str, message: Request, wait_s: float | None) -> None:
        """Send a device a message about a remote inference; with `wait_s`, LinkError if the broker does not accept it
        in that time."""
        if self._channel is None:
            raise LinkError("the broker is not connected yet")
        self._channel.publish(messages.topic(device, "infer"), messages.encode(message), qos=1, wait_s=wait_s)

    def _publish(self, topic: str, payload: bytes, **options: object) -> None:
        """Publish, logging a LinkError: every message sent this way is requested again by its device."""
        try:
            if self._channel is not None:
                self._channel.publish(topic, payload, **options)  # type: ignore[arg-type]
        except EdgeError as error:
            log.info("could not publish on %s: %s", topic, error)

    def _ingest(self) -> None:
        """Worker: store the messages of devices, in batches."""
        while (batch := self._received.take(500)) is not None:
            received = [(device, message) for device, message, _ in batch]
            # Back-pressure: the batch is retried until the database takes it. The inbox fills up meanwhile and drops
            # what exceeds a device's share.
            while not self._try_ingest(received) and self._wait_before_retry():
                pass

    def _wait_before_retry(self) -> bool:
        """Wait for `RETRY_S`; False if delivery was stopped."""
        with self._stopped:
            return not self._stopped.wait_for(lambda: self._closed, RETRY_S)

    def _try_ingest(self, received: list[tuple[str, messages.Message]]) -> bool:
        """Store a batch; False while the database is unavailable. Messages that arrive meanwhile wait in the inbox as
        far as there is room."""
        try:
            self._sources.ingest(received)
        except LinkError as error:
            log.warning("could not store %d messages, retrying: %s", len(received), error)
            return False
        except Exception:
            log.exception("could not store %d messages at once: storing them one by one", len(received))
            for message in received:
                self._ingest_single(message)
        return True

    def _ingest_single(self, received: tuple[str, messages.Message]) -> None:
        """Store one message of a failed batch, so that a message that cannot be stored does not cost the others."""
        try:
            self._sources.ingest([received])
        except Exception as error:  # a bug here, or a bad message: the other messages are stored all the same
            self.dropped[received[0]] += 1
            log.error("could not store a message of %s: %r", received[0], error)

    def _answer(self) -> None:
        """Worker: answer fetch requests."""
        while (batch := self._requests.take(64)) is not None:
            for device, request, correlation in batch:
                try:
                    self._answer_one(device, request, correlation)
                except MalformedMessage as error:
                    self.dropped[device] += 1
                    log.info("device %s requested what does not exist: %s", device, error)
                except Exception:
                    log.exception("could not answer %s", device)
            self._note_signs_of_life(batch)

    def _note_signs_of_life(self, batch: list[tuple[str, messages.Message, bytes | None]]) -> None:
        """Count fetch requests as signs of life, which are not retained: one per device and batch is enough."""
        for device, request in {device: request for device, request, _ in batch}.items():
            self._received.put(device, request)

    def _answer_one(self, device: str, request: messages.Message, correlation: bytes | None) -> None:
        if isinstance(request, messages.FetchMetadata):
            content = self._metadata(request.path)
            # A small request can have a large answer, so its bytes are charged to the device that asked.
            self._charge(device, len(content or b"") / flood_control.BYTES_PER_UNIT)
            for piece in pieces(request.path, content):
                topic, payload = messages.topic(device, "fetch_reply"), messages.encode(piece)
                self._send(topic, payload, correlation)
        elif isinstance(request, messages.FetchChunks):
            chunks = check_chunk_request(request, self._sources.release_chunks)
            with self._buckets_changed:
                repeated = self._buckets.count_repeated(device, chunks, self._concurrency.monotonic())
            self._charge(device, repeated * flood_control.REPEATED_CHUNK_UNITS)
            self._route_chunks(device, request.release, chunks, request.direct)

    def _route_chunks(self, device: str, release: str, chunks: Sequence[str], accepts_own_copy: bool) -> None:
        """Route each chunk to the process that publishes it, so that all devices that request it meet in one queue."""
        by_process: dict[int, list[str]] = {}
        for chunk in chunks:
            by_process.setdefault(self._sharding.owner_of(chunk), []).append(chunk)
        own_chunks = by_process.pop(self._sharding.own_number, [])
        for number, chunks_of_other in by_process.items():
            for start in range(0, len(chunks_of_other), MOST_FORWARDED):
                batch = tuple(chunks_of_other[start : start + MOST_FORWARDED])
                payload = messages.encode(ForwardedChunks(device, release, batch, accepts_own_copy))
                if self._channel is None or not self._channel.publish(forwarded_topic(number), payload):
                    own_chunks += batch  # there is no room to forward it: published twice at most
        if own_chunks:
            self._queue(device, release, own_chunks, accepts_own_copy)

    def _queue(self, device: str, release: str, chunks: Sequence[str], accepts_own_copy: bool) -> None:
        with self._chunks_changed:
            self.dropped[device] += self._chunks.request(
                device, release, chunks, self._concurrency.monotonic(), accepts_own_copy=accepts_own_copy
            )
            self._chunks_changed.notify()

    def _queue_forwarded(self, payload: bytes) -> None:
        """Queue a request that another process received for chunks of ours. That process has checked it."""
        try:
            forwarded = messages.decode(payload, ForwardedChunks, LIMITS.request_bytes)
        except MalformedMessage as error:
            log.error("another process forwarded a malformed message: %s", error)
            return
        self._queue(forwarded.device, forwarded.release, forwarded.chunks[:MOST_FORWARDED], forwarded.direct)

    def _metadata(self, path: str) -> bytes | None:
        """The metadata file at `path`; None if there is none, or for a path outside the repository."""
        if not _METADATA.fullmatch(path):
            return None
        try:
            return self._sources.metadata(path)
        except FileNotFoundError:
            return None

    def _stream(self) -> None:
        """Worker: publish chunks as they become due, one at a time. The queue holds names, so only one chunk's bytes
        are in memory."""
        while (due := self._await_chunks()) is not None:
            for chunk in due:
                try:
                    payload = self._sources.chunk(chunk.sha256)
                except EdgeError as error:
                    log.error("chunk %s: %s", chunk.sha256[:12], error)
                    continue
                if not chunk.recipients:
                    self._send(messages.chunk_topic(chunk.sha256), payload)
                for device in chunk.recipients:
                    self._send(messages.topic(device, "fetch_reply"), payload, bytes.fromhex(chunk.sha256))

    def _send(self, topic: str, payload: bytes, correlation: bytes | None = None) -> None:
        """Publish; if the session's queue is full, wait for room (back-pressure)."""
        if self._channel is None or not self._channel.publish(topic, payload, correlation=correlation):
            self._publish(topic, payload, correlation=correlation, wait_s=5.0)  # the session's queue is full: wait

    def _await_chunks(self) -> list[Due] | None:
        """Block until chunks are due; None when delivery is stopped."""
        with self._chunks_changed:
            while not self._closed:
                if ready := self._chunks.take(self._concurrency.monotonic()):
                    return ready
                due = self._chunks.next_due()
                self._chunks_changed.wait(None if due is None else max(0.0, due - self._concurrency.monotonic()))
        return None

    def _publish_statements(self) -> None:
        """Worker: publish statements. If the link fails, the whole round is retried after `RETRY_S`."""
        while (due := self._await_statements()) is not None:
            cleared, stated = due
            try:
                for device in sorted(cleared):
                    self._publish_statement(device, b"")
                statements = self._sources.statements(stated)
                for device, statement in statements.items():
                    self._publish_statement(device, statement)
                # A statement stored between the read above and its publication by another process would now be
                # overwritten on the broker by the older one: `confirm` finds these, and they are published again.
                if statements and (newer := self._sources.confirm(statements)):
                    self.publish_statements(newer)
            except LinkError as error:
                log.info("could not publish statements: %s", error)
                self._retry_statements(cleared, stated)
            except Exception:
                log.exception("could not publish statements")

    def _retry_statements(self, cleared: Collection[str], stated: Collection[str] | None) -> None:
        """Queue a failed round again, together with what was queued meanwhile."""
        self._wait_before_retry()
        with self._statements_changed:
            self._to_clear.update(cleared)
            # None stands for all devices, on either side of the union.
            both = stated is not None and self._to_state is not None
            self._to_state = {*(self._to_state or ()), *(stated or ())} if both else None

    def _await_statements(self) -> tuple[Collection[str], Collection[str] | None] | None:
        """Block until there is something to publish: the devices to clear and the devices whose statement is due (None:
        all). None when delivery is stopped."""
        with self._statements_changed:
            self._statements_changed.wait_for(
                lambda: self._closed or self._to_clear or self._to_state is None or self._to_state
            )
            due = self._to_clear, self._to_state
            self._to_clear, self._to_state = set(), set()
            return None if self._closed else due

    def _publish_statement(self, device: str, statement: bytes) -> None:
        """Publish a statement, retained; empty bytes clear every retained message of the device."""
        kinds: tuple[messages.TopicKind, ...] = ("desired",) if statement else ("desired", "birth", "reported")
        for kind in kinds:
            if self._channel is not None:
                self._channel.publish(messages.topic(device, kind), statement, qos=1, retain=True, wait_s=10.0)


def pieces(path: str, data: bytes | None) -> list[messages.FetchReply]:
    """A metadata file as messages of at most `PIECE_BYTES`; a single message with total -1 where there is no such
    file."""
    if data is None:
        return [messages.FetchReply(path=path, offset=0, total=-1, data=b"")]
    offsets = range(0, max(1, len(data)), PIECE_BYTES)
    return [
        messages.FetchReply(path=path, offset=at, total=len(data), data=data[at : at + PIECE_BYTES]) for at in offsets
    ]


def check_chunk_request(request: messages.FetchChunks, chunks_of: Callable[[str], Sequence[str]]) -> tuple[str, ...]:
    """The chunks that a fetch request names by their place in the manifest. MalformedMessage if a place is beyond the
    release's list."""
    places = request.indexes
    listed = chunks_of(sha256_hex(request.release))
    if places[-1] >= len(listed):
        raise MalformedMessage(f"chunk {places[-1]} of release {request.release[:12]}, which has {len(listed)}")
    return tuple(listed[place] for place in places)
