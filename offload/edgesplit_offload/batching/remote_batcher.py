"""The process's way to the one that gathers a kind of requests, where that is another: asked over a link, told by it.

Requests of a model that gains by company run together only in one process. Which one that is the supervisor says, when
a process has measured the gain and seeks it. Until then, and whenever that process is lost, requests run here: nobody
waits for company. A request that is asked for again after a link broke is only computed twice. All of it is done by the
thread that leads (`loop`).
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
from edgesplit_offload.frontend.event_loop import Loop
from edgesplit_offload.scheduling.queue import Job
from edgesplit_offload.scheduling.scheduler import GONE, LATE, LOOK_UP_S

log = logging.getLogger(__name__)

SEEK_AGAIN_S = 1.0
SILENT_S, SILENT_RUNS = 2.0, 4.0
"""A process that says nothing for so long, and for so many of the longest runs, while requests wait for it, hangs..."""
LEFT_ALONE_S = 30.0
"""...and is not sought again for so long. The supervisor ends it some time later."""
Here = Callable[[Job], None]
"""Runs a request in this process after all."""


class _Line:
    """A link to the process that gathers, and the requests that wait for it."""

    def __init__(self, elsewhere: Elsewhere, kind: str, sock: socket.socket, loop: Loop) -> None:
        self._elsewhere = elsewhere
        self._kind = kind
        self._link = ipc.Link(sock)
        self._loop = loop
        self._numbers = count(1)
        self._waiting: dict[int, tuple[Job, Here]] = {}
        self._heard_at = monotonic()
        self._will_flush = False

    def ask(self, model: str, job: Job, here: Here) -> None:
        """Send it, at the end of this turn."""
        described, buffers = ipc.described(job.given)
        left_s = None if job.deadline is None else max(0.0, job.deadline - monotonic())
        number, asker = next(self._numbers), 0 if job.habit is None else job.habit.number
        if not self._waiting:
            self._heard_at = monotonic()
        self._waiting[number] = job, here
        self._link.send(ipc.Run(number, model, left_s, job.client, asker, described), buffers)
        self._loop.look_by(min(job.end, job.arrived + LOOK_UP_S))
        if not self._will_flush:  # all that are read in one turn go by one call of the kernel
            self._will_flush = True
            self._loop.post(self._flush)

    def ready(self, _: int) -> None:
        """Something happened at the link."""
        try:
            for message, body in self._link.received():
                self._heard_at = monotonic()
                self._heard(message, body)
        except MalformedMessage as error:
            log.error("the process that gathers spoke nonsense: %s", error)
            self._link.close()
        self._flush()

    def look(self, now: float) -> float:
        """Let those go whose time is up or whose clients have gone; the moment of the next look, as far as it is
        known here."""
        for number, (job, _) in list(self._waiting.items()):
            if now > job.end or job.is_gone():
                del self._waiting[number]
                self._link.send(ipc.Leave(number))
                _over(job, DeadlineExceeded(LATE) if now > job.end else LinkError(GONE))
        patient_s = max((SILENT_RUNS * job.pace.seconds(job.pace.most) for job, _ in self._waiting.values()), default=0)
        if self._waiting and now - self._heard_at > max(SILENT_S, patient_s):
            log.warning("the process that gathers %s says nothing: its requests run here", self._kind[:12])
            self._elsewhere.leave_alone(self._kind)
            self._link.close()
        self._link.look(now)
        self._flush()
        ends = min((job.end for job, _ in self._waiting.values()), default=math.inf)
        return min(ends, now + LOOK_UP_S) if self._waiting or self._link.is_stuck else math.inf

    def _flush(self) -> None:
        self._will_flush = False
        self._link.flush()
        descriptor = self._link.descriptor
        if not self._link.is_over or descriptor < 0:
            return
        self._loop.forget(descriptor)
        self._link.release()
        self._elsewhere.lost(self._kind, self)
        waiting, self._waiting = self._waiting, {}
        for job, here in waiting.values():
            here(job)

    def _heard(self, message: ipc.Message, body: memoryview) -> None:
        if not isinstance(message, ipc.Ran | ipc.Failed):
            raise MalformedMessage(type(message).__name__)
        job, here = self._waiting.pop(message.number, (None, None))
        if job is None or here is None:
            return
        if isinstance(message, ipc.Failed):
            error = ipc.error_of(message)
            if isinstance(error, ipc.Alone):
                self._elsewhere.here(self._kind)
                here(job)
            else:
                _over(job, error)
            return
        job.value = ipc.tensors_of(message.tensors, body)
        job.run_s, job.together, job.leads = message.run_s, message.together, message.leads
        job.queue_s = max(0.0, monotonic() - job.arrived - job.run_s)
        self._elsewhere.told_load(message.load)
        _over(job, None)


@dataclass
class _Way:
    """What is known of one kind."""

    line: _Line | None = None
    is_here: bool = False
    seek_at: float = 0.0


class Elsewhere:
    """By kind, where its requests are gathered."""

    def __init__(self, seek: Callable[[str], object]) -> None:
        """`seek`: asks the supervisor, who answers by `here` or `there` some time."""
        self._seek = seek
        self._ways: dict[str, _Way] = {}
        self._loop: Loop | None = None
        self.told_load: Callable[[float], None] = lambda load: None
        """Told of the load at the process that ran a request."""

    def serve(self, loop: Loop, told_load: Callable[[float], None]) -> None:
        """Whose thread does all this. Before anything else."""
        self._loop, self.told_load = loop, told_load

    def here(self, kind: str) -> None:
        """This process gathers them. From any thread."""
        self._way(kind).is_here = True

    def there(self, kind: str, sock: socket.socket) -> None:
        """The process at the other end of `sock` does. From any thread."""
        assert self._loop is not None
        self._loop.post(partial(self._there, kind, sock, self._loop))

    def _there(self, kind: str, sock: socket.socket, loop: Loop) -> None:
        line = self._way(kind).line = _Line(self, kind, sock, loop)
        loop.watch(sock.fileno(), line.ready)

    def takes(self, kind: str, model: str, job: Job, here: Here) -> bool:
        """Whether the process that gathers this kind is to run it: then `job`'s home is told, as if it had been run
        here, or `here` is called after all."""
        line = self._line(kind)
        if line is None:
            return False
        job.arrived = monotonic()
        line.ask(model, job, here)
        return True

    def look(self, now: float) -> float:
        """At all that wait; the moment of the next look, as far as it is known here."""
        lines = [way.line for way in list(self._ways.values()) if way.line is not None]
        return min((line.look(now) for line in lines), default=math.inf)

    def leave_alone(self, kind: str) -> None:
        """Do not seek that one for a while."""
        self._way(kind).seek_at = monotonic() + LEFT_ALONE_S

    def lost(self, kind: str, line: _Line) -> None:
        """That line is over."""
        way = self._way(kind)
        if way.line is line:
            way.line = None

    def _line(self, kind: str) -> _Line | None:
        way = self._way(kind)
        if way.is_here or way.line is not None:
            return None if way.is_here else way.line
        now = monotonic()
        if now >= way.seek_at:
            way.seek_at = now + SEEK_AGAIN_S
            self._seek(kind)
        return None

    def _way(self, kind: str) -> _Way:
        return self._ways.setdefault(kind, _Way())


def _over(job: Job, error: EdgeError | None) -> None:
    """Its home is told."""
    job.error, job.is_over = error, True
    if job.home is not None:
        job.home.over([job])
