"""A message broker inside this process, on a hub's time: what `edgesplit.mqtt.session.Session` needs of one, without a
network.

Promises what MQTT 5 does as far as edgesplit uses it: retained messages, last wills, a second connection under a name
ends the first, filters with `+` and `#`, shared subscriptions, clean starts only. A client's way there has a delay and
a rate, may be slow, and may be cut; what is on its way then is lost. Devices write and read what the access rules of
the real broker allow (`may_write`, `may_read`); a refused certificate is not let in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgesplit.errors import LinkError, MalformedMessage
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import ROOT
from edgesplit.mqtt.session import FIRST_DELAY_S, OnMessage, Will, next_delay
from edgesplit.testing.virtual_time import Hub, Timer

KEEPALIVES = 1.5
"""A client that is silent for so many of its keepalives is taken for dead (MQTT 5, 3.1.2.10)."""
WRITES = ("birth", "reported", "telemetry", "fetch", "late", "bundle")
READS = ("desired", "fetched", "kept", "job")


@dataclass
class Way:
    """A client's way to the broker and back."""

    delay_s: float = 0.01
    bytes_per_s: float = float("inf")
    cut: bool = False
    """Nothing comes through, and neither side is told."""
    _free: dict[str, float] = field(default_factory=dict)

    def arrives(self, now: float, size: int, direction: str) -> float:
        """When a message that is sent now is there: after those before it."""
        free = max(now, self._free.get(direction, 0.0)) + size / self.bytes_per_s
        self._free[direction] = free
        return free + self.delay_s


@dataclass
class Counts:
    """What a broker did."""

    connects: int = 0
    published: int = 0
    delivered: int = 0
    refused: int = 0
    """Messages on topics that the sender may not write, and connections that were not let in."""
    payload_bytes: int = 0


class LocalBroker:
    """The broker. Clients connect by `session`."""

    def __init__(self, hub: Hub, *, controllers: Sequence[str] = ("controller",)) -> None:
        """`controllers` may read and write everything."""
        self.hub = hub
        self.counts = Counts()
        self.up = True
        self.let_in: Callable[[str], str] = lambda client: ""
        """Why a client is not let in; empty where it is."""
        self.on_client: Callable[[str], None] = lambda client: None
        """Told of each client that is let in."""
        self.watch: Callable[[str, bytes], None] = lambda topic, payload: None
        """Told of each message that is passed on."""
        self._controllers = frozenset(controllers)
        self._retained: OrderedDict[str, bytes] = OrderedDict()
        self._clients: dict[str, LocalSession] = {}
        self._exact: dict[str, dict[LocalSession, int]] = {}
        self._wild: dict[str, dict[LocalSession, int]] = {}
        self._shared: dict[tuple[str, str], list[LocalSession]] = {}

    def session(
        self,
        client_id: str,
        *,
        on_message: OnMessage,
        on_connect: Callable[[], None] | None = None,
        on_disconnect: Callable[[], None] | None = None,
        will: Will | Callable[[], Will] | None = None,
        keepalive_s: int = 30,
        way: Way | None = None,
    ) -> LocalSession:
        """As `edgesplit.mqtt.session.Session`, which is not started yet."""
        return LocalSession(
            self, client_id, way or Way(0.0),
            on_message=on_message, on_connect=on_connect, on_disconnect=on_disconnect, will=will,
            keepalive_s=keepalive_s,
        )  # fmt: skip

    @property
    def connected(self) -> list[str]:
        """The clients that are here, by name."""
        return sorted(self._clients)

    def retained(self, topic: str) -> bytes:
        """What is repeated to whoever subscribes; empty for nothing."""
        return self._retained.get(topic, b"")

    def stop(self, *, forget: bool = False) -> None:
        """Every connection ends; with `forget`, nothing is retained any more."""
        self.up = False
        for one in list(self._clients.values()):
            self._drop(one, will=False)
            one.lost("the broker has gone")
        if forget:
            self._retained.clear()

    def start(self) -> None:
        """Let clients in again."""
        self.up = True

    def end(self, client_id: str) -> None:
        """End that client's connection, if it has one, as its owner would hear it."""
        one = self._clients.get(client_id)
        if one is not None:
            self._drop(one, will=True)
            one.lost("the broker has ended the connection")

    # What sessions ask

    def admit(self, one: LocalSession) -> str:
        """Why a client may not connect; empty where it is connected now."""
        if not self.up:
            return "connection refused"
        if problem := self.let_in(one.client_id):
            self.counts.refused += 1
            return problem
        older = self._clients.get(one.client_id)
        if older is not None:
            self._drop(older, will=True)
            older.taken_over = True
            older.lost("another session of our own name took over: was this card copied?")
        self.counts.connects += 1
        self._clients[one.client_id] = one
        self.on_client(one.client_id)
        return ""

    def leave(self, one: LocalSession, *, will: bool) -> None:
        """A client has gone, with or without a goodbye."""
        if self._clients.get(one.client_id) is one:
            self._drop(one, will=will)

    def subscribe(self, one: LocalSession, topics: Sequence[str], qos: int) -> None:
        """What is retained under these is sent now."""
        for topic in topics:
            if topic.startswith("$share/"):
                _, group, topic_filter = topic.split("/", 2)
                members = self._shared.setdefault((group, topic_filter), [])
                if one not in members:
                    members.append(one)
                continue
            wild = "+" in topic or "#" in topic
            one.filters.add(topic)
            (self._wild if wild else self._exact).setdefault(topic, {})[one] = qos
            found = [name for name in self._retained if matches(topic, name)] if wild else [topic]
            for name in found:
                if name in self._retained:
                    self._give(one, name, self._retained[name], None)

    def unsubscribe(self, one: LocalSession, topics: Sequence[str]) -> None:
        """No more of these."""
        for topic in topics:
            one.filters.discard(topic)
            for table in (self._exact, self._wild):
                members = table.get(topic)
                if members is not None:
                    members.pop(one, None)
                    if not members:
                        del table[topic]

    def publish(
        self, sender: LocalSession, topic: str, payload: bytes, retain: bool, correlation: bytes | None
    ) -> bool:
        """Pass a message on; False if the sender may not write there."""
        if sender.client_id not in self._controllers and not may_write(sender.client_id, topic):
            self.counts.refused += 1
            return False
        self._pass_on(topic, payload, retain, correlation)
        return True

    def _pass_on(self, topic: str, payload: bytes, retain: bool, correlation: bytes | None = None) -> None:
        self.watch(topic, payload)
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
                readers[group[0]] = 1
                group.append(group.pop(0))
        for one in readers:
            self._give(one, topic, payload, correlation)

    def _give(self, one: LocalSession, topic: str, payload: bytes, correlation: bytes | None) -> None:
        if one.client_id in self._controllers or may_read(one.client_id, topic):
            self.counts.delivered += 1
            one.take(topic, payload, correlation)

    def _drop(self, one: LocalSession, *, will: bool) -> None:
        del self._clients[one.client_id]
        self.unsubscribe(one, list(one.filters))
        for group in self._shared.values():
            if one in group:
                group.remove(one)
        if will and one.will is not None and self.up:
            topic, payload, retain = one.will
            self._pass_on(topic, payload, retain)


class LocalSession:
    """One client, which comes back by itself as `edgesplit.mqtt.session.Session` does, with the same patience."""

    def __init__(
        self,
        broker: LocalBroker,
        client_id: str,
        way: Way,
        *,
        on_message: OnMessage,
        on_connect: Callable[[], None] | None,
        on_disconnect: Callable[[], None] | None,
        will: Will | Callable[[], Will] | None,
        keepalive_s: int,
    ) -> None:
        self.client_id = client_id
        self.way = way
        self.problem = ""
        self.will: Will | None = None
        """Of this connection."""
        self.taken_over = False
        self.filters: set[str] = set()
        """The broker's: what this connection subscribed to."""
        self._broker = broker
        self._hub = broker.hub
        self._callbacks = (on_message, on_connect, on_disconnect)
        self._make_will = will
        self._keepalive_s = keepalive_s
        self._topics: dict[str, int] = {}
        self._connected = False
        self._number = 0
        """Of the connection: what was sent on an older one is lost with it."""
        self._delay = FIRST_DELAY_S
        self._stopped = True
        self._next: Timer | None = None
        self._changed = broker.hub.condition()

    # What owners call

    @property
    def connected(self) -> bool:
        """The broker has accepted us, and we have not heard otherwise."""
        return self._connected

    def wait_connected(self, timeout_s: float) -> bool:
        """For tasks."""
        return bool(self._changed.wait_for(lambda: self._connected, timeout_s))

    def start(self) -> None:
        """Begin to connect."""
        self._stopped = False
        self._later(0.0, self._try)

    def stop(self) -> None:
        """Say goodbye and go: no last will."""
        self._stopped = True
        self._forget_next()
        if self._connected:
            self._broker.leave(self, will=False)
            self._set_lost("")

    def vanish(self) -> None:
        """The client is no more, and nobody is told: the broker finds out by its keepalive."""
        self._stopped = True
        self._forget_next()
        if self._connected:
            self._connected = False
            self._number += 1
            number = self._number
            self._hub.call_later(KEEPALIVES * self._keepalive_s, lambda: self._found_dead(number))

    def reconnect(self) -> None:
        """End this connection and make another."""
        if self._connected:
            self._broker.leave(self, will=False)
            self.lost("")

    def cut(self) -> None:
        """The way is cut: each side finds out by its keepalive, if it lasts."""
        self.way.cut = True
        number = self._number
        self._hub.call_later(KEEPALIVES * self._keepalive_s, lambda: self._silent(number))

    def mend(self) -> None:
        """The way is whole again."""
        self.way.cut = False

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
        """As `edgesplit.mqtt.session.Session.publish`. A task that waits does so until the broker has it; what nobody
        waits for in a task is there at once."""
        if len(payload) > LIMITS.message_bytes:
            raise MalformedMessage(f"{topic}: payload of {len(payload)} bytes, at most {LIMITS.message_bytes}")
        if not self._connected:
            if wait_s is not None:
                raise LinkError(f"not connected to the broker: {self.problem}")
            return False
        outcome: list[bool] = []
        self._send(
            lambda: outcome.append(self._broker.publish(self, topic, payload, retain, correlation)), len(payload)
        )
        if wait_s is not None and self._hub.in_task:
            self._changed.wait_for(lambda: outcome or not self._connected, wait_s)
            if not outcome:
                raise LinkError(f"{topic}: not acknowledged within {wait_s:g} s")
            if not outcome[0]:
                raise LinkError(f"{topic}: the broker refused: Not authorized")
        return True

    def subscribe(self, topics: Sequence[str], qos: int = 1) -> None:
        """Now, and after each reconnection."""
        self._topics.update(dict.fromkeys(topics, qos))
        if topics and self._connected:
            self._send(lambda: self._broker.subscribe(self, topics, qos), 64 * len(topics))

    def unsubscribe(self, topics: Sequence[str]) -> None:
        """No longer."""
        for topic in topics:
            self._topics.pop(topic, None)
        if topics and self._connected:
            self._send(lambda: self._broker.unsubscribe(self, topics), 64 * len(topics))

    # What the broker calls

    def take(self, topic: str, payload: bytes, correlation: bytes | None) -> None:
        """A message for this client sets out."""
        number = self._number

        def arrive() -> None:
            if self._connected and number == self._number and not self.way.cut:
                self._callbacks[0](topic, payload, correlation)

        self._at(len(payload), "down", arrive)

    def lost(self, problem: str) -> None:
        """The connection has ended; another is tried after a while."""
        if self._connected:
            self._set_lost(problem)
            self._again(was_connected=True)

    # Inside

    def _send(self, act: Callable[[], Any], size: int) -> None:
        number = self._number

        def arrive() -> None:
            if self._connected and number == self._number and not self.way.cut:
                act()
                self._changed.notify_all()

        self._at(size, "up", arrive)

    def _at(self, size: int, direction: str, act: Callable[[], None]) -> None:
        now = self._hub.monotonic()
        self._hub.call_at(self.way.arrives(now, size, direction), act)

    def _try(self) -> None:
        if self._stopped or self._connected:
            return
        if self.way.cut:
            self.problem = "no way to the broker"
        else:
            made = self._make_will
            self.will = made() if callable(made) else made
            self.problem = self._broker.admit(self)
        if self.problem:
            self._again(was_connected=False)
            return
        self._connected, self._delay = True, FIRST_DELAY_S
        self._number += 1
        for topic, qos in list(self._topics.items()):
            self._send(lambda topic=topic, qos=qos: self._broker.subscribe(self, [topic], qos), 64)  # type: ignore[misc]
        self._changed.notify_all()
        if self._callbacks[1] is not None:
            self._callbacks[1]()

    def _set_lost(self, problem: str) -> None:
        self._connected, self.problem = False, problem
        self._number += 1
        self._changed.notify_all()
        if self._callbacks[2] is not None:
            self._callbacks[2]()

    def _again(self, *, was_connected: bool) -> None:
        self._delay = next_delay(self._delay, was_connected=was_connected, taken_over=self.taken_over)
        self.taken_over = False
        self._later(self._hub.dice.uniform(0.5, 1.0) * self._delay, self._try)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._forget_next()
        self._next = self._hub.call_later(seconds, act)

    def _forget_next(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _found_dead(self, number: int) -> None:
        if number == self._number:
            self._broker.leave(self, will=True)

    def _silent(self, number: int) -> None:
        if self.way.cut and self._connected and number == self._number:
            self._broker.leave(self, will=True)
            self.lost("nothing was heard of the broker")


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a filter with `+` and `#` takes in a topic (MQTT 5, 4.7)."""
    wanted, there = topic_filter.split("/"), topic.split("/")
    if wanted[-1] == "#":
        wanted = wanted[:-1]
        there = there[: len(wanted)]
    return len(wanted) == len(there) and all(one in ("+", other) for one, other in zip(wanted, there, strict=True))


def may_write(device: str, topic: str) -> bool:
    """What a device may publish: under its own name."""
    return topic in (f"{ROOT}/{device}/{kind}" for kind in WRITES)


def may_read(device: str, topic: str) -> bool:
    """What a device may receive: its own, and chunks."""
    return topic.startswith(f"{ROOT}/chunk/") or topic in (f"{ROOT}/{device}/{kind}" for kind in READS)
