"""In-memory MQTT broker in virtual time, with sessions that have the interface of `edgesplit.mqtt.session.Session`.

It implements the part of MQTT 5 that edgesplit uses: retained messages, last wills, takeover of a session by a second
connection with its client id, filters with `+` and `#`, shared subscriptions, and clean starts only. A client's network
path has a delay and a rate and may be cut; messages in flight are then lost. Devices may write and read what the real
broker's access rules allow (`may_write`, `may_read`); a refused certificate cannot connect.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from edgesplit.errors import LinkError, MalformedMessage
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import INFER_REPLY, ROOT
from edgesplit.mqtt.session import OnMessage, ReconnectBackoff, Will
from edgesplit.testing.virtual_time import Hub, Timer

KEEPALIVE_FACTOR = 1.5
"""A client that is silent for this many keepalive intervals is considered dead (MQTT 5, 3.1.2.10)."""
DEVICE_WRITES = ("birth", "reported", "telemetry", "fetch", "backlog", "log", f"{INFER_REPLY}/+")
"""Topic kinds that a device may publish under its own name."""
DEVICE_READS = ("desired", "fetch_reply", "ack", "job", "infer")
"""Topic kinds that a device may receive under its own name."""


@dataclass
class NetworkPath:
    """Emulated network path between a client and the broker."""

    delay_s: float = 0.01
    bytes_per_s: float = float("inf")
    cut: bool = False
    """All messages are lost, without either side being notified."""
    _free_at: dict[str, float] = field(default_factory=dict)

    def arrival_time(self, now: float, size: int, direction: str) -> float:
        """Arrival time of a message that is sent at `now`, after the messages that are queued before it."""
        free = max(now, self._free_at.get(direction, 0.0)) + size / self.bytes_per_s
        self._free_at[direction] = free
        return free + self.delay_s


@dataclass
class BrokerCounters:
    """Counters of a broker."""

    connects: int = 0
    published: int = 0
    delivered: int = 0
    refused: int = 0
    """Messages on topics that the sender may not write, and refused connections."""
    payload_bytes: int = 0


class InMemoryBroker:
    """The broker. Clients are created by `session`."""

    def __init__(self, hub: Hub, *, controllers: Sequence[str] = ("controller",)) -> None:
        """`controllers` may read and write all topics."""
        self.hub = hub
        self.counts = BrokerCounters()
        self.up = True
        self.refusal_reason: Callable[[str], str] = lambda client: ""
        """Decides whether a client may connect: returns the reason of a refusal, or an empty string."""
        self.on_client: Callable[[str], None] = lambda client: None
        """Called with the name of each client that connects."""
        self.on_publish: Callable[[str, bytes], None] = lambda topic, payload: None
        """Called with each message that is published."""
        self._controllers = frozenset(controllers)
        self._retained: OrderedDict[str, bytes] = OrderedDict()
        self._clients: dict[str, InMemorySession] = {}
        self._exact: dict[str, dict[InMemorySession, int]] = {}
        self._wild: dict[str, dict[InMemorySession, int]] = {}
        self._shared: dict[tuple[str, str], list[InMemorySession]] = {}

    def session(self, client_id: str, *, path: NetworkPath | None = None, **options: Any) -> InMemorySession:
        """Create a session, not started, with the options of `InMemorySession`."""
        return InMemorySession(self, client_id, path or NetworkPath(0.0), **options)

    @property
    def connected(self) -> list[str]:
        """Names of the connected clients, sorted."""
        return sorted(self._clients)

    def retained(self, topic: str) -> bytes:
        """The topic's retained payload; empty if there is none."""
        return self._retained.get(topic, b"")

    def stop(self, *, clear_retained: bool = False) -> None:
        """Close every connection; with `clear_retained`, also delete all retained messages."""
        self.up = False
        for session in list(self._clients.values()):
            self._remove(session, will=False)
            session.on_connection_lost("the broker was stopped")
        if clear_retained:
            self._retained.clear()

    def start(self) -> None:
        """Accept connections again."""
        self.up = True

    def disconnect(self, client_id: str) -> None:
        """Close the client's connection, if there is one; its session is notified."""
        session = self._clients.get(client_id)
        if session is not None:
            self._remove(session, will=True)
            session.on_connection_lost("the broker has ended the connection")

    # Called by sessions

    def connect(self, session: InMemorySession) -> str:
        """Connect a client. Returns the reason of a refusal; empty if it is connected now."""
        if not self.up:
            return "connection refused"
        if problem := self.refusal_reason(session.client_id):
            self.counts.refused += 1
            return problem
        # A second connection with the same client id takes over the session of the first (MQTT 5, 3.1.4).
        older = self._clients.get(session.client_id)
        if older is not None:
            self._remove(older, will=True)
            older.taken_over = True
            older.on_connection_lost("another session with this client id took over: was this card copied?")
        self.counts.connects += 1
        self._clients[session.client_id] = session
        self.on_client(session.client_id)
        return ""

    def remove_session(self, session: InMemorySession, *, will: bool) -> None:
        """Remove a client that has disconnected; with `will`, publish its last will."""
        if self._clients.get(session.client_id) is session:
            self._remove(session, will=will)

    def subscribe(self, session: InMemorySession, topics: Sequence[str], qos: int) -> None:
        """Add subscriptions and send the retained messages that match them."""
        for topic in topics:
            if topic.startswith("$share/"):
                _, group, topic_filter = topic.split("/", 2)
                members = self._shared.setdefault((group, topic_filter), [])
                if session not in members:
                    members.append(session)
                continue
            wild = "+" in topic or "#" in topic
            session.filters.add(topic)
            (self._wild if wild else self._exact).setdefault(topic, {})[session] = qos
            names = [name for name in self._retained if matches(topic, name)] if wild else [topic]
            for name in names:
                if name in self._retained:
                    self._deliver(session, name, self._retained[name], None)

    def unsubscribe(self, session: InMemorySession, topics: Sequence[str]) -> None:
        """Remove subscriptions."""
        for topic in topics:
            session.filters.discard(topic)
            for table in (self._exact, self._wild):
                members = table.get(topic)
                if members is not None:
                    members.pop(session, None)
                    if not members:
                        del table[topic]

    def publish(
        self, sender: InMemorySession, topic: str, payload: bytes, retain: bool, correlation: bytes | None
    ) -> bool:
        """Distribute a message; False if the sender may not write the topic."""
        if sender.client_id not in self._controllers and not may_write(sender.client_id, topic):
            self.counts.refused += 1
            return False
        self._distribute(topic, payload, retain, correlation)
        return True

    def _distribute(self, topic: str, payload: bytes, retain: bool, correlation: bytes | None = None) -> None:
        self.on_publish(topic, payload)
        self.counts.published += 1
        self.counts.payload_bytes += len(payload)
        if retain and payload:
            self._retained[topic] = payload
        elif retain:
            self._retained.pop(topic, None)
        readers = dict(self._exact.get(topic, ()))
        for topic_filter, members in self._wild.items():
            if matches(topic_filter, topic):
                readers.update(members)
        for (_, topic_filter), group in self._shared.items():
            if group and matches(topic_filter, topic):
                readers[group[0]] = 1  # a shared subscription: one member of the group gets it, round robin
                group.append(group.pop(0))
        for session in readers:
            self._deliver(session, topic, payload, correlation)

    def _deliver(self, session: InMemorySession, topic: str, payload: bytes, correlation: bytes | None) -> None:
        if session.client_id in self._controllers or may_read(session.client_id, topic):
            self.counts.delivered += 1
            session.deliver(topic, payload, correlation)

    def _remove(self, session: InMemorySession, *, will: bool) -> None:
        del self._clients[session.client_id]
        self.unsubscribe(session, list(session.filters))
        for group in self._shared.values():
            if session in group:
                group.remove(session)
        if will and session.will is not None and self.up:
            topic, payload, retain = session.will
            self._distribute(topic, payload, retain)


class InMemorySession:
    """A client session that reconnects like `edgesplit.mqtt.session.Session`, with the same back-off."""

    def __init__(
        self,
        broker: InMemoryBroker,
        client_id: str,
        path: NetworkPath,
        *,
        on_message: OnMessage,
        on_connect: Callable[[], None] | None = None,
        on_disconnect: Callable[[], None] | None = None,
        will: Will | Callable[[], Will] | None = None,
        keepalive_s: int = 30,
    ) -> None:
        """The options are those of `edgesplit.mqtt.session.Session`."""
        self.client_id = client_id
        self.path = path
        self.problem = ""
        self.will: Will | None = None
        """Last will of the current connection."""
        self.taken_over = False
        self.filters: set[str] = set()
        """Topic filters of the current connection; maintained by the broker."""
        self._broker = broker
        self._hub = broker.hub
        self._callbacks = (on_message, on_connect, on_disconnect)
        self._make_will = will
        self._keepalive_s = keepalive_s
        self._topics: dict[str, int] = {}
        self._connected = False
        self._connection_number = 0
        """Number of the current connection: messages sent on an older one are lost with it."""
        self._backoff = ReconnectBackoff()
        self._stopped = True
        self._timer: Timer | None = None
        self._changed = broker.hub.condition()

    # Public methods

    @property
    def connected(self) -> bool:
        """True while the broker has accepted the connection."""
        return self._connected

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until connected; False on timeout. For tasks only."""
        return bool(self._changed.wait_for(lambda: self._connected, timeout_s))

    def start(self) -> None:
        """Start connecting."""
        self._stopped = False
        self._set_timer(0.0, self._connect)

    def stop(self) -> None:
        """Disconnect cleanly, without a last will."""
        self._stopped = True
        self._cancel_timer()
        if self._connected:
            self._broker.remove_session(self, will=False)
            self._set_lost("")

    def vanish(self) -> None:
        """End the client without notifying the broker, which detects it by its keepalive."""
        self._stopped = True
        self._cancel_timer()
        if self._connected:
            self._connected = False
            self._connection_number += 1
            number = self._connection_number
            self._hub.call_later(KEEPALIVE_FACTOR * self._keepalive_s, lambda: self._on_keepalive_expired(number))

    def reconnect(self) -> None:
        """Close the connection and connect again."""
        if self._connected:
            self._broker.remove_session(self, will=False)
            self.on_connection_lost("")

    def cut(self) -> None:
        """Cut the network path: each side detects it by its keepalive, if the cut lasts long enough."""
        self.path.cut = True
        number = self._connection_number
        self._hub.call_later(KEEPALIVE_FACTOR * self._keepalive_s, lambda: self._on_silence(number))

    def mend(self) -> None:
        """Restore the network path."""
        self.path.cut = False

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        qos: int = 0,
        retain: bool = False,
        correlation: bytes | None = None,
        wait_s: float | None = None,
    ) -> bool:
        """Publish with the parameters of `edgesplit.mqtt.session.Session.publish`. A task with `wait_s` waits until the
        broker has the message; outside of tasks nothing is awaited."""
        if len(payload) > LIMITS.message_bytes:
            raise MalformedMessage(f"{topic}: payload of {len(payload)} bytes, at most {LIMITS.message_bytes}")
        if not self._connected:
            if wait_s is not None:
                raise LinkError(f"not connected to the broker: {self.problem}")
            return False
        outcome: list[bool] = []
        arrive = partial(self._broker.publish, self, topic, payload, retain, correlation)
        self._send(lambda: outcome.append(arrive()), len(payload))
        if wait_s is not None and self._hub.in_task:
            self._changed.wait_for(lambda: outcome or not self._connected, wait_s)
            if not outcome:
                raise LinkError(f"{topic}: not acknowledged within {wait_s:g} s")
            if not outcome[0]:
                raise LinkError(f"{topic}: the broker refused: Not authorized")
        return True

    def subscribe(self, topics: Sequence[str], qos: int = 1) -> None:
        """Subscribe now and after each reconnection."""
        self._topics.update(dict.fromkeys(topics, qos))
        if topics and self._connected:
            self._send(lambda: self._broker.subscribe(self, topics, qos), 64 * len(topics))

    def unsubscribe(self, topics: Sequence[str]) -> None:
        """Unsubscribe."""
        for topic in topics:
            self._topics.pop(topic, None)
        if topics and self._connected:
            self._send(lambda: self._broker.unsubscribe(self, topics), 64 * len(topics))

    # Called by the broker

    def deliver(self, topic: str, payload: bytes, correlation: bytes | None) -> None:
        """Send a message from the broker to this client."""
        number = self._connection_number  # dropped on arrival if this connection has ended by then

        def arrive() -> None:
            if self._connected and number == self._connection_number and not self.path.cut:
                self._callbacks[0](topic, payload, correlation)

        self._schedule_arrival(len(payload), "down", arrive)

    def on_connection_lost(self, problem: str) -> None:
        """The connection has ended; reconnect after the back-off."""
        if self._connected:
            self._set_lost(problem)
            self._schedule_reconnect(was_connected=True)

    # Internal

    def _send(self, act: Callable[[], Any], size: int) -> None:
        number = self._connection_number

        def arrive() -> None:
            if self._connected and number == self._connection_number and not self.path.cut:
                act()
                self._changed.notify_all()

        self._schedule_arrival(size, "up", arrive)

    def _schedule_arrival(self, size: int, direction: str, act: Callable[[], None]) -> None:
        now = self._hub.monotonic()
        self._hub.call_at(self.path.arrival_time(now, size, direction), act)

    def _connect(self) -> None:
        if self._stopped or self._connected:
            return
        if self.path.cut:
            self.problem = "the broker cannot be reached"
        else:
            will = self._make_will
            self.will = will() if callable(will) else will
            self.problem = self._broker.connect(self)
        if self.problem:
            self._schedule_reconnect(was_connected=False)
            return
        self._connected = True
        self._connection_number += 1
        for topic, qos in list(self._topics.items()):
            self._send(lambda topic=topic, qos=qos: self._broker.subscribe(self, [topic], qos), 64)  # type: ignore[misc]
        self._changed.notify_all()
        if self._callbacks[1] is not None:
            self._callbacks[1]()

    def _set_lost(self, problem: str) -> None:
        self._connected, self.problem = False, problem
        self._connection_number += 1
        self._changed.notify_all()
        if self._callbacks[2] is not None:
            self._callbacks[2]()

    def _schedule_reconnect(self, *, was_connected: bool) -> None:
        jitter = self._hub.rng.random()
        pause_s = self._backoff.next_s(jitter, was_connected=was_connected, taken_over=self.taken_over)
        self.taken_over = False
        self._set_timer(pause_s, self._connect)

    def _set_timer(self, seconds: float, act: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._hub.call_later(seconds, act)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_keepalive_expired(self, number: int) -> None:
        if number == self._connection_number:
            self._broker.remove_session(self, will=True)

    def _on_silence(self, number: int) -> None:
        if self.path.cut and self._connected and number == self._connection_number:
            self._broker.remove_session(self, will=True)
            self.on_connection_lost("the broker did not respond")


def matches(topic_filter: str, topic: str) -> bool:
    """True if a filter with `+` and `#` matches the topic (MQTT 5, 4.7)."""
    filter_levels, topic_levels = topic_filter.split("/"), topic.split("/")
    if filter_levels[-1] == "#":
        filter_levels = filter_levels[:-1]
        topic_levels = topic_levels[: len(filter_levels)]
    return len(filter_levels) == len(topic_levels) and all(
        pattern in ("+", level) for pattern, level in zip(filter_levels, topic_levels, strict=True)
    )


def may_write(device: str, topic: str) -> bool:
    """True if the device may publish on the topic: certain kinds under its own name."""
    return any(matches(f"{ROOT}/{device}/{kind}", topic) for kind in DEVICE_WRITES)


def may_read(device: str, topic: str) -> bool:
    """True if the device may receive the topic: certain kinds under its own name, and chunks."""
    return topic.startswith(f"{ROOT}/chunk/") or topic in (f"{ROOT}/{device}/{kind}" for kind in DEVICE_READS)
