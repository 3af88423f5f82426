"""The batcher of a kind of requests: runs the requests that peer processes have read in batches with this process's
own.

Requests from a link wait in the same queue as this process's own, under the same rules; the results of a run are sent
back in one message per link. If a peer process ends, its waiting requests are dropped. Everything happens in the event
loop's leader, except loading a model.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic

from edgesplit.errors import EdgeError, MalformedMessage
from edgesplit_offload.batching import ipc
from edgesplit_offload.frontend.event_loop import EventLoop
from edgesplit_offload.models.remote_half import RemoteHalf
from edgesplit_offload.models.repository import ModelRepository
from edgesplit_offload.scheduling.arrivals import ArrivalStats
from edgesplit_offload.scheduling.queue import Job
from edgesplit_offload.scheduling.scheduler import LOOK_UP_S, Scheduler

_MAX_CONNECTIONS = 4_096
log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class RemoteJob(Job):
    """A request that was read by a peer process."""

    number: int = 0


class Batcher:
    """All links on which peer processes send requests."""

    def __init__(
        self, models: ModelRepository, scheduler: Scheduler, loop: EventLoop, on_requested: Callable[[RemoteHalf], None]
    ) -> None:
        """`on_requested` is called with each remote half that is requested, so that its batching benefit is measured
        some time."""
        self._models = models
        self._scheduler = scheduler
        self._loop = loop
        self._on_requested = on_requested
        self._peers: list[_PeerLink] = []

    def serve(self, sock: socket.socket) -> None:
        """Serve the requests that come by this link. From any thread."""
        self._loop.call_soon(partial(self._serve, sock))

    def on_timer(self, now: float) -> float:
        """Timer callback: give up peers that do not read; returns when to check again."""
        return min((host.on_timer(now) for host in list(self._peers)), default=math.inf)

    def _serve(self, sock: socket.socket) -> None:
        host = _PeerLink(self, self._loop, ipc.Link(sock))
        self._peers.append(host)
        self._loop.watch(sock.fileno(), host.on_event)

    def remove(self, peer: _PeerLink) -> None:
        """The link has ended."""
        self._peers.remove(peer)

    def admit(self, peer: _PeerLink, request: ipc.Run, body: memoryview) -> None:
        """Queue the peer's request. Raises `ipc.Alone` if batching does not pay here, and what the queue refuses it
        with."""
        model = self._models.open_model(request.model)
        half = None if model is None else model.half
        if half is not None and half.is_measured and half.run_times.max_batch == 1:
            # The sender then runs requests of this kind itself and does not ask again.
            raise ipc.Alone("batching does not pay here")
        deadline = None if request.left_s is None else monotonic() + request.left_s
        tensors = ipc.decode_tensors(request.tensors, body)
        if half is None or not half.is_loaded:
            # Loading blocks, so it is done in another thread, which passes the request back to the leader afterwards.
            self._loop.run_in_thread(partial(self._load, peer, request, body, deadline))
            return
        job = RemoteJob(
            tensors, half.run, half.run_times, request.client, deadline, owner=peer, number=request.number,
            arrival_stats=peer.arrival_stats(request.asker),
        )  # fmt: skip
        # Registered before it is queued, because queueing may finish it at once.
        peer.jobs[job.number] = job
        try:
            self._scheduler.submit(job)
        except BaseException:
            peer.jobs.pop(job.number, None)
            raise
        self._loop.wake_by(min(job.due_at, job.arrived + LOOK_UP_S))
        self._on_requested(half)

    def _load(self, peer: _PeerLink, request: ipc.Run, body: memoryview, deadline: float | None) -> None:
        """In another thread: load the model, then admit the request again."""
        try:
            self._models.model(request.model).half.load()
        except Exception as error:  # the sending process needs an answer in any case
            self._loop.call_soon(partial(peer.refuse, request.number, error))
            return
        left_s = None if deadline is None else max(0.0, deadline - monotonic())
        repeated = ipc.Run(request.number, request.model, left_s, request.client, request.asker, request.tensors)
        self._loop.call_soon(partial(peer.on_request, repeated, body))

    @property
    def load(self) -> float:
        """The load factor reported to clients."""
        return self._scheduler.load


class _PeerLink:
    """The peer process at the other end of one link."""

    def __init__(self, batcher: Batcher, loop: EventLoop, link: ipc.Link) -> None:
        self._batcher = batcher
        self._loop = loop
        self._link = link
        self.jobs: dict[int, RemoteJob] = {}
        self._arrival_stats: dict[int, ArrivalStats] = {}

    def arrival_stats(self, connection: int) -> ArrivalStats | None:
        """Return times of that connection of the peer's; None for number 0. As many are kept as a peer may have
        connections."""
        if not connection:
            return None
        if len(self._arrival_stats) >= _MAX_CONNECTIONS:
            self._arrival_stats.clear()
        return self._arrival_stats.setdefault(connection, ArrivalStats(connection))

    def on_event(self, _: int) -> None:
        """Event loop callback: the link is readable or writable."""
        try:
            for message, body in self._link.received():
                self._on_message(message, body)
        except MalformedMessage as error:
            log.error("a serving process violated the protocol: %s", error)
            self._link.close()
        self._flush()

    def on_timer(self, now: float) -> float:
        """Timer callback: check that the peer still reads; returns when to check again."""
        self._link.check_progress(now)
        self._check_end()
        return now + LOOK_UP_S if self._link.is_stuck else math.inf

    def on_done(self, jobs: Sequence[Job]) -> None:
        """These jobs of the link are done: send their results. From any thread."""
        results = [(job.number, *self._result_message(job)) for job in jobs if isinstance(job, RemoteJob)]
        if self._loop.is_leader:
            self._send_results(results)
        else:
            self._loop.call_soon(partial(self._send_results, results))

    def on_request(self, request: ipc.Run, body: memoryview) -> None:
        """The peer sent a request."""
        if self._link.is_closed:
            return
        try:
            self._batcher.admit(self, request, body)
        except MalformedMessage:
            raise
        except EdgeError as error:
            self.refuse(request.number, error)

    def refuse(self, number: int, error: Exception) -> None:
        """Answer the request with `error`."""
        self._link.send(ipc.encode_error(number, error))
        self._flush()

    def _send_results(self, results: Sequence[tuple[int, ipc.Message, Sequence[memoryview]]]) -> None:
        for number, message, buffers in results:
            self.jobs.pop(number, None)
            self._link.send(message, buffers)
        self._flush()

    def _on_message(self, message: ipc.Message, body: memoryview) -> None:
        if isinstance(message, ipc.Leave):
            job = self.jobs.get(message.number)
            if job is not None:
                job.is_client_gone = lambda: True
        elif isinstance(message, ipc.Run):
            self.on_request(message, body)
        else:
            raise MalformedMessage(type(message).__name__)

    def _flush(self) -> None:
        self._link.flush()
        if self._link.is_stuck:
            self._loop.wake_by(monotonic() + LOOK_UP_S)
        self._check_end()

    def _check_end(self) -> None:
        descriptor = self._link.descriptor
        if not self._link.is_closed or descriptor < 0:
            return
        self._loop.unwatch(descriptor)
        self._link.release()
        self._batcher.remove(self)
        # The peer will not receive any result: what has not begun is dropped by the scheduler.
        for job in self.jobs.values():
            job.is_client_gone = lambda: True

    def _result_message(self, job: RemoteJob) -> tuple[ipc.Message, Sequence[memoryview]]:
        if job.error is not None:
            return ipc.encode_error(job.number, job.error), ()
        try:
            described, buffers = ipc.encode_tensors(job.result)
        except (EdgeError, ValueError, TypeError) as error:  # the other results of the run must be sent nevertheless
            return ipc.encode_error(job.number, error), ()
        load = self._batcher.load
        return ipc.Ran(job.number, job.run_s, job.batch_size, job.counts_run, load, described), buffers
