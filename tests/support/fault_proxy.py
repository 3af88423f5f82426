"""A wire between an engine and an offload server that breaks after any number of bytes, keeps what it carries, or lies.

It knows no protocol: it counts bytes of a connection, each way, from its first on. `support.offload_processes` puts it
between a real engine and a real offload server of a tiny release.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from edgesplit.offload_client.circuit_breaker import CircuitBreaker
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.plan import Row
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.loader import load_slices
from edgesplit_agent.policy.link_estimator import LinkEstimate
from edgesplit_agent.releases.loaded_release import LoadedRelease, plan_for
from edgesplit_agent.serving.engine import Engine, Settings
from edgesplit_agent.worker.host import InProcess
from edgesplit_offload.server import OffloadServer
from support.agent_engine import eventually
from support.handmade_release import DEVICE_CLASS, DIGEST, HandmadeRelease

How = Literal["close", "reset", "silence"]
_RECEIVE = 65_536
A = np.array([[1, 2, 3, 4]], np.float32)
B = np.array([[10, 20, 30, 40]], np.float32)
OUT = 2 * (A + B)


@dataclass(frozen=True)
class Fault:
    """What becomes of a connection. A position is the number of bytes that are let through."""

    up: int | None = None
    down: int | None = None
    how: How = "close"
    rewrite: Callable[[bytes], bytes] | None = None
    """Takes the first response, whole, and gives what is sent in its place; then the connection is closed."""


SOUND = Fault()


class Wire:
    """A proxy to `target` on loopback. `fault` counts for connections that are opened from then on."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.fault = SOUND
        self.connections: list[Carried] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        threading.Thread(target=self._accept, name="wire", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def last(self) -> Carried:
        """The newest connection."""
        return self.connections[-1]

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self.connections:
            one.end(reset=False)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            one = Carried(near, far, self.fault)
            self.connections.append(one)
            for pump in (one.up, one.down):
                threading.Thread(target=pump, name="wire", daemon=True).start()


class Carried:
    """One connection, and what went over it."""

    def __init__(self, near: socket.socket, far: socket.socket, fault: Fault) -> None:
        self._near, self._far, self._fault = near, far, fault
        self.sent, self.received = bytearray(), bytearray()
        self.let_go = threading.Event()
        """Ends a silence: what was kept back is carried on."""
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def up(self) -> None:
        self._pump(self._near, self._far, self.sent, self._fault.up)

    def down(self) -> None:
        if self._fault.rewrite is None:
            self._pump(self._far, self._near, self.received, self._fault.down)
            return
        with contextlib.suppress(OSError):
            self.received += _response(self._far)
            self._near.sendall(self._fault.rewrite(bytes(self.received)))
        self.end(reset=False)

    def end(self, *, reset: bool) -> None:
        """Break both sides."""
        self.let_go.set()
        for sock in (self._near, self._far):
            with contextlib.suppress(OSError):
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    sock.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)
            sock.close()

    def _keep_silent(self) -> None:
        """Until it is let go, or the device has hung up."""
        poll = select.poll()
        poll.register(self._near, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        while not self.let_go.is_set():
            if poll.poll(20):
                raise ConnectionResetError

    def _pump(self, source: socket.socket, sink: socket.socket, carried: bytearray, most: int | None) -> None:
        try:
            while True:
                if most is not None and len(carried) >= most:
                    if self._fault.how != "silence":
                        self.end(reset=self._fault.how == "reset")
                        return
                    self._keep_silent()
                    most = None
                piece = source.recv(_RECEIVE if most is None else min(_RECEIVE, most - len(carried)))
                carried += piece
                if not piece:
                    break
                sink.sendall(piece)
            self.end(reset=False)
        except (OSError, ValueError):  # ValueError: the socket was closed under a poll
            self.end(reset=False)


def _response(sock: socket.socket) -> bytes:
    """One HTTP response with a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(sock)
    head = data.index(b"\r\n\r\n") + 4
    length = re.search(rb"(?i)content-length: *(\d+)", data[:head])
    assert length is not None
    while len(data) < head + int(length[1]):
        data += _some(sock)
    return data


def _some(sock: socket.socket) -> bytes:
    piece = sock.recv(_RECEIVE)
    if not piece:
        raise ConnectionResetError
    return piece


@dataclass
class OffloadHarness:
    """A real engine, a wire, and a real offload server."""

    engine: Engine
    wire: Wire
    remote: OffloadClient

    def anew(self, fault: Fault = SOUND) -> None:
        """The next request opens a connection, with this fault, and nothing is known against the cloud."""
        self.wire.fault = fault
        self.remote.renew()
        self.engine.own_target._breaker = CircuitBreaker()
        planned = next(iter(self.engine.serving.values())).plan.link
        self.engine.own_target._estimate = LinkEstimate.from_link(planned)

    def is_quiet(self) -> bool:
        """Nothing is held for requests that are over: no place, no connection, no thread at work."""
        engine = self.engine
        crews = (engine._offload_threads, engine._device_threads)
        busy = sum(crew.busy for crew in crews)
        return not (engine.queue.in_flight or engine.own_target.in_flight or self.remote._busy or busy)

    def settles(self) -> None:
        eventually("nothing is held any more", self.is_quiet)


@contextlib.contextmanager
def offload_world(
    folder: Path,
    *rows: str,
    server_tls: ssl.SSLContext | None = None,
    client_tls: ssl.SSLContext | None = None,
    between: Callable[[int], contextlib.AbstractContextManager[int]] | None = None,
    idle_probe_s: float | None = None,
    **settings: object,
) -> Iterator[OffloadHarness]:
    """Rows by name; the cut is always predicted the best. `between` puts something more before the wire, by port. The
    link is watched where `idle_probe_s` says how often: else what a wire carries is a test's requests alone."""
    release = HandmadeRelease(folder)
    server = OffloadServer(Path("unused"), b"", open_release=release.open, tls=server_tls)
    server.start()
    wire = Wire(server.port)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(between(wire.port)) if between else wire.port
        remote = OffloadClient(f"{'https' if client_tls else 'http'}://127.0.0.1:{port}", client_tls)
        engine = Engine(DEVICE_CLASS, remote, settings=Settings(idle_probe_s=idle_probe_s or 1e6, **settings))  # type: ignore[arg-type]
        engine.serve("handmade", loaded(release, rows))
        if idle_probe_s is not None:
            engine.start()
        try:
            yield OffloadHarness(engine, wire, remote)
        finally:
            engine.stop()
            wire.stop()
            server.stop(0.5)


def loaded(release: HandmadeRelease, names: tuple[str, ...]) -> LoadedRelease:
    """As an agent would load it."""
    made = release.manifest
    plan = made.plans[DEVICE_CLASS]
    rows = tuple(_priced(row) for row in plan.rows if row.name in names)
    manifest = msgspec.structs.replace(made, plans={DEVICE_CLASS: msgspec.structs.replace(plan, rows=rows)})
    programs = load_slices(manifest, release.slice_folder, DispatchingRuntime(threads=1))
    return LoadedRelease(DIGEST, manifest, plan_for(manifest, DEVICE_CLASS), InProcess(programs))


def _priced(row: Row) -> Row:
    """However slow a busy machine makes its link look, the cut is better than answering alone."""
    return msgspec.structs.replace(row, device_s=1e6) if row.is_local else msgspec.structs.replace(row, up_bytes=1)
