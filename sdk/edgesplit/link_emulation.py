"""Network link emulation in user space: a TCP proxy with a rate per direction, a delay, and a switch that cuts the
link.

Bytes arrive unchanged and in order. All connections share the link's two rates, as they share a radio. A new rate or
delay applies at once, also to bytes in flight. A half-closed connection stays half open; `cut` resets both sides. A
connection takes one round trip before its first byte, as for a handshake. Kernel buffers are kept small, so that a
sender is slowed down to the rate. Packet loss and reordering happen below TCP and are not emulated.

It uses threads with precise waits instead of an event loop: epoll's timeouts have a resolution of 1 ms, and the delay
of a Wi-Fi link is 2 ms.
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

_SOCKET_BUFFER_BYTES = 32_768
_SEGMENT_BYTES = 1_448
"""Small maximum segment size: with loopback's 64 KiB segments, small buffers make TCP wait for its timers."""
_QUANTUM_S = 0.002
_MIN_QUANTUM_BYTES, _MAX_QUANTUM_BYTES = 256, 65_536
_BUFFERED_READ_S = 0.0005
"""A read that returns faster than this found its bytes already buffered: they have been ready since the previous chunk.
"""
_SEND_POLL_MS = 200
_QUEUE_CHUNKS = 1_024
_CONNECT_S = 5.0


class _ConnectionReset(Exception):
    """The connection was reset while this thread worked on it."""


class _Direction:
    """One direction of the link, shared by all connections: transmits one chunk after the other at the link's rate."""

    def __init__(self, changed: threading.Condition, rate: Callable[[], float]) -> None:
        self._transmit_lock = threading.Lock()
        self._changed = changed
        self._rate = rate
        self._free_at = 0.0
        self.bytes = 0

    def quantum(self) -> int:
        """Bytes to send at a time: small enough that connections alternate often, large enough that the overhead stays
        low."""
        return int(min(_MAX_QUANTUM_BYTES, max(_MIN_QUANTUM_BYTES, self._rate() * _QUANTUM_S)))

    def transmit(self, size: int, arrived: float, is_cut: Callable[[], bool]) -> float:
        """Block until `size` bytes, ready since `arrived`, have passed; returns the time (perf_counter) at which they
        had. Raises _ConnectionReset."""
        # The lock admits one chunk at a time: the link is a single server that the chunks of all connections share.
        # Transmission begins when the chunk was ready and the previous one was through, which may be in the past; using
        # those times instead of the time of waking keeps scheduling delays from accumulating.
        with self._transmit_lock:
            since = max(self._free_at, arrived)
            remaining = float(size)
            with self._changed:
                while True:
                    now, rate = perf_counter(), self._rate()
                    if is_cut():
                        raise _ConnectionReset
                    if remaining <= max(0.0, now - since) * rate:
                        self._free_at = since + (remaining / rate if rate else 0.0)
                        self.bytes += size
                        return self._free_at
                    self._changed.wait((remaining / rate - (now - since)) if rate else None)
                    # If the rate changed while waiting: count the bytes sent at the old rate, go on at the new one.
                    after = perf_counter()
                    if rate != self._rate():
                        remaining, since = max(0.0, remaining - max(0.0, after - since) * rate), after


class _Connection:
    """One connection through the link, with a reader and a writer thread for each direction."""

    def __init__(self, link: ShapedLink, near: socket.socket) -> None:
        self._link = link
        self._client_socket = near
        self._target_socket: socket.socket | None = None
        self._open_directions = 2
        self._lock = threading.Lock()
        self.is_cut = False

    def open(self) -> None:
        """Connect to the target and start the four threads that forward bytes both ways. Runs in its own thread."""
        try:
            self._link.wait_until(perf_counter(), lambda: self._link.shape.rtt_s, lambda: self.is_cut)
            self._target_socket = self._link.connect_to_target()
        except (_ConnectionReset, OSError) as error:
            log.debug("link: cannot reach the target: %r", error)
            self.reset()
            return
        if self.is_cut:
            self.reset()
            return
        self._client_socket.settimeout(None)
        for source, sink, pipe in (
            (self._client_socket, self._target_socket, self._link.up),
            (self._target_socket, self._client_socket, self._link.down),
        ):
            line: queue.Queue[tuple[float, bytes]] = queue.Queue(_QUEUE_CHUNKS)
            self._spawn(self._read, source, pipe, line)
            self._spawn(self._write, sink, line)

    def reset(self) -> None:
        """Reset the connection on both sides (TCP RST)."""
        with self._lock:
            self.is_cut = True
            sockets = [sock for sock in (self._client_socket, self._target_socket) if sock is not None]
        with self._link.changed:
            self._link.changed.notify_all()
        for sock in sockets:
            _abort(sock)
        self._link.remove_connection(self)

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=self._run_guarded, args=(target, *arguments), name="shaped-link", daemon=True).start()

    def _run_guarded(self, target: Callable[..., None], *arguments: object) -> None:
        """Run `target`; if it fails, reset the connection, so that the peer never hangs."""
        try:
            target(*arguments)
        except _ConnectionReset:
            pass
        except (OSError, ValueError) as error:  # ValueError: the socket was closed under a poll
            log.debug("link: %s", error)
            self.reset()

    def _read(self, source: socket.socket, pipe: _Direction, line: queue.Queue[tuple[float, bytes]]) -> None:
        """Read bytes, pass them through the pipe at its rate, and queue them for the writer. An empty chunk marks the
        end."""
        sent_at = perf_counter()
        while True:
            before = perf_counter()
            chunk = source.recv(pipe.quantum())
            now = perf_counter()
            # If the read did not block, the bytes have been in the kernel buffer since the previous chunk was read:
            # they were ready then, not now.
            arrived = sent_at if now - before < _BUFFERED_READ_S else now
            sent_at = pipe.transmit(len(chunk), arrived, lambda: self.is_cut) if chunk else max(arrived, sent_at)
            self._put(line, (sent_at, chunk))
            if not chunk:
                return

    def _put(self, line: queue.Queue[tuple[float, bytes]], entry: tuple[float, bytes]) -> None:
        """Queue one chunk for the writer. The queue is full while the sink does not read (back-pressure)."""
        while True:
            if self.is_cut:
                raise _ConnectionReset
            with contextlib.suppress(queue.Full):
                line.put(entry, timeout=0.1)
                return

    def _get(self, line: queue.Queue[tuple[float, bytes]]) -> tuple[float, bytes]:
        while True:
            if self.is_cut:
                raise _ConnectionReset
            with contextlib.suppress(queue.Empty):
                return line.get(timeout=1.0)

    def _write(self, sink: socket.socket, line: queue.Queue[tuple[float, bytes]]) -> None:
        """Write each chunk to the sink once its one-way delay has passed."""
        while True:
            sent_at, chunk = self._get(line)
            self._link.wait_until(sent_at, lambda: self._link.shape.rtt_s / 2, lambda: self.is_cut)
            if not chunk:
                break
            self._send(sink, chunk)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        self._on_direction_end()

    def _send(self, sink: socket.socket, chunk: bytes) -> None:
        """Send all of `chunk` without blocking: a blocked send would keep the socket open against a reset, so the reset
        flag is polled."""
        view = memoryview(chunk)
        while len(view):
            if self.is_cut or sink.fileno() < 0:
                raise _ConnectionReset
            try:
                view = view[sink.send(view, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(sink, select.POLLOUT)
                poll.poll(_SEND_POLL_MS)

    def _on_direction_end(self) -> None:
        """Count one finished direction; close the connection when both have finished."""
        with self._lock:
            self._open_directions -= 1
            if self._open_directions or self._target_socket is None:
                return
        for sock in (self._client_socket, self._target_socket):
            sock.close()
        self._link.remove_connection(self)


class ShapedLink:
    """A TCP proxy to `target_host:target_port` that behaves as `link` describes. `up` is the direction from the
    connecting client to the target."""

    def __init__(
        self, target_host: str, target_port: int, link: Link, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._target = (target_host, target_port)
        self._address = (host, port)
        self.shape = link
        self.changed = threading.Condition()
        self.up = _Direction(self.changed, lambda: self.shape.up_bytes_per_s)
        self.down = _Direction(self.changed, lambda: self.shape.down_bytes_per_s)
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()
        self._is_cut = False
        self._listener: socket.socket | None = None
        self._accept_thread: threading.Thread | None = None
        self._ended = threading.Event()

    def __enter__(self) -> ShapedLink:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """Port to connect to."""
        return self._address[1]

    def start(self) -> None:
        """Start listening. UsageError where the port is in use."""
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
        self._accept_thread = threading.Thread(target=self._accept, args=(listener,), name="shaped-link", daemon=True)
        self._accept_thread.start()

    def stop(self) -> None:
        """Stop listening and reset every connection."""
        self._ended.set()
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()
        if self._accept_thread is not None:
            self._accept_thread.join(5)

    def set_link(self, link: Link) -> None:
        """Change rates and delay at once, also for bytes in flight. A rate of 0 lets nothing through."""
        with self.changed:
            self.shape = link
            self.changed.notify_all()

    def replay_trace(self, trace: UplinkTrace, *, bin_s: float = 0.1, begins_s: float = 0.0) -> None:
        """Replay a bandwidth trace as the uplink's rate until `stop`, in steps of `bin_s`, repeating it when it ends.
        It starts `begins_s` into the trace. The downlink rate and the round-trip time stay."""
        self._follower = threading.Thread(
            target=self._replay_trace, args=(trace.rates_per_bin(bin_s), bin_s, perf_counter() - begins_s),
            name="uplink", daemon=True,
        )  # fmt: skip
        self._follower.start()

    def _replay_trace(self, rates: Sequence[float], bin_s: float, began: float) -> None:
        while not self._ended.is_set():
            step = int((perf_counter() - began) / bin_s)
            self.set_link(msgspec.structs.replace(self.shape, up_bytes_per_s=rates[step % len(rates)]))
            self._ended.wait(max(0.0, began + (step + 1) * bin_s - perf_counter()))

    def cut(self) -> None:
        """Reset every connection, and each new one until `restore`."""
        with self._lock:
            self._is_cut = True
            flows = list(self._connections)
        for flow in flows:
            flow.reset()

    def restore(self) -> None:
        """Accept new connections again."""
        with self._lock:
            self._is_cut = False

    def wait_until(self, since: float, delay_s: Callable[[], float], is_cut: Callable[[], bool]) -> None:
        """Block until `delay_s()` after `since`; the delay may change meanwhile. Raises _ConnectionReset when the
        connection was reset."""
        with self.changed:
            while True:
                if is_cut():
                    raise _ConnectionReset
                remaining = since + delay_s() - perf_counter()
                if remaining <= 0:
                    return
                self.changed.wait(remaining)

    def connect_to_target(self) -> socket.socket:
        """Open a connection to the target, with small buffers."""
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

    def remove_connection(self, connection: _Connection) -> None:
        """Remove a connection that has ended."""
        with self._lock:
            self._connections.discard(connection)

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
            flow = _Connection(self, near)
            with self._lock:
                refused = self._is_cut
                if not refused:
                    self._connections.add(flow)
            if refused:
                flow.reset()
            else:
                threading.Thread(target=flow.open, name="shaped-link", daemon=True).start()


def _bound_buffers(sock: socket.socket) -> None:
    """Set small buffers, which accepted sockets inherit."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)


def _abort(sock: socket.socket) -> None:
    """Close with a TCP reset instead of a FIN, and wake the threads that block on the socket."""
    # SO_LINGER with a timeout of 0 makes close() send a RST.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RD)  # SHUT_WR would send a FIN
    sock.close()
