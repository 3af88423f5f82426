"""One MQTT 5 session that comes back by itself: TLS, subscriptions re-made, bounded queues, one network thread.

Promises: callbacks run on the network thread, one at a time, and an exception in one never ends the session; what is
larger than `LIMITS.message_bytes` is refused here, before the broker would; after a lost connection it reconnects with
jittered back-off and tells `on_connect` again. Leaves to others: what the messages mean, and sending a `Death` before
a clean `stop`. A QoS 1 publish may arrive twice, and one that was given up waiting for may still arrive.
"""

from __future__ import annotations

import logging
import random
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, TypeAlias

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage, MQTTMessageInfo
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edgesplit.errors import EdgeError, LinkError, MalformedMessage, UsageError
from edgesplit.limits import LIMITS

PACKET_BYTES = LIMITS.message_bytes + 4_096
"""A whole MQTT packet: the payload, the topic and the properties."""
QUEUED_BYTES = 32 * 2**20
"""QoS 0 bytes that may wait for the socket; more are dropped, as QoS 0 allows."""
QUEUED_MESSAGES = 256
"""QoS 1 messages that may wait for their acknowledgement."""
TAKEN_OVER = 0x8E
"""MQTT 5, table 2-6: another connection uses our client id."""
CONNECT_S = 5.0
FIRST_DELAY_S = 0.25
LONGEST_DELAY_S = 30.0
GOODBYE_S = 2.0
"""How long a clean stop may take to hand over what is queued."""

Will: TypeAlias = "tuple[str, bytes, bool]"
OnMessage: TypeAlias = "Callable[[str, bytes, bytes | None], None]"
_log = logging.getLogger("edgesplit.mqtt.session")


class Session:
    """A session of `client_id` with the broker at `host:port`. Thread-safe."""

    def __init__(
        self,
        host: str,
        port: int,
        client_id: str,
        tls: ssl.SSLContext,
        *,
        on_message: OnMessage,
        on_connect: Callable[[], None] | None = None,
        on_disconnect: Callable[[], None] | None = None,
        will: Will | Callable[[], Will] | None = None,
        keepalive_s: int = 30,
    ) -> None:
        """`will` (topic, payload, retain) is what the broker says for us if we vanish; a callable is asked anew before
        each connection, so that it can carry that connection's number."""
        self.address = f"{host}:{port}"
        self.problem = ""
        """Why the last connection failed or ended; empty while all is well."""
        self._callbacks = (on_message, on_connect, on_disconnect)
        self._will = will
        self._topics: dict[str, int] = {}
        self._lock = threading.Lock()
        self._connected = threading.Event()
        self._stopping = threading.Event()
        self._said_goodbye = False
        self._taken_over = False
        self._refused: dict[int, str] = {}
        self._waiting: deque[tuple[MQTTMessageInfo, int]] = deque()
        self._waiting_bytes = 0
        self._wakes: socket.socket | None = None
        """What is sent into it ends the network thread's waiting."""
        self._client = self._make_client(host, port, client_id, tls, keepalive_s)
        self._thread = threading.Thread(target=self._run, name=f"mqtt-{client_id}", daemon=True)

    def _make_client(self, host: str, port: int, client_id: str, tls: ssl.SSLContext, keepalive_s: int) -> Client:
        client = Client(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=MQTTProtocolVersion.MQTTv5)
        client.tls_set_context(tls)
        client.connect_timeout = CONNECT_S
        client.max_queued_messages = QUEUED_MESSAGES
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_socket_open = _without_delay
        # With this set, paho writes on our network thread only, never on the thread that publishes.
        client.on_socket_register_write = self._has_something_to_write
        limits = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        limits.MaximumPacketSize = PACKET_BYTES
        client.connect_async(host, port, keepalive_s, clean_start=True, properties=limits)
        return client

    # What owners call

    @property
    def connected(self) -> bool:
        """The broker has accepted us, and we have not heard otherwise."""
        return self._connected.is_set()

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until connected; False if that took too long."""
        return self._connected.wait(timeout_s)

    def start(self) -> None:
        """Begin to connect, and return at once."""
        self._thread.start()

    def stop(self) -> None:
        """Hand over what is queued, say goodbye (so that the will stays unsaid), and end. Idempotent."""
        self._stopping.set()
        if self.connected:
            self._say_goodbye()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(GOODBYE_S + 2 * CONNECT_S)

    def reconnect(self) -> None:
        """End this connection, if there is one, and make another: to show a new certificate."""
        if self.connected:
            self._client.disconnect()

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
        """Send one message. Without `wait_s`: True if it was queued, False if it was dropped for want of room or, at
        QoS 0, of a connection. With it: wait for the acknowledgement (at QoS 0, until written); LinkError without."""
        if len(payload) > LIMITS.message_bytes:
            raise MalformedMessage(f"{topic}: payload of {len(payload)} bytes, at most {LIMITS.message_bytes}")
        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        if correlation is not None:
            properties.CorrelationData = correlation
        if wait_s is None:
            return self._send(topic, payload, qos, retain, properties) is not None
        if threading.current_thread() is self._thread:
            raise UsageError("a callback of the session cannot wait for its own network thread")
        self._send_and_wait(topic, payload, qos, retain, properties, wait_s)
        return True

    def subscribe(self, topics: Sequence[str], qos: int = 1) -> None:
        """Receive what is published there, from now on and after each reconnection."""
        with self._lock:
            self._topics.update(dict.fromkeys(topics, qos))
            if topics and self.connected:
                self._client.subscribe([(topic, qos) for topic in topics])

    def unsubscribe(self, topics: Sequence[str]) -> None:
        """Receive it no longer."""
        with self._lock:
            for topic in topics:
                self._topics.pop(topic, None)
            if topics and self.connected:
                self._client.unsubscribe(list(topics))

    # Sending

    def _send(
        self, topic: str, payload: bytes, qos: int, retain: bool, properties: Properties
    ) -> MQTTMessageInfo | None:
        """Queue it; None if it was dropped."""
        if qos == 0 and not (self.connected and self._room_for(len(payload))):
            return None
        try:
            info = self._client.publish(topic, payload, qos, retain, properties)
        except ValueError as error:
            raise UsageError(f"cannot publish on {topic[:80]!r}: {error}") from error
        if qos == 0:
            self._remember(info, len(payload))
        dropped = info.rc == MQTTErrorCode.MQTT_ERR_QUEUE_SIZE or (
            qos == 0 and info.rc != MQTTErrorCode.MQTT_ERR_SUCCESS
        )
        return None if dropped else info

    def _send_and_wait(
        self, topic: str, payload: bytes, qos: int, retain: bool, properties: Properties, wait_s: float
    ) -> None:
        deadline = monotonic() + wait_s
        if not self.wait_connected(wait_s):
            raise LinkError(f"not connected to {self.address}{self._because()}")
        info = self._send(topic, payload, qos, retain, properties)
        if info is None:
            raise LinkError(f"no room to publish on {topic}")
        try:
            acknowledged = self._await_published(info, max(0.0, deadline - monotonic()))
        except (RuntimeError, ValueError) as error:
            raise LinkError(f"{topic}: {error}") from error
        if not acknowledged:
            raise LinkError(f"{topic}: not acknowledged within {wait_s:g} s")
        refusal = self._refused.pop(info.mid, None)
        if refusal is not None:
            raise LinkError(f"{topic}: the broker refused: {refusal}")

    def _await_published(self, info: MQTTMessageInfo, timeout_s: float) -> bool:
        info.wait_for_publish(timeout_s)
        return info.is_published()

    def _room_for(self, size: int) -> bool:
        """Is there room for so many bytes more at QoS 0? Forgets what was written meanwhile."""
        with self._lock:
            while self._waiting and _is_gone(self._waiting[0][0]):
                self._waiting_bytes -= self._waiting.popleft()[1]
            return self._waiting_bytes + size <= QUEUED_BYTES

    def _remember(self, info: MQTTMessageInfo, size: int) -> None:
        with self._lock:
            self._waiting.append((info, size))
            self._waiting_bytes += size

    # The network thread

    def _run(self) -> None:
        woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        with woken, self._wakes:
            self._live(woken)

    def _live(self, woken: socket.socket) -> None:
        delay = FIRST_DELAY_S
        while not self._stopping.is_set():
            was_connected = self._connect_and_pump(woken)
            delay = next_delay(delay, was_connected=was_connected, taken_over=self._taken_over)
            self._taken_over = False
            self._stopping.wait(random.uniform(0.5, 1.0) * delay)

    def _connect_and_pump(self, woken: socket.socket) -> bool:
        """One connection from its beginning to its end; whether the broker had accepted it."""
        self._set_will()
        if not self._open():
            return False
        return self._pump(woken)

    def _open(self) -> bool:
        """Connect, but for the broker's own answer; False, and why in `problem`, where there is no way there."""
        try:
            self._client.reconnect()
        except (OSError, ValueError) as error:
            self._note(f"cannot connect to {self.address}: {error}")
            return False
        return True

    def _pump(self, woken: socket.socket) -> bool:
        """Read and write until the connection ends; whether the broker had accepted it."""
        accepted = False
        deadline: float | None = None
        while self._serve(*self._await_network(woken)):
            accepted = accepted or self.connected
            if self._stopping.is_set():
                self._say_goodbye()
                deadline = deadline or monotonic() + GOODBYE_S
                if monotonic() > deadline:
                    break
        accepted = accepted or self.connected
        self._hang_up()
        return accepted

    def _await_network(self, woken: socket.socket) -> tuple[bool, bool]:
        """Whether there is something to read, and room to write, after waiting a second for either.

        By poll: select knows no descriptors beyond 1,023, which a controller under load has.
        """
        sock = self._client.socket()
        if sock is None or sock.fileno() < 0:
            return True, False  # reading tells that it is over
        waiting, wake = select.poll(), woken.fileno()
        waiting.register(wake, select.POLLIN)
        waiting.register(sock, select.POLLIN | (select.POLLOUT if self._client.want_write() else 0))
        ready = dict(waiting.poll(0 if _pending(sock) else 1_000))
        if wake in ready:
            woken.recv(65_536)
        events = ready.get(sock.fileno(), 0)
        return bool(events & ~select.POLLOUT) or _pending(sock), bool(events & select.POLLOUT) or wake in ready

    def _serve(self, readable: bool, writable: bool) -> bool:
        """Do what paho has to do on the network now; False once the connection is over."""
        client = self._client
        if readable and client.loop_read() != MQTTErrorCode.MQTT_ERR_SUCCESS:
            return False
        if writable and client.want_write() and client.loop_write() != MQTTErrorCode.MQTT_ERR_SUCCESS:
            return False
        if client.loop_misc() != MQTTErrorCode.MQTT_ERR_SUCCESS:
            return False
        return client.socket() is not None  # a ping that could not be sent closes it, and is no error to `loop_misc`

    def _has_something_to_write(self, client: Client, userdata: Any, sock: Any) -> None:
        """Paho's word, from any thread: the network thread looks at once."""
        if self._wakes is not None:
            with suppress(OSError):  # it is awake already, or has ended
                self._wakes.send(b"\0")

    def _set_will(self) -> None:
        will = self._will() if callable(self._will) else self._will
        if will is not None:
            topic, payload, retain = will
            self._client.will_set(topic, payload, qos=1, retain=retain)

    def _say_goodbye(self) -> None:
        with self._lock:
            if self._said_goodbye:
                return
            self._said_goodbye = True
        self._client.disconnect()

    def _hang_up(self) -> None:
        left = self._client.socket()
        if left is not None:
            left.close()
        self._lost("")

    def _lost(self, reason: str) -> None:
        if reason:
            self._note(reason)
        if self._connected.is_set():
            self._connected.clear()
            self._call(self._callbacks[2])

    def _note(self, problem: str) -> None:
        if problem != self.problem and not self._stopping.is_set():
            _log.warning("%s", problem)
        self.problem = problem

    def _because(self) -> str:
        return f" ({self.problem})" if self.problem else ""

    def _call(self, callback: Callable[..., None] | None, *arguments: Any) -> None:
        """An owner's callback; what it raises is logged, because the session must outlive it."""
        if callback is None:
            return
        try:
            callback(*arguments)
        except EdgeError as error:
            _log.warning("%s: %s", type(error).__name__, error)
        except Exception:
            _log.exception("a callback of the session failed")

    # What paho calls

    def _on_connect(
        self, client: Client, userdata: Any, flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if reason.is_failure:
            self._note(f"{self.address} refused us: {reason}")
            return
        self.problem = ""
        with self._lock:  # whoever sees us connected may rely on the subscriptions being on their way
            if self._topics:
                client.subscribe(list(self._topics.items()))
            self._connected.set()
        self._call(self._callbacks[1])

    def _on_disconnect(
        self, client: Client, userdata: Any, flags: DisconnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        self._taken_over = reason.value == TAKEN_OVER
        why = "another session of our own name took over: was this card copied?" if self._taken_over else reason
        self._lost(f"lost {self.address}: {why}")

    def _on_message(self, client: Client, userdata: Any, message: MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:
            return
        correlation = getattr(message.properties, "CorrelationData", None)
        self._call(self._callbacks[0], topic, bytes(message.payload), correlation)

    def _on_publish(
        self, client: Client, userdata: Any, mid: int, reason: ReasonCode, properties: Properties | None
    ) -> None:
        """Paho counts a refusal as published; remember it for whoever waits."""
        if reason.is_failure:
            _log.warning("%s refused a message: %s", self.address, reason)
            while len(self._refused) >= QUEUED_MESSAGES:
                self._refused.pop(next(iter(self._refused)), None)
            self._refused[mid] = str(reason)
        else:
            self._refused.pop(mid, None)


def next_delay(delay_s: float, *, was_connected: bool, taken_over: bool = False) -> float:
    """How long to wait, less a part by chance, before connecting again after a connection that ended, or that the
    broker never accepted."""
    if taken_over:  # whoever took our name has it now: two that both hurry would only throw each other off
        return LONGEST_DELAY_S
    return FIRST_DELAY_S if was_connected else min(delay_s * 2, LONGEST_DELAY_S)


def _is_gone(info: MQTTMessageInfo) -> bool:
    """Written, or lost with its connection."""
    try:
        return info.is_published()
    except (RuntimeError, ValueError):
        return True


def _without_delay(client: Client, userdata: Any, sock: Any) -> None:
    # 90 ms per request and answer without this, 0.3 ms with it (and `set_tcp_nodelay` in the broker)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _pending(sock: Any) -> bool:
    """Bytes that TLS has decrypted already, of which no poll tells."""
    return bool(getattr(sock, "pending", int)())
