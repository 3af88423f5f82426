"""An MQTT 5 session that reconnects automatically: TLS, renewed subscriptions, bounded queues, one network thread.

Callbacks run on the network thread, one at a time, and an exception in a callback never ends the session. Payloads
larger than `LIMITS.message_bytes` are refused here, before the broker would refuse them. After a lost connection the
session reconnects with jittered exponential back-off and calls `on_connect` again. The meaning of the messages, and
publishing a `Death` before a clean `stop`, are left to the owner. A QoS 1 publish may arrive twice, and one whose wait
timed out may still arrive.
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
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeAlias

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage, MQTTMessageInfo
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edgesplit.backoff import Backoff
from edgesplit.errors import EdgeError, LinkError, MalformedMessage, UsageError
from edgesplit.limits import LIMITS

MAX_PACKET_BYTES = LIMITS.message_bytes + 4_096
"""Largest MQTT packet: payload, topic and properties."""
MAX_QUEUED_BYTES = 32 * 2**20
"""QoS 0 bytes that may wait for the socket; messages beyond that are dropped, as QoS 0 allows."""
MAX_QUEUED_MESSAGES = 256
"""QoS 1 messages that may be in flight (not acknowledged)."""
SESSION_TAKEN_OVER = 0x8E
"""MQTT 5 reason code "session taken over" (table 2-6): another connection uses our client id."""
CONNECT_TIMEOUT_S = 5.0
RECONNECT = Backoff(first_s=0.25, longest_s=30.0)
"""Pauses before connection attempts; with their jitter a fleet does not reconnect in step after a broker restart."""
STOP_TIMEOUT_S = 2.0
"""Timeout of a clean stop: how long it may take to send what is queued."""

Will: TypeAlias = "tuple[str, bytes, bool]"
OnMessage: TypeAlias = "Callable[[str, bytes, bytes | None], None]"
_log = logging.getLogger("edgesplit.mqtt.session")


@dataclass(slots=True)
class ReconnectBackoff:
    """The back-off of one session."""

    pauses: Backoff = RECONNECT
    failures: int = 0
    """Attempts in a row that the broker did not accept."""

    def next_s(self, jitter: float, *, was_connected: bool, taken_over: bool = False) -> float:
        """Seconds before the next connection attempt, after a connection that ended or that the broker never
        accepted."""
        # Two clients with one id that reconnect quickly would only disconnect each other in turn.
        self.failures = 64 if taken_over else 0 if was_connected else self.failures + 1
        return self.pauses.pause_s(self.failures, jitter)


class Session:
    """An MQTT session of `client_id` with the broker at `host:port`. Methods may be called from any thread."""

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
        reconnect: Backoff = RECONNECT,
    ) -> None:
        """`will` is the last will (topic, payload, retain), which the broker publishes if the connection breaks; a
        callable is called before each connection, so that the will can contain the connection's number."""
        self.address = f"{host}:{port}"
        self.problem = ""
        """Why the last connection failed or ended; empty while connected."""
        self._callbacks = (on_message, on_connect, on_disconnect)
        self._will = will
        self._reconnect = reconnect
        self._topics: dict[str, int] = {}
        self._lock = threading.Lock()
        self._connected = threading.Event()
        self._stopping = threading.Event()
        self._disconnect_sent = False
        self._taken_over = False
        self._refusals: dict[int, str] = {}
        self._qos0_queue: deque[tuple[MQTTMessageInfo, int]] = deque()
        self._qos0_bytes = 0
        self._wakeup_socket: socket.socket | None = None
        """A byte sent into this socket wakes the network thread (self-pipe trick)."""
        self._client = self._make_client(host, port, client_id, tls, keepalive_s)
        self._thread = threading.Thread(target=self._run, name=f"mqtt-{client_id}", daemon=True)

    def _make_client(self, host: str, port: int, client_id: str, tls: ssl.SSLContext, keepalive_s: int) -> Client:
        client = Client(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=MQTTProtocolVersion.MQTTv5)
        client.tls_set_context(tls)
        client.connect_timeout = CONNECT_TIMEOUT_S
        client.max_queued_messages = MAX_QUEUED_MESSAGES
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_socket_open = _set_tcp_nodelay
        # With this callback set, paho writes on our network thread only, never on the thread that publishes.
        client.on_socket_register_write = self._on_write_requested
        limits = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        limits.MaximumPacketSize = MAX_PACKET_BYTES
        client.connect_async(host, port, keepalive_s, clean_start=True, properties=limits)
        return client

    # Public methods, for any thread

    @property
    def connected(self) -> bool:
        """True from the broker's CONNACK until the connection is known to be lost."""
        return self._connected.is_set()

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until connected; False on timeout."""
        return self._connected.wait(timeout_s)

    def start(self) -> None:
        """Start connecting in the background; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is queued, disconnect cleanly (so that the last will is not published), and end the thread.
        Idempotent."""
        self._stopping.set()
        if self.connected:
            self._send_disconnect()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(STOP_TIMEOUT_S + 2 * CONNECT_TIMEOUT_S)

    def reconnect(self) -> None:
        """Close the connection, if there is one, and connect again, for example with a renewed certificate."""
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
        """Publish one message. Without `wait_s`, returns True if it was queued, False if it was dropped because the
        queue is full or, at QoS 0, there is no connection. With `wait_s`, waits for the acknowledgement (at QoS 0,
        until written) and raises LinkError on timeout or refusal."""
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
        """Subscribe to these topics, now and after each reconnection."""
        with self._lock:
            self._topics.update(dict.fromkeys(topics, qos))
            if topics and self.connected:
                self._client.subscribe([(topic, qos) for topic in topics])

    def unsubscribe(self, topics: Sequence[str]) -> None:
        """Unsubscribe from these topics."""
        with self._lock:
            for topic in topics:
                self._topics.pop(topic, None)
            if topics and self.connected:
                self._client.unsubscribe(list(topics))

    # Sending

    def _send(
        self, topic: str, payload: bytes, qos: int, retain: bool, properties: Properties
    ) -> MQTTMessageInfo | None:
        """Queue the message; None if it was dropped."""
        if qos == 0 and not (self.connected and self._has_room_for(len(payload))):
            return None
        try:
            info = self._client.publish(topic, payload, qos, retain, properties)
        except ValueError as error:
            raise UsageError(f"cannot publish on {topic[:80]!r}: {error}") from error
        if qos == 0:
            self._track_qos0(info, len(payload))
        is_queue_full = info.rc == MQTTErrorCode.MQTT_ERR_QUEUE_SIZE
        dropped = is_queue_full or (qos == 0 and info.rc != MQTTErrorCode.MQTT_ERR_SUCCESS)
        return None if dropped else info

    def _send_and_wait(
        self, topic: str, payload: bytes, qos: int, retain: bool, properties: Properties, wait_s: float
    ) -> None:
        deadline = monotonic() + wait_s
        if not self.wait_connected(wait_s):
            raise LinkError(f"not connected to {self.address}{self._problem_suffix()}")
        info = self._send(topic, payload, qos, retain, properties)
        if info is None:
            raise LinkError(f"no room to publish on {topic}")
        try:
            acknowledged = self._wait_published(info, max(0.0, deadline - monotonic()))
        except (RuntimeError, ValueError) as error:
            raise LinkError(f"{topic}: {error}") from error
        if not acknowledged:
            raise LinkError(f"{topic}: not acknowledged within {wait_s:g} s")
        refusal = self._refusals.pop(info.mid, None)
        if refusal is not None:
            raise LinkError(f"{topic}: the broker refused: {refusal}")

    def _wait_published(self, info: MQTTMessageInfo, timeout_s: float) -> bool:
        info.wait_for_publish(timeout_s)
        return info.is_published()

    def _has_room_for(self, size: int) -> bool:
        """True if `size` more bytes fit into the QoS 0 queue. Messages that have been written are removed from the
        count first."""
        with self._lock:
            # Messages leave in order, so only the head of the queue needs to be examined.
            while self._qos0_queue and _is_finished(self._qos0_queue[0][0]):
                self._qos0_bytes -= self._qos0_queue.popleft()[1]
            return self._qos0_bytes + size <= MAX_QUEUED_BYTES

    def _track_qos0(self, info: MQTTMessageInfo, size: int) -> None:
        with self._lock:
            self._qos0_queue.append((info, size))
            self._qos0_bytes += size

    # The network thread

    def _run(self) -> None:
        woken, self._wakeup_socket = socket.socketpair()
        self._wakeup_socket.setblocking(False)
        with woken, self._wakeup_socket:
            self._reconnect_loop(woken)

    def _reconnect_loop(self, woken: socket.socket) -> None:
        backoff = ReconnectBackoff(self._reconnect)
        while not self._stopping.is_set():
            was_connected = self._run_connection(woken)
            pause_s = backoff.next_s(random.random(), was_connected=was_connected, taken_over=self._taken_over)
            self._taken_over = False
            self._stopping.wait(pause_s)

    def _run_connection(self, woken: socket.socket) -> bool:
        """Run one connection from connect to close; True if the broker had accepted it."""
        self._set_will()
        if not self._open_connection():
            return False
        return self._network_loop(woken)

    def _open_connection(self) -> bool:
        """Connect up to (not including) the broker's CONNACK. False where that fails; the reason is in `problem`."""
        try:
            self._client.reconnect()
        except (OSError, ValueError) as error:
            self._set_problem(f"cannot connect to {self.address}: {error}")
            return False
        return True

    def _network_loop(self, woken: socket.socket) -> bool:
        """Read and write until the connection ends; True if the broker had accepted it."""
        accepted = False
        deadline: float | None = None  # of a clean stop: what is queued, then the DISCONNECT, must have been sent
        while self._do_network_io(*self._poll_network(woken)):
            accepted = accepted or self.connected
            if self._stopping.is_set():
                self._send_disconnect()
                deadline = deadline or monotonic() + STOP_TIMEOUT_S
                if monotonic() > deadline:
                    break
        accepted = accepted or self.connected
        self._close_socket()
        return accepted

    def _poll_network(self, woken: socket.socket) -> tuple[bool, bool]:
        """Wait up to a second for the socket; returns (readable, writable).

        Uses poll, because select cannot handle descriptors above 1,023, which a busy controller has.
        """
        sock = self._client.socket()
        if sock is None or sock.fileno() < 0:
            return True, False  # the read will fail and so report the end of the connection
        waiting, wake = select.poll(), woken.fileno()
        waiting.register(wake, select.POLLIN)
        waiting.register(sock, select.POLLIN | (select.POLLOUT if self._client.want_write() else 0))
        ready = dict(waiting.poll(0 if _has_buffered_bytes(sock) else 1_000))
        if wake in ready:
            woken.recv(65_536)
        events = ready.get(sock.fileno(), 0)
        readable = bool(events & ~select.POLLOUT) or _has_buffered_bytes(sock)
        return readable, bool(events & select.POLLOUT) or wake in ready

    def _do_network_io(self, readable: bool, writable: bool) -> bool:
        """Let paho do its pending network work; False once the connection is over."""
        client = self._client
        if readable and client.loop_read() != MQTTErrorCode.MQTT_ERR_SUCCESS:
            return False
        if writable and client.want_write() and client.loop_write() != MQTTErrorCode.MQTT_ERR_SUCCESS:
            return False
        if client.loop_misc() != MQTTErrorCode.MQTT_ERR_SUCCESS:
            return False
        return client.socket() is not None  # a failed ping closes it, without an error from `loop_misc`

    def _on_write_requested(self, client: Client, userdata: Any, sock: Any) -> None:
        """Called by paho from any thread when it has data to write: wakes the network thread."""
        if self._wakeup_socket is not None:
            with suppress(OSError):  # the buffer is full (the thread is awake already), or the thread has ended
                self._wakeup_socket.send(b"\0")

    def _set_will(self) -> None:
        will = self._will() if callable(self._will) else self._will
        if will is not None:
            topic, payload, retain = will
            self._client.will_set(topic, payload, qos=1, retain=retain)

    def _send_disconnect(self) -> None:
        with self._lock:
            if self._disconnect_sent:
                return
            self._disconnect_sent = True
        self._client.disconnect()

    def _close_socket(self) -> None:
        sock = self._client.socket()
        if sock is not None:
            sock.close()
        self._on_connection_lost("")

    def _on_connection_lost(self, reason: str) -> None:
        if reason:
            self._set_problem(reason)
        if self._connected.is_set():
            self._connected.clear()
            self._run_callback(self._callbacks[2])

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem and not self._stopping.is_set():
            _log.warning("%s", problem)
        self.problem = problem

    def _problem_suffix(self) -> str:
        return f" ({self.problem})" if self.problem else ""

    def _run_callback(self, callback: Callable[..., None] | None, *arguments: Any) -> None:
        """Run a callback of the owner. Its exceptions are logged and do not end the session."""
        if callback is None:
            return
        try:
            callback(*arguments)
        except EdgeError as error:
            _log.warning("%s: %s", type(error).__name__, error)
        except Exception:
            _log.exception("a callback of the session failed")

    # Callbacks of paho, on the network thread

    def _on_connect(
        self, client: Client, userdata: Any, flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if reason.is_failure:
            self._set_problem(f"{self.address} refused the connection: {reason}")
            return
        self.problem = ""
        # Under the lock, so that `connected` is never true before the SUBSCRIBE has been queued, and so that a
        # concurrent `subscribe` is either in `_topics` already or sees `connected`.
        with self._lock:
            if self._topics:
                client.subscribe(list(self._topics.items()))
            self._connected.set()
        self._run_callback(self._callbacks[1])

    def _on_disconnect(
        self, client: Client, userdata: Any, flags: DisconnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        self._taken_over = reason.value == SESSION_TAKEN_OVER
        reason_text = (
            "another session with this client id took over: was this card copied?" if self._taken_over else reason
        )
        self._on_connection_lost(f"lost {self.address}: {reason_text}")

    def _on_message(self, client: Client, userdata: Any, message: MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:
            return
        correlation = getattr(message.properties, "CorrelationData", None)
        self._run_callback(self._callbacks[0], topic, bytes(message.payload), correlation)

    def _on_publish(
        self, client: Client, userdata: Any, mid: int, reason: ReasonCode, properties: Properties | None
    ) -> None:
        """Record a PUBACK with an error, which paho counts as published, for the thread that waits for it."""
        if reason.is_failure:
            _log.warning("%s refused a message: %s", self.address, reason)
            # Refusals that no thread waits for would accumulate: the oldest are dropped.
            while len(self._refusals) >= MAX_QUEUED_MESSAGES:
                self._refusals.pop(next(iter(self._refusals)), None)
            self._refusals[mid] = str(reason)
        else:
            self._refusals.pop(mid, None)


def _is_finished(info: MQTTMessageInfo) -> bool:
    """True if the message was written, or lost with its connection."""
    try:
        return info.is_published()
    except (RuntimeError, ValueError):
        return True


def _set_tcp_nodelay(client: Client, userdata: Any, sock: Any) -> None:
    # 90 ms per request and answer without this, 0.3 ms with it (and `set_tcp_nodelay` in the broker)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _has_buffered_bytes(sock: Any) -> bool:
    """True if TLS has decrypted bytes in its buffer, which poll does not report."""
    return bool(getattr(sock, "pending", int)())
