"""The route to the batcher of a kind of requests, if that is another serving process.

Requests of a model that gains by batching are combined only in one process. The supervisor decides which, when a
process has measured the benefit and requests a batcher. Until then, and whenever the batcher is lost, requests run in
this process, without waiting for others. A request that is sent again because its link broke may be computed twice.
Everything happens in the event loop's leader.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import monotonic

from edgesplit.errors import DeadlineExceeded, EdgeError, LinkError, MalformedMessage
from edgesplit_offload.batching import ipc
from edgesplit_offload.frontend.event_loop import EventLoop
from edgesplit_offload.scheduling.queue import Job
from edgesplit_offload.scheduling.scheduler import CLIENT_GONE, LOOK_UP_S, QUEUE_TOO_SLOW

log = logging.getLogger(__name__)

SEEK_INTERVAL_S = 1.0
SILENT_S, SILENT_RUNS = 2.0, 4.0
"""The batcher counts as hung if it sends nothing for this long, and for `SILENT_RUNS` of the longest runs, while
requests wait for it."""
HUNG_PAUSE_S = 30.0
"""A hung batcher is not requested again for this long; the supervisor kills it eventually."""
RunHere = Callable[[Job], None]
"""Runs a request in this process instead."""


class BatcherLink:
    """A link to the batcher, and the requests that wait for it."""

    def __init__(self, routes: RemoteBatcher, kind: str, sock: socket.socket, loop: EventLoop) -> None:
        self._routes = routes
        self._kind = kind
        self._link = ipc.Link(sock)
        self._loop = loop
        self._numbers = count(1)
        self._waiting: dict[int, tuple[Job, RunHere]] = {}
        self._last_message_at = monotonic()
        self._will_flush = False

    def forward(self, model: str, job: Job, run_here: RunHere) -> None:
        """Queue the request for sending at the end of this turn."""
        described, buffers = ipc.encode_tensors(job.inputs)
        left_s = None if job.deadline is None else max(0.0, job.deadline - monotonic())
        number, asker = next(self._numbers), 0 if job.arrival_stats is None else job.arrival_stats.connection_number
        if not self._waiting:
            self._last_message_at = monotonic()
        self._waiting[number] = job, run_here
        self._link.send(ipc.Run(number, model, left_s, job.client, asker, described), buffers)
        self._loop.wake_by(min(job.due_at, job.arrived + LOOK_UP_S))
        if not self._will_flush:  # all requests read in one turn are sent by one system call
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def on_event(self, _: int) -> None:
        """Event loop callback: the link is readable or writable."""
        try:
            for message, body in self._link.received():
                self._last_message_at = monotonic()
                self._on_message(message, body)
        except MalformedMessage as error:
            log.error("the batcher violated the protocol: %s", error)
            self._link.close()
        self._flush()

    def on_timer(self, now: float) -> float:
        """Timer callback: cancel requests that are late or abandoned, detect a hung batcher; returns when to check
        again."""
        for number, (job, _) in list(self._waiting.items()):
            if now > job.due_at or job.is_client_gone():
                del self._waiting[number]
                self._link.send(ipc.Leave(number))
                _finish(job, DeadlineExceeded(QUEUE_TOO_SLOW) if now > job.due_at else LinkError(CLIENT_GONE))
        longest_s = max(
            (
                self._routes.silent_runs * job.run_times.expected_s(job.run_times.max_batch)
                for job, _ in self._waiting.values()
            ),
            default=0,
        )
        # A hung batcher: nothing received for `silent_s` and for several of its longest runs, although requests wait.
        # Closing the link makes all of them run in this process.
        if self._waiting and now - self._last_message_at > max(self._routes.silent_s, longest_s):
            log.warning("the batcher of %s does not respond: its requests run here", self._kind[:12])
            self._routes.pause(self._kind)
            self._link.close()
        self._link.check_progress(now)
        self._flush()
        first_due_at = min((job.due_at for job, _ in self._waiting.values()), default=math.inf)
        return min(first_due_at, now + LOOK_UP_S) if self._waiting or self._link.is_stuck else math.inf

    def _flush(self) -> None:
        self._will_flush = False
        self._link.flush()
        descriptor = self._link.descriptor
        if not self._link.is_closed or descriptor < 0:
            return
        self._loop.unwatch(descriptor)
        self._link.release()
        self._routes.on_link_closed(self._kind, self)
        waiting, self._waiting = self._waiting, {}
        for job, run_here in waiting.values():
            run_here(job)

    def _on_message(self, message: ipc.Message, body: memoryview) -> None:
        if not isinstance(message, ipc.Ran | ipc.Failed):
            raise MalformedMessage(type(message).__name__)
        job, run_here = self._waiting.pop(message.number, (None, None))
        if job is None or run_here is None:
            return
        if isinstance(message, ipc.Failed):
            error = ipc.decode_error(message)
            if isinstance(error, ipc.Alone):  # batching does not pay: run here, now and from now on
                self._routes.set_local(self._kind)
                run_here(job)
            else:
                _finish(job, error)
            return
        job.result = ipc.decode_tensors(message.tensors, body)
        job.run_s, job.batch_size, job.counts_run = message.run_s, message.together, message.leads
        job.queue_s = max(0.0, monotonic() - job.arrived - job.run_s)
        self._routes.on_remote_load(message.load)
        _finish(job, None)


@dataclass
class _Route:
    """The batcher of one kind, as far as it is known."""

    link: BatcherLink | None = None
    is_local: bool = False
    seek_at: float = 0.0


class RemoteBatcher:
    """Routes requests to the batcher of their kind."""

    def __init__(
        self, seek: Callable[[str], object], *, silent_s: float = SILENT_S, silent_runs: float = SILENT_RUNS
    ) -> None:
        """`seek` requests a batcher from the supervisor, which answers by `set_local` or `set_remote` some time.
        `silent_s`, `silent_runs`: when a batcher counts as hung."""
        self._seek = seek
        self.silent_s, self.silent_runs = silent_s, silent_runs
        self._routes: dict[str, _Route] = {}
        self._loop: EventLoop | None = None
        self.on_remote_load: Callable[[float], None] = lambda load: None
        """Called with the load factor of the process that ran a request."""

    def bind(self, loop: EventLoop, on_remote_load: Callable[[float], None]) -> None:
        """Set the loop in which everything happens. Called once, before any other method."""
        self._loop, self.on_remote_load = loop, on_remote_load

    def set_local(self, kind: str) -> None:
        """This process is the batcher of this kind. From any thread."""
        self._route(kind).is_local = True

    def set_remote(self, kind: str, sock: socket.socket) -> None:
        """The process at the other end of `sock` is the batcher of this kind. From any thread."""
        assert self._loop is not None
        self._loop.call_soon(partial(self._set_remote, kind, sock, self._loop))

    def _set_remote(self, kind: str, sock: socket.socket, loop: EventLoop) -> None:
        link = self._route(kind).link = BatcherLink(self, kind, sock, loop)
        loop.watch(sock.fileno(), link.on_event)

    def try_forward(self, kind: str, model: str, job: Job, run_here: RunHere) -> bool:
        """Try to forward the job to the batcher of its kind; False if it must run here.

        A forwarded job is finished like one run here: its owner is notified, or `run_here` is called if the batcher was
        lost.
        """
        line = self._link_for(kind)
        if line is None:
            return False
        job.arrived = monotonic()
        line.forward(model, job, run_here)
        return True

    def on_timer(self, now: float) -> float:
        """Timer callback for all links; returns when to check again."""
        links = [route.link for route in list(self._routes.values()) if route.link is not None]
        return min((link.on_timer(now) for link in links), default=math.inf)

    def pause(self, kind: str) -> None:
        """Do not request a batcher of this kind for `HUNG_PAUSE_S`."""
        self._route(kind).seek_at = monotonic() + HUNG_PAUSE_S

    def on_link_closed(self, kind: str, link: BatcherLink) -> None:
        """The link has ended."""
        route = self._route(kind)
        if route.link is link:
            route.link = None

    def _link_for(self, kind: str) -> BatcherLink | None:
        route = self._route(kind)
        if route.is_local or route.link is not None:
            return None if route.is_local else route.link
        now = monotonic()
        # No batcher is known: request one from the supervisor at intervals, and run here meanwhile.
        if now >= route.seek_at:
            route.seek_at = now + SEEK_INTERVAL_S
            self._seek(kind)
        return None

    def _route(self, kind: str) -> _Route:
        return self._routes.setdefault(kind, _Route())


def _finish(job: Job, error: EdgeError | None) -> None:
    """Finish the job and notify its owner."""
    job.error, job.is_done = error, True
    if job.owner is not None:
        job.owner.on_done([job])
