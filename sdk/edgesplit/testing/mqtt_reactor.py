"""Thousands of real MQTT sessions in one thread, beside a hub's tasks: for simulated fleets at a real broker.

A `ReactorSession` behaves like `edgesplit.mqtt.session.Session`, including its back-off, but has no network thread of
its own. `Reactor.idle` is the idle function of a hub in real time. Connecting, including the TLS handshake, blocks, and
is done on one of a few helper threads.
"""

from __future__ import annotations

import queue
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paho.mqtt.client import MQTTMessageInfo

from edgesplit.mqtt.session import ReconnectBackoff, Session
from edgesplit.testing.virtual_time import Hub, Timer

CONNECTORS = 16
"""Number of helper threads, and so of concurrent handshakes."""
KEEPALIVE_CHECK_S = 1.0
"""Interval between two checks of a session's keepalive."""


class Reactor:
    """Network event loop of the sessions; it drives `hub`. Call `close` when all sessions have stopped."""

    def __init__(self, connectors: int = CONNECTORS) -> None:
        self.hub = Hub(idle=self.idle)
        self.connects = 0
        """Number of connections that were opened, whether or not the broker accepted them."""
        self._selector = selectors.DefaultSelector()
        self._results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._work_queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._wakeup_sender.setblocking(False)
        self._selector.register(self._wakeup_receiver, selectors.EVENT_READ, None)
        self._threads = [
            threading.Thread(target=self._run_helper, name=f"connects-{number}", daemon=True)
            for number in range(connectors)
        ]
        for thread in self._threads:
            thread.start()

    def session(self, host: str, port: int, client_id: str, tls: Any, /, **callbacks: Any) -> ReactorSession:
        """Create a session, not started, with the parameters of `edgesplit.mqtt.session.Session`."""
        return ReactorSession(self, host, port, client_id, tls, **callbacks)

    def idle(self, seconds: float) -> None:
        """Wait for at most `seconds`, and handle network events meanwhile."""
        for key, events in self._selector.select(seconds):
            if key.data is None:
                self._wakeup_receiver.recv(65_536)
                self._handle_results()
            else:
                key.data.on_socket_ready(bool(events & selectors.EVENT_READ), bool(events & selectors.EVENT_WRITE))

    def close(self) -> None:
        """Stop the helper threads and close the selector and sockets."""
        for _ in self._threads:
            self._work_queue.put(None)
        self._selector.close()
        self._wakeup_receiver.close()
        self._wakeup_sender.close()

    # Called by sessions

    def watch(self, session: ReactorSession, sock: Any, *, writes: bool) -> None:
        """Call the session when the socket is readable and, with `writes`, when it is writable."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        try:
            self._selector.modify(sock, events, session)
        except KeyError:
            self._selector.register(sock, events, session)

    def unwatch(self, sock: Any) -> None:
        """Stop watching a socket."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def run_in_thread(self, work: Callable[[], bool], on_result: Callable[[bool], None]) -> None:
        """Run the blocking function `work` on a helper thread, then call `on_result` with its result in the hub's
        thread, which is free to run other tasks meanwhile."""

        def begin() -> None:
            result = work()
            self._results.put(lambda: on_result(result))
            with suppress(OSError):
                self._wakeup_sender.send(b"\0")

        self._work_queue.put(begin)

    def _run_helper(self) -> None:
        while (work := self._work_queue.get()) is not None:
            work()

    def _handle_results(self) -> None:
        while True:
            try:
                then = self._results.get_nowait()
            except queue.Empty:
                return
            then()


class ReactorSession(Session):
    """One session. Every method must be called on the hub's thread."""

    def __init__(self, reactor: Reactor, host: str, port: int, client_id: str, tls: Any, **callbacks: Any) -> None:
        super().__init__(host, port, client_id, tls, **callbacks)
        self._reactor = reactor
        self._hub = reactor.hub
        self._changed = reactor.hub.condition()
        self._backoff = ReconnectBackoff()
        self._accepted = False
        self._watched_socket: Any = None
        self._connecting = False
        self._is_cut = False
        self._timer: Timer | None = None

    # Public methods

    def start(self) -> None:
        """Start connecting."""
        self._schedule_connect(0.0)

    def stop(self) -> None:
        """Disconnect cleanly and stop."""
        self._stopping.set()
        self._cancel_timer()
        if self.connected:
            self._send_disconnect()
            self._flush()
        self._end_connection()

    def vanish(self) -> None:
        """End the client without a DISCONNECT: the broker publishes its last will."""
        self._stopping.set()
        self._cancel_timer()
        self._callbacks = (self._callbacks[0], None, None)
        self._end_connection()

    def cut(self) -> None:
        """Close the connection and prevent new ones until `mend`."""
        self._is_cut = True
        self._end_connection()

    def mend(self) -> None:
        """Allow connections again."""
        self._is_cut = False

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until connected; outside of a task, return the current state."""
        if not self._hub.in_task:
            return self.connected
        return bool(self._changed.wait_for(lambda: self.connected, timeout_s))

    # Network events

    def on_socket_ready(self, readable: bool, writable: bool) -> None:
        """Handle a readable or writable socket."""
        alive = self._do_network_io(readable, writable)
        while alive and self._has_buffered_bytes():
            alive = self._do_network_io(True, False)
        self._after_io(alive)

    def _has_buffered_bytes(self) -> bool:
        sock = self._client.socket()
        return sock is not None and bool(getattr(sock, "pending", int)())

    def _after_io(self, alive: bool) -> None:
        self._accepted = self._accepted or self.connected
        if not alive:
            self._end_connection()
        elif self._watched_socket is not None:
            self._reactor.watch(self, self._watched_socket, writes=self._client.want_write())
        self._changed.notify_all()

    def _flush(self) -> None:
        self._do_network_io(False, True)

    def _on_write_requested(self, client: Any, userdata: Any, sock: Any) -> None:
        if self._watched_socket is not None:
            self._reactor.watch(self, self._watched_socket, writes=True)

    def _wait_published(self, info: MQTTMessageInfo, timeout_s: float) -> bool:
        if not self._hub.in_task:
            return info.is_published()
        return bool(self._changed.wait_for(lambda: info.is_published() or not self.connected, timeout_s)) and (
            info.is_published()
        )

    # Connecting and disconnecting

    def _schedule_connect(self, seconds: float) -> None:
        self._cancel_timer()
        self._timer = self._hub.call_later(seconds, self._connect)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _connect(self) -> None:
        self._timer = None
        if self._stopping.is_set() or self._connecting:
            return
        if self._is_cut:
            self._schedule_reconnect()
            return
        self._set_will()
        self._connecting, self._accepted = True, False
        self._reactor.run_in_thread(self._open_connection, self._on_connection_opened)

    def _on_connection_opened(self, is_open: bool) -> None:
        self._connecting = False
        sock = self._client.socket()
        if self._stopping.is_set() or self._is_cut or not is_open or sock is None:
            self._end_connection()
            return
        self._reactor.connects += 1
        self._watched_socket = sock
        self._reactor.watch(self, sock, writes=True)
        self._schedule_keepalive_check()

    def _schedule_keepalive_check(self) -> None:
        """Schedule the periodic keepalive check: sends pings and detects dead connections."""
        watched = self._watched_socket
        if watched is None:
            return

        def again() -> None:
            if self._watched_socket is watched:
                self._after_io(self._do_network_io(False, False))
                self._schedule_keepalive_check()

        self._hub.call_later(KEEPALIVE_CHECK_S * self._hub.rng.uniform(0.9, 1.1), again)

    def _end_connection(self) -> None:
        """Close the connection; schedule another unless the session was stopped."""
        if self._connecting:
            return  # `_on_connection_opened` will run, and end the connection then
        watched, self._watched_socket = self._watched_socket, None
        if watched is not None:
            self._reactor.unwatch(watched)
        self._close_socket()
        self._changed.notify_all()
        if not self._stopping.is_set() and self._timer is None:
            self._schedule_reconnect()

    def _schedule_reconnect(self) -> None:
        jitter = self._hub.rng.random()
        pause_s = self._backoff.next_s(jitter, was_connected=self._accepted, taken_over=self._taken_over)
        self._taken_over = False
        self._schedule_connect(pause_s)
