"""The controller's side of MQTT: takes in what devices say, answers what they fetch, states what they shall run.

The network thread only sorts messages into bounded queues; three workers empty them. A device that floods loses its
own messages and nobody else's: all kinds are asked for or said again; it is told of (`floods`), and nothing of it is
taken in until it has calmed down. What a device says is decoded within bounds;
malformed bytes are counted and dropped. Who a device is was settled by the broker: a topic's device is its
certificate's name.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgesplit.concurrency import THREADS, Pace, Running
from edgesplit.errors import EdgeError, LinkError, MalformedMessage
from edgesplit.identifiers import sha256_hex
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit_controller.messaging import flood_control
from edgesplit_controller.messaging.chunk_queue import ChunkQueue, Due
from edgesplit_controller.messaging.process_sharding import MOST_PASSED, Alone, Colleagues, PassedOn, passed_topic

log = logging.getLogger(__name__)

PIECE_BYTES = 65_536
"""Of a metadata file in one `Fetched`."""
WAITING_PER_DEVICE = 256
"""Messages of one device not yet taken in; more are dropped."""
RESTATE_S = 1.0
"""Pause before what could not be stated is tried again."""
SAID: Mapping[str, type[messages.Message]] = {
    "birth": messages.Birth | messages.Death,  # type: ignore[dict-item]
    "reported": messages.Reported,
    "telemetry": messages.Telemetry,
    "late": messages.Late,
    "bundle": messages.BundlePiece | messages.JobRefused,  # type: ignore[dict-item]
}
ASKED: type[messages.FetchMetadata | messages.FetchChunks] = messages.FetchMetadata | messages.FetchChunks  # type: ignore[assignment]
RETAINED = tuple(messages.topic("+", kind) for kind in ("birth", "reported"))
"""What the broker repeats to whoever subscribes: for one process, which misses nothing when it takes over."""
SPREAD = tuple(messages.topic("+", kind) for kind in ("telemetry", "fetch", "late", "bundle"))
"""What comes all the time: each message for any one of the processes."""
SUBSCRIPTIONS = (*RETAINED, *SPREAD)
_METADATA = re.compile(r"(?:metadata|targets)(?:/[A-Za-z0-9][A-Za-z0-9_.-]{0,127}){1,3}")


class Channel(Protocol):
    """What delivery needs of an MQTT session."""

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False, correlation: bytes | None = None,
        wait_s: float | None = None,
    ) -> bool:  # fmt: skip
        """Send one message; with `wait_s`, return when it has left, LinkError if it has not by then."""
        ...


class Inbox:
    """Messages by device, each device's share bounded, taken out in batches."""

    def __init__(self, pace: Pace = THREADS) -> None:
        self._changed = pace.condition()
        self._waiting: deque[list[Any]] = deque()
        """(device, message, correlation) each."""
        self._files: dict[tuple[str, str], list[Any]] = {}
        """What waits and asks for a file, by device and path."""
        self._of: Counter[str] = Counter()
        self._closed = False

    def put(self, device: str, message: messages.Message, correlation: bytes | None = None) -> bool:
        """False if the device has too many waiting already.

        A device that has lost patience and asks for a file again keeps its place, and only its newest asking is
        answered: where thousands wait, what nobody waits for any more would double the work at the worst moment.
        """
        with self._changed:
            asked = (device, message.path) if isinstance(message, messages.FetchMetadata) else None
            if asked is not None and asked in self._files:
                self._files[asked][2] = correlation
                return True
            if self._of[device] >= WAITING_PER_DEVICE:
                return False
            self._of[device] += 1
            self._waiting.append([device, message, correlation])
            if asked is not None:
                self._files[asked] = self._waiting[-1]
            self._changed.notify()
            return True

    def take(self, most: int) -> list[tuple[str, messages.Message, bytes | None]] | None:
        """What waits, in order; blocks while nothing does; None once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            batch = [tuple(self._waiting.popleft()) for _ in range(min(most, len(self._waiting)))]
            for device, message, _ in batch:
                if isinstance(message, messages.FetchMetadata):
                    self._files.pop((device, message.path), None)
                self._of[device] -= 1
                if not self._of[device]:
                    del self._of[device]
            return batch

    def __len__(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """No more is coming; `take` ends when what is there has been taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Sources:
    """Where delivery gets its bytes and leaves its news."""

    metadata: Callable[[str], bytes]
    """A TUF file by path; FileNotFoundError if there is none."""
    chunk: Callable[[str], bytes]
    """A chunk's bytes by SHA-256."""
    release_chunks: Callable[[str], Sequence[str]]
    """The chunks of a release, as its manifest lists them; empty for one that is not known."""
    hear: Callable[[list[tuple[str, messages.Message]]], None]
    """Take in what devices said."""
    statements: Callable[[Collection[str] | None], Mapping[str, bytes]]
    """The signed statements of the devices named (None: of all); empty bytes for a device that is to be forgotten."""
    flooding: Callable[[str, int], None] = lambda device, dropped: None
    """A device floods, and so many of its messages were dropped: do what can be done about it."""
    confirm: Callable[[Mapping[str, bytes]], Collection[str]] = lambda published: ()
    """Remember what was published, by device; the devices for whom something else is stored by now."""
    leads: Callable[[], bool] = lambda: True
    """Is it this process that repeats everything when the broker may have forgotten?"""


class Delivery:
    """The workers around one MQTT session. `on_message` and `on_connect` are given to the session."""

    def __init__(self, sources: Sources, pace: Pace = THREADS, colleagues: Colleagues | None = None) -> None:
        self._colleagues = colleagues or Alone()
        self.passed_topic = passed_topic(self._colleagues.own)
        """Where others pass on what this process sees to."""
        self._pace = pace
        self._sources = sources
        self._channel: Channel | None = None
        self._said, self._asked = Inbox(pace), Inbox(pace)
        self._chunks = ChunkQueue()
        self._chunks_changed = pace.condition()
        self._closed = False
        self._ending = pace.condition()
        self._stating = pace.condition()
        self._to_state: set[str] | None = set()
        """Devices to be told anew; None: all of them."""
        self._to_forget: set[str] = set()
        self._purses = flood_control.Purses()
        self._purses_changed = pace.condition()
        self._flooding: deque[str] = deque()
        """To be told of."""
        self._workers: list[Running] = []
        self.dropped: Counter[str] = Counter()
        """Malformed and excess messages, by device."""

    def start(self, channel: Channel) -> None:
        """Begin to work on `channel`."""
        self._channel = channel
        for work in (self._take_in, self._answer, self._stream, self._state_all, self._tell_of_floods):
            self._workers.append(self._pace.start(work, f"delivery-{work.__name__.strip('_')}"))

    def stop(self) -> None:
        """End every worker, after what was taken in is kept."""
        self._said.close()
        self._asked.close()
        self._closed = True
        for waited_for in (self._ending, self._purses_changed, self._chunks_changed, self._stating):
            with waited_for:
                waited_for.notify_all()
        for worker in self._workers:
            worker.join(timeout=10)

    def on_connect(self) -> None:
        """The session is up (again), or this process leads now: state everything anew, for the broker may have
        forgotten, and who led before may have been killed."""
        if not self._sources.leads():
            return
        with self._stating:
            self._to_state = None
            self._stating.notify_all()

    def on_message(self, topic: str, payload: bytes, correlation: bytes | None) -> None:
        """Sort one message; called on the network thread, never raises, never waits."""
        if topic == self.passed_topic:
            self._take_passed(payload)
            return
        device = "?"
        try:
            device = messages.device_of(topic)
            kind = topic.rpartition("/")[2]
            self._charge(device, flood_control.MESSAGE.get(kind, 1.0) + len(payload) / flood_control.BYTES_PER_UNIT)
            if self._purses.flooding(device):
                self.dropped[device] += 1
                return
            if not payload:
                return
            if kind == "fetch":
                wish = messages.decode(payload, ASKED, LIMITS.request_bytes)
                taken = self._asked.put(device, wish, correlation)
            elif kind == "telemetry" and len(payload) > LIMITS.telemetry_bytes:
                raise MalformedMessage(f"telemetry of {len(payload)} bytes, at most {LIMITS.telemetry_bytes}")
            elif kind in SAID:
                taken = self._said.put(device, messages.decode(payload, SAID[kind]))
            else:
                return
        except MalformedMessage as error:
            taken = False
            self._charge(device, flood_control.MALFORMED)
            if self.dropped[device] % 1_000 == 0:
                log.warning("device %s said something malformed: %s", device, error)
        if not taken:
            self.dropped[device] += 1

    def connected(self, device: str) -> None:
        """The broker let this device in: one that does so all the time floods, too. Any thread; returns at once."""
        self._charge(device, flood_control.CONNECTION)

    def _charge(self, device: str, units: float) -> None:
        with self._purses_changed:
            if self._purses.spend(device, units, self._pace.monotonic()):
                self._flooding.append(device)
                self._purses_changed.notify()

    def _next_flood(self) -> str | None:
        with self._purses_changed:
            self._purses_changed.wait_for(lambda: self._flooding or self._closed)
            return None if self._closed else self._flooding.popleft()

    def _tell_of_floods(self) -> None:
        while (device := self._next_flood()) is not None:
            log.warning("device %s floods: nothing of it is taken in until it has calmed down", device)
            try:
                self._sources.flooding(device, self.dropped[device])
            except Exception:  # the next flood must be told of too
                log.exception("could not stop the flood of %s", device)

    def forget(self, devices: Collection[str]) -> None:
        """Clear soon what the broker retains of these devices."""
        with self._stating:
            self._to_forget.update(devices)
            self._stating.notify_all()

    def tell(self, devices: Collection[str]) -> None:
        """State soon, retained, what these devices shall run."""
        with self._stating:
            if self._to_state is not None:
                self._to_state.update(devices)
            self._stating.notify_all()

    def waiting(self) -> dict[str, int]:
        """What waits now, by queue."""
        return {"said": len(self._said), "asked": len(self._asked), "chunks": len(self._chunks)}

    def keep(self, kept: Collection[tuple[str, messages.Kept]]) -> None:
        """Tell devices what they may forget; one that does not hear it sends it again."""
        for device, message in kept:
            if self._channel is not None:
                self._channel.publish(messages.topic(device, "kept"), messages.encode(message))

    def ask(self, device: str, job: messages.Job) -> None:
        """Ask a device for something; LinkError where the broker does not take it."""
        if self._channel is None:
            raise LinkError("the broker is not connected yet")
        self._channel.publish(messages.topic(device, "job"), messages.encode(job), qos=1, wait_s=10.0)

    def _publish(self, topic: str, payload: bytes, **options: object) -> None:
        """LinkError is only logged: everything is asked for again."""
        try:
            if self._channel is not None:
                self._channel.publish(topic, payload, **options)  # type: ignore[arg-type]
        except EdgeError as error:
            log.info("could not publish on %s: %s", topic, error)

    def _take_in(self) -> None:
        while (batch := self._said.take(500)) is not None:
            said = [(device, message) for device, message, _ in batch]
            while not self._is_kept(said) and self._paused():
                pass

    def _paused(self) -> bool:
        """After a moment; False at the end."""
        with self._ending:
            return not self._ending.wait_for(lambda: self._closed, RESTATE_S)

    def _is_kept(self, said: list[tuple[str, messages.Message]]) -> bool:
        """False while the database is away: what comes meanwhile waits, as far as there is room."""
        try:
            self._sources.hear(said)
        except LinkError as error:
            log.warning("could not keep what %d messages said, trying again: %s", len(said), error)
            return False
        except Exception:
            log.exception("could not keep what %d messages said: one by one", len(said))
            for one in said:
                self._take_in_alone(one)
        return True

    def _take_in_alone(self, said: tuple[str, messages.Message]) -> None:
        """What one device says must not cost another's words."""
        try:
            self._sources.hear([said])
        except Exception as error:  # a fault of ours, or of its words: the others' are kept all the same
            self.dropped[said[0]] += 1
            log.error("could not keep what %s said: %r", said[0], error)

    def _answer(self) -> None:
        while (batch := self._asked.take(64)) is not None:
            for device, wish, correlation in batch:
                try:
                    self._answer_one(device, wish, correlation)
                except MalformedMessage as error:
                    self.dropped[device] += 1
                    log.info("device %s asked for what is not: %s", device, error)
                except Exception:
                    log.exception("could not answer %s", device)
            self._said_asked(batch)

    def _said_asked(self, batch: list[tuple[str, messages.Message, bytes | None]]) -> None:
        """A fetch is a sign of life, and nobody retains it: one per device and batch is enough."""
        for device, wish in {device: wish for device, wish, _ in batch}.items():
            self._said.put(device, wish)

    def _answer_one(self, device: str, wish: messages.Message, correlation: bytes | None) -> None:
        if isinstance(wish, messages.FetchMetadata):
            found = self._metadata(wish.path)
            self._charge(device, len(found or b"") / flood_control.BYTES_PER_UNIT)
            for piece in pieces(wish.path, found):
                topic, payload = messages.topic(device, "fetched"), messages.encode(piece)
                self._send(topic, payload, correlation)
        elif isinstance(wish, messages.FetchChunks):
            chunks = check_wish(wish, self._sources.release_chunks)
            with self._purses_changed:
                again = self._purses.again(device, chunks, self._pace.monotonic())
            self._charge(device, again * flood_control.AGAIN)
            self._share_out(device, wish.release, chunks, wish.own)

    def _share_out(self, device: str, release: str, chunks: Sequence[str], own: bool) -> None:
        """Each chunk to the process that sees to it, so that all who want it meet in one queue."""
        of: dict[int, list[str]] = {}
        for chunk in chunks:
            of.setdefault(self._colleagues.sees_to(chunk), []).append(chunk)
        ours = of.pop(self._colleagues.own, [])
        for number, theirs in of.items():
            for start in range(0, len(theirs), MOST_PASSED):
                some = tuple(theirs[start : start + MOST_PASSED])
                payload = messages.encode(PassedOn(device, release, some, own))
                if self._channel is None or not self._channel.publish(passed_topic(number), payload):
                    ours += some  # there is no room to pass it on: it is published twice at most
        if ours:
            self._queue(device, release, ours, own)

    def _queue(self, device: str, release: str, chunks: Sequence[str], own: bool) -> None:
        with self._chunks_changed:
            self.dropped[device] += self._chunks.ask(device, release, chunks, self._pace.monotonic(), own=own)
            self._chunks_changed.notify()

    def _take_passed(self, payload: bytes) -> None:
        """What another process was asked for and we see to; it has checked the wish."""
        try:
            passed = messages.decode(payload, PassedOn, LIMITS.request_bytes)
        except MalformedMessage as error:
            log.error("another process passed on something malformed: %s", error)
            return
        self._queue(passed.device, passed.release, passed.chunks[:MOST_PASSED], passed.own)

    def _metadata(self, path: str) -> bytes | None:
        """None for what is not there, and for what is no path of ours."""
        if not _METADATA.fullmatch(path):
            return None
        try:
            return self._sources.metadata(path)
        except FileNotFoundError:
            return None

    def _stream(self) -> None:
        """Publish chunks as they fall due, one at a time: what waits is names, not bytes."""
        while (due := self._await_chunks()) is not None:
            for one in due:
                try:
                    payload = self._sources.chunk(one.chunk)
                except EdgeError as error:
                    log.error("chunk %s: %s", one.chunk[:12], error)
                    continue
                if not one.to:
                    self._send(messages.chunk_topic(one.chunk), payload)
                for device in one.to:
                    self._send(messages.topic(device, "fetched"), payload, bytes.fromhex(one.chunk))

    def _send(self, topic: str, payload: bytes, correlation: bytes | None = None) -> None:
        if self._channel is None or not self._channel.publish(topic, payload, correlation=correlation):
            self._publish(topic, payload, correlation=correlation, wait_s=5.0)  # the session's queue is full: wait

    def _await_chunks(self) -> list[Due] | None:
        with self._chunks_changed:
            while not self._closed:
                if ready := self._chunks.take(self._pace.monotonic()):
                    return ready
                due = self._chunks.next_due()
                self._chunks_changed.wait(None if due is None else max(0.0, due - self._pace.monotonic()))
        return None

    def _state_all(self) -> None:
        """State what is due; a link that fails ends the round, and after a moment all of that is stated anew."""
        while (due := self._await_stating()) is not None:
            forgotten, told = due
            try:
                for device in sorted(forgotten):
                    self._state(device, b"")
                statements = self._sources.statements(told)
                for device, statement in statements.items():
                    self._state(device, statement)
                if statements and (newer := self._sources.confirm(statements)):
                    self.tell(newer)
            except LinkError as error:
                log.info("could not state what devices shall run: %s", error)
                self._state_again(forgotten, told)
            except Exception:
                log.exception("could not state what devices shall run")

    def _state_again(self, forgotten: Collection[str], told: Collection[str] | None) -> None:
        self._paused()
        with self._stating:
            self._to_forget.update(forgotten)
            both = told is not None and self._to_state is not None
            self._to_state = {*(self._to_state or ()), *(told or ())} if both else None

    def _await_stating(self) -> tuple[Collection[str], Collection[str] | None] | None:
        """The devices to be forgotten and those to be told (None: all); None at the end."""
        with self._stating:
            self._stating.wait_for(lambda: self._closed or self._to_forget or self._to_state is None or self._to_state)
            due = self._to_forget, self._to_state
            self._to_forget, self._to_state = set(), set()
            return None if self._closed else due

    def _state(self, device: str, statement: bytes) -> None:
        """Empty bytes clear everything that the broker retains of the device."""
        kinds: tuple[messages.Kind, ...] = ("desired",) if statement else ("desired", "birth", "reported")
        for kind in kinds:
            if self._channel is not None:
                self._channel.publish(messages.topic(device, kind), statement, qos=1, retain=True, wait_s=10.0)


def pieces(path: str, data: bytes | None) -> list[messages.Fetched]:
    """A metadata file in pieces of at most `PIECE_BYTES`; one piece of total -1 where there is none."""
    if data is None:
        return [messages.Fetched(path=path, offset=0, total=-1, data=b"")]
    offsets = range(0, max(1, len(data)), PIECE_BYTES)
    return [messages.Fetched(path=path, offset=at, total=len(data), data=data[at : at + PIECE_BYTES]) for at in offsets]


def check_wish(wish: messages.FetchChunks, chunks_of: Callable[[str], Sequence[str]]) -> tuple[str, ...]:
    """The chunks asked for, if they are few and all of that release; MalformedMessage otherwise."""
    places = wish.places
    listed = chunks_of(sha256_hex(wish.release))
    if places[-1] >= len(listed):
        raise MalformedMessage(f"chunk {places[-1]} of release {wish.release[:12]}, which has {len(listed)}")
    return tuple(listed[place] for place in places)
