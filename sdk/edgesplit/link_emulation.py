"""A shaped link in user space: a TCP proxy with a rate each way, a delay, and a switch to cut it.

Promises: bytes arrive unchanged and in order; all connections share the link's two rates, as they share a radio; a
new rate or delay counts at once, also for what is under way; a half-closed connection stays half open; `cut` resets
both sides. A connection pays one round trip before its first byte, as a handshake would. Kernel buffers beside it are
kept small, so that a sender notices the rate. Losses and reordering are below TCP and are not imitated.

Threads with precise waits instead of an event loop: epoll's clock ticks in milliseconds, a Wi-Fi delay is two of them.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from time import perf_counter

import msgspec

from edgesplit.bandwidth_trace import UplinkTrace
from edgesplit.errors import UsageError
from edgesplit.plan import Link

log = logging.getLogger(__name__)

_BUFFER = 32_768
_SEGMENT = 1_448
"""A small maximum segment: with loopback's 64 KiB, small buffers make TCP wait for its timers."""
_QUANTUM_S = 0.002
_SMALLEST, _LARGEST = 256, 65_536
_LAY_READY_S = 0.0005
"""A read that returns sooner than this found its bytes waiting: they have been ready since the piece before them."""
_LOOK_UP_MS = 200
_QUEUE = 1_024
_CONNECT_S = 5.0


class _Cut(Exception):
    """The connection was reset under this thread."""


class _Pipe:
    """One direction of the link: one piece after the other, at a rate, shared by all connections."""

    def __init__(self, changed: threading.Condition, rate: Callable[[], float]) -> None:
        self._turn = threading.Lock()
        self._changed = changed
        self._rate = rate
        self._free_at = 0.0
        self.bytes = 0

    def quantum(self) -> int:
        """How much to send at a time, so that connections take turns often enough and neither too often."""
        return int(min(_LARGEST, max(_SMALLEST, self._rate() * _QUANTUM_S)))

    def transmit(self, size: int, arrived: float, is_cut: Callable[[], bool]) -> float:
        """Returns when `size` bytes, ready since `arrived`, are through; tells that moment."""
        with self._turn:
            since = max(self._free_at, arrived)
            left = float(size)
            with self._changed:
                while True:
                    now, rate = perf_counter(), self._rate()
                    if is_cut():
                        raise _Cut
                    if left <= max(0.0, now - since) * rate:
                        self._free_at = since + (left / rate if rate else 0.0)
                        self.bytes += size
                        return self._free_at
                    self._changed.wait((left / rate - (now - since)) if rate else None)
                    # what went through at the rate that was; it may have changed while this thread waited
                    after = perf_counter()
                    if rate != self._rate():
                        left, since = max(0.0, left - max(0.0, after - since) * rate), after


class _Flow:
    """One connection through the link: a reader and a writer for each direction."""

    def __init__(self, link: ShapedLink, near: socket.socket) -> None:
        self._link = link
        self._near = near
        self._far: socket.socket | None = None
        self._ends_left = 2
        self._lock = threading.Lock()
        self.is_cut = False

    def open(self) -> None:
        """Reach the target and carry bytes both ways until both sides are done. Runs in a thread of its own."""
        try:
            self._link.wait_until(perf_counter(), lambda: self._link.shape.rtt_s, lambda: self.is_cut)
            self._far = self._link.reach_target()
        except (_Cut, OSError) as error:
            log.debug("link: cannot reach the target: %r", error)
            self.reset()
            return
        if self.is_cut:
            self.reset()
            return
        self._near.settimeout(None)
        for source, sink, pipe in ((self._near, self._far, self._link.up), (self._far, self._near, self._link.down)):
            line: queue.Queue[tuple[float, bytes]] = queue.Queue(_QUEUE)
            self._spawn(self._read, source, pipe, line)
            self._spawn(self._write, sink, line)

    def reset(self) -> None:
        """Break the connection, so that both sides see a reset."""
        with self._lock:
            self.is_cut = True
            sockets = [one for one in (self._near, self._far) if one is not None]
        with self._link.changed:
            self._link.changed.notify_all()
        for one in sockets:
            _abort(one)
        self._link.forget(self)

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=self._guard, args=(target, *arguments), name="shaped-link", daemon=True).start()

    def _guard(self, target: Callable[..., None], *arguments: object) -> None:
        """A thread's end, whatever it was, never leaves the other side hanging."""
        try:
            target(*arguments)
        except _Cut:
            pass
        except (OSError, ValueError) as error:  # ValueError: the socket was closed under a poll
            log.debug("link: %s", error)
            self.reset()

    def _read(self, source: socket.socket, pipe: _Pipe, line: queue.Queue[tuple[float, bytes]]) -> None:
        """Take bytes in at the pipe's rate and put them on their way. An empty piece is the end."""
        sent_at = perf_counter()
        while True:
            before = perf_counter()
            piece = source.recv(pipe.quantum())
            now = perf_counter()
            arrived = sent_at if now - before < _LAY_READY_S else now
            sent_at = pipe.transmit(len(piece), arrived, lambda: self.is_cut) if piece else max(arrived, sent_at)
            self._put(line, (sent_at, piece))
            if not piece:
                return

    def _put(self, line: queue.Queue[tuple[float, bytes]], entry: tuple[float, bytes]) -> None:
        """Queue one piece; a full line is a sink that does not read."""
        while True:
            if self.is_cut:
                raise _Cut
            with contextlib.suppress(queue.Full):
                line.put(entry, timeout=0.1)
                return

    def _take(self, line: queue.Queue[tuple[float, bytes]]) -> tuple[float, bytes]:
        while True:
            if self.is_cut:
                raise _Cut
            with contextlib.suppress(queue.Empty):
                return line.get(timeout=1.0)

    def _write(self, sink: socket.socket, line: queue.Queue[tuple[float, bytes]]) -> None:
        """Hand each piece over once its delay has passed."""
        while True:
            sent_at, piece = self._take(line)
            self._link.wait_until(sent_at, lambda: self._link.shape.rtt_s / 2, lambda: self.is_cut)
            if not piece:
                break
            self._send(sink, piece)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        self._one_end_less()

    def _send(self, sink: socket.socket, piece: bytes) -> None:
        """All of `piece`. Looks up now and then: a blocked send would hold the socket open against a reset."""
        view = memoryview(piece)
        while len(view):
            if self.is_cut or sink.fileno() < 0:
                raise _Cut
            try:
                view = view[sink.send(view, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(sink, select.POLLOUT)
                poll.poll(_LOOK_UP_MS)

    def _one_end_less(self) -> None:
        """When both directions have ended, the connection has."""
        with self._lock:
            self._ends_left -= 1
            if self._ends_left or self._far is None:
                return
        for one in (self._near, self._far):
            one.close()
        self._link.forget(self)


class ShapedLink:
    """A TCP proxy to `target_host:target_port` that behaves as `link` says; `up` is away from whoever connects."""

    def __init__(
        self, target_host: str, target_port: int, link: Link, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._target = (target_host, target_port)
        self._address = (host, port)
        self.shape = link
        self.changed = threading.Condition()
        self.up = _Pipe(self.changed, lambda: self.shape.up_bytes_per_s)
        self.down = _Pipe(self.changed, lambda: self.shape.down_bytes_per_s)
        self._flows: set[_Flow] = set()
        self._lock = threading.Lock()
        self._is_cut = False
        self._listener: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._ended = threading.Event()

    def __enter__(self) -> ShapedLink:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """Where to connect."""
        return self._address[1]

    def start(self) -> None:
        """Listen. UsageError where the port is taken."""
        listener = socket.socket(socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bound_buffers(listener)
        try:
            listener.bind(self._address)
        except OSError as error:
            listener.close()
            raise UsageError(f"cannot listen on {self._address[0]} port {self.port}: {error.strerror}") from error
        listener.listen(128)
        self._listener, self._is_cut = listener, False
        self._ended.clear()
        self._address = (self._address[0], listener.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, args=(listener,), name="shaped-link", daemon=True)
        self._accepting.start()

    def stop(self) -> None:
        """Reset every connection and listen no more."""
        self._ended.set()
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()
        if self._accepting is not None:
            self._accepting.join(5)

    def set_link(self, link: Link) -> None:
        """Another rate or delay, from now on, also for what is under way. A rate of 0 lets nothing through."""
        with self.changed:
            self.shape = link
            self.changed.notify_all()

    def follow(self, trace: UplinkTrace, *, bin_s: float = 0.1, begins_s: float = 0.0) -> None:
        """Let the uplink's rate be the trace's from now on, in steps of `bin_s`, round after round, until `stop`; it
        begins `begins_s` into the trace. Downlink and round trip stay."""
        self._follower = threading.Thread(
            target=self._step, args=(trace.rates(bin_s), bin_s, perf_counter() - begins_s), name="uplink", daemon=True
        )
        self._follower.start()

    def _step(self, rates: Sequence[float], bin_s: float, began: float) -> None:
        while not self._ended.is_set():
            place = int((perf_counter() - began) / bin_s)
            self.set_link(msgspec.structs.replace(self.shape, up_bytes_per_s=rates[place % len(rates)]))
            self._ended.wait(max(0.0, began + (place + 1) * bin_s - perf_counter()))

    def cut(self) -> None:
        """Reset every connection, and each new one, until `restore`."""
        with self._lock:
            self._is_cut = True
            flows = list(self._flows)
        for flow in flows:
            flow.reset()

    def restore(self) -> None:
        """Let new connections through again."""
        with self._lock:
            self._is_cut = False

    def wait_until(self, since: float, delay_s: Callable[[], float], is_cut: Callable[[], bool]) -> None:
        """Return `delay_s` after `since`; the delay may change meanwhile. Raises when the connection was reset."""
        with self.changed:
            while True:
                if is_cut():
                    raise _Cut
                left = since + delay_s() - perf_counter()
                if left <= 0:
                    return
                self.changed.wait(left)

    def reach_target(self) -> socket.socket:
        """A connection to the target, with small buffers."""
        sock = socket.socket(socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET)
        try:
            _bound_buffers(sock)
            sock.settimeout(_CONNECT_S)
            sock.connect(self._target)
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            sock.close()
            raise
        return sock

    def forget(self, flow: _Flow) -> None:
        """This connection has ended."""
        with self._lock:
            self._flows.discard(flow)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError as error:
                if self._listener is not listener:
                    return
                log.warning("link: cannot accept: %s", error)
                with self.changed:
                    self.changed.wait(0.1)
                continue
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            flow = _Flow(self, near)
            with self._lock:
                refused = self._is_cut
                if not refused:
                    self._flows.add(flow)
            if refused:
                flow.reset()
            else:
                threading.Thread(target=flow.open, name="shaped-link", daemon=True).start()


def _bound_buffers(sock: socket.socket) -> None:
    """Small buffers, which accepted sockets inherit."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)


def _abort(sock: socket.socket) -> None:
    """Close by a reset in place of a goodbye, and wake whoever waits on it."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RD)  # SHUT_WR would say goodbye
    sock.close()
