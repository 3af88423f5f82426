"""Thousands of real MQTT sessions in one thread, beside a hub's tasks: for fleets that are simulated at a real broker.

A `ReactorSession` is `edgesplit.mqtt.session.Session` in all that it says and decides, its patience included; only its
network
thread is missing. `Reactor.idle` is what a hub in real time sleeps by. A connection is made, TLS handshake and all, on
one of a few helper threads, because that waits for the other side.
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

from edgesplit.mqtt.session import FIRST_DELAY_S, Session, next_delay
from edgesplit.testing.virtual_time import Hub, Timer

CONNECTORS = 16
"""Threads that connect: so many handshakes are under way at once."""
LOOK_S = 1.0
"""Between two looks whether a session's keepalive is due."""


class Reactor:
    """`hub` is the one whose time it passes. `close` when all sessions have stopped."""

    def __init__(self, connectors: int = CONNECTORS) -> None:
        self.hub = Hub(idle=self.idle)
        self.connects = 0
        """Connections that were made, and not always let in."""
        self._selector = selectors.DefaultSelector()
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._threads = [
            threading.Thread(target=self._connect, name=f"connects-{number}", daemon=True)
            for number in range(connectors)
        ]
        for thread in self._threads:
            thread.start()

    def session(self, host: str, port: int, client_id: str, tls: Any, /, **callbacks: Any) -> ReactorSession:
        """As `edgesplit.mqtt.session.Session`, which is not started yet."""
        return ReactorSession(self, host, port, client_id, tls, **callbacks)

    def idle(self, seconds: float) -> None:
        """Sleep at most so long, and do what the network asks for meanwhile."""
        for key, events in self._selector.select(seconds):
            if key.data is None:
                self._woken.recv(65_536)
                self._finish()
            else:
                key.data.ready(bool(events & selectors.EVENT_READ), bool(events & selectors.EVENT_WRITE))

    def close(self) -> None:
        """Let go of what it holds."""
        for _ in self._threads:
            self._asked.put(None)
        self._selector.close()
        self._woken.close()
        self._wakes.close()

    # What sessions ask

    def watch(self, session: ReactorSession, sock: Any, *, writes: bool) -> None:
        """Tell the session when there is something to read, or room to write."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        try:
            self._selector.modify(sock, events, session)
        except KeyError:
            self._selector.register(sock, events, session)

    def unwatch(self, sock: Any) -> None:
        """It has ended."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def beside(self, work: Callable[[], bool], then: Callable[[bool], None]) -> None:
        """Do something that waits on a helper thread, and go on with what it gave in this one."""

        def begin() -> None:
            outcome = work()
            self._done.put(lambda: then(outcome))
            with suppress(OSError):
                self._wakes.send(b"\0")

        self._asked.put(begin)

    def _connect(self) -> None:
        while (work := self._asked.get()) is not None:
            work()

    def _finish(self) -> None:
        while True:
            try:
                then = self._done.get_nowait()
            except queue.Empty:
                return
            then()


class ReactorSession(Session):
    """One session. Every method is called on the hub's thread."""

    def __init__(self, reactor: Reactor, host: str, port: int, client_id: str, tls: Any, **callbacks: Any) -> None:
        super().__init__(host, port, client_id, tls, **callbacks)
        self._reactor = reactor
        self._hub = reactor.hub
        self._changed = reactor.hub.condition()
        self._delay = FIRST_DELAY_S
        self._accepted = False
        self._watched: Any = None
        self._connecting = False
        self._is_cut = False
        self._next: Timer | None = None

    # What owners call

    def start(self) -> None:
        """Begin to connect."""
        self._later(0.0)

    def stop(self) -> None:
        """Say goodbye and go."""
        self._stopping.set()
        self._forget_next()
        if self.connected:
            self._say_goodbye()
            self._write()
        self._end()

    def vanish(self) -> None:
        """The client is no more, without a goodbye: the broker says its last will."""
        self._stopping.set()
        self._forget_next()
        self._callbacks = (self._callbacks[0], None, None)
        self._end()

    def cut(self) -> None:
        """There is no way to the broker until `mend`."""
        self._is_cut = True
        self._end()

    def mend(self) -> None:
        """There is one again."""
        self._is_cut = False

    def wait_connected(self, timeout_s: float) -> bool:
        """For tasks; who is none hears at once."""
        if not self._hub.in_task:
            return self.connected
        return bool(self._changed.wait_for(lambda: self.connected, timeout_s))

    # The network

    def ready(self, readable: bool, writable: bool) -> None:
        """There is something to read, or room to write."""
        alive = self._serve(readable, writable)
        while alive and self._has_more():
            alive = self._serve(True, False)
        self._after(alive)

    def _has_more(self) -> bool:
        sock = self._client.socket()
        return sock is not None and bool(getattr(sock, "pending", int)())

    def _after(self, alive: bool) -> None:
        self._accepted = self._accepted or self.connected
        if not alive:
            self._end()
        elif self._watched is not None:
            self._reactor.watch(self, self._watched, writes=self._client.want_write())
        self._changed.notify_all()

    def _write(self) -> None:
        self._serve(False, True)

    def _has_something_to_write(self, client: Any, userdata: Any, sock: Any) -> None:
        if self._watched is not None:
            self._reactor.watch(self, self._watched, writes=True)

    def _await_published(self, info: MQTTMessageInfo, timeout_s: float) -> bool:
        if not self._hub.in_task:
            return info.is_published()
        return bool(self._changed.wait_for(lambda: info.is_published() or not self.connected, timeout_s)) and (
            info.is_published()
        )

    # Coming and going

    def _later(self, seconds: float) -> None:
        self._forget_next()
        self._next = self._hub.call_later(seconds, self._try)

    def _forget_next(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _try(self) -> None:
        self._next = None
        if self._stopping.is_set() or self._connecting:
            return
        if self._is_cut:
            self._again()
            return
        self._set_will()
        self._connecting, self._accepted = True, False
        self._reactor.beside(self._open, self._opened)

    def _opened(self, there: bool) -> None:
        self._connecting = False
        sock = self._client.socket()
        if self._stopping.is_set() or self._is_cut or not there or sock is None:
            self._end()
            return
        self._reactor.connects += 1
        self._watched = sock
        self._reactor.watch(self, sock, writes=True)
        self._look()

    def _look(self) -> None:
        """Now and then: pings, and connections that nothing is heard of."""
        watched = self._watched
        if watched is None:
            return

        def again() -> None:
            if self._watched is watched:
                self._after(self._serve(False, False))
                self._look()

        self._hub.call_later(LOOK_S * self._hub.dice.uniform(0.9, 1.1), again)

    def _end(self) -> None:
        """This connection is over; another follows, unless we were stopped."""
        if self._connecting:
            return  # `_opened` sees what has become of us
        watched, self._watched = self._watched, None
        if watched is not None:
            self._reactor.unwatch(watched)
        self._hang_up()
        self._changed.notify_all()
        if not self._stopping.is_set() and self._next is None:
            self._again()

    def _again(self) -> None:
        self._delay = next_delay(self._delay, was_connected=self._accepted, taken_over=self._taken_over)
        self._taken_over = False
        self._later(self._hub.dice.uniform(0.5, 1.0) * self._delay)
