"""The process's way to the one that gathers a kind of requests, where that is another: asked over a link, waited for.

Requests of a model that gains by company run together only in one process. Which one that is the supervisor says, when
a process has measured the gain and seeks it. Until then, and whenever that process is lost, requests run here: nobody
waits for company. A request that is asked for again after a link broke is only computed twice.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from time import monotonic

from edgesplit.errors import DeadlineExceeded, LinkError, MalformedMessage
from edgesplit_offload import hop
from edgesplit_offload.turns import GONE, LATE, patience_s
from edgesplit_offload.waiting import Job

log = logging.getLogger(__name__)

SEEK_AGAIN_S = 1.0
SILENT_S, SILENT_RUNS = 2.0, 4.0
"""A process that says nothing for so long, and for so many of the longest runs, while requests wait for it, hangs..."""
LEFT_ALONE_S = 30.0
"""...and is not sought again for so long. The supervisor ends it some time later."""


class _Lost(Exception):
    """The link broke before an answer came."""


class _Silent(Exception):
    """The other process hangs."""


class _Line:
    """A link to the process that gathers, and the requests that wait for it."""

    def __init__(self, sock: socket.socket, told_load: Callable[[float], None], lost: Callable[[], None]) -> None:
        self._link = hop.Link(sock)
        self._told_load = told_load
        self._lost = lost
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._waiting: dict[int, Job] | None = {}
        self.heard_at = monotonic()
        """When the other end said something."""
        threading.Thread(target=self._listen, name="hop", daemon=True).start()

    def ask(self, model: str, job: Job) -> int:
        """Send it, without waiting; its number. `_Lost` where the link has broken already."""
        described, buffers = hop.described(job.given)
        left_s = None if job.deadline is None else max(0.0, job.deadline - monotonic())
        with self._lock:
            if self._waiting is None:
                raise _Lost
            number = next(self._numbers)
            self._waiting[number] = job
        self._link.send([(hop.Run(number, model, left_s, job.client, described), buffers)])
        return number  # one that could not be sent is told with the others, when the listening thread sees the end

    def end(self) -> None:
        """Whoever waits for it is told that it is lost."""
        self._link.end()

    def forget(self, number: int) -> bool:
        """Whether that one was waited for until now, and is not any more."""
        with self._lock:
            return self._waiting is not None and self._waiting.pop(number, None) is not None

    def leave(self, number: int) -> None:
        """Nobody waits for that one any more: the other end is told."""
        if self.forget(number):
            self._link.send([(hop.Leave(number), ())])

    def _listen(self) -> None:
        try:
            for message, body in self._link.received():
                self.heard_at = monotonic()
                self._heard(message, body)
        except MalformedMessage as error:
            log.error("the process that gathers spoke nonsense: %s", error)
        finally:
            self._link.close()
            self._lost()
            with self._lock:
                left, self._waiting = self._waiting or {}, None
            for job in left.values():
                job.error = _Lost()
                job.wake.release()

    def _heard(self, message: hop.Message, body: memoryview) -> None:
        if not isinstance(message, hop.Ran | hop.Failed):
            raise MalformedMessage(type(message).__name__)
        with self._lock:
            job = self._waiting.pop(message.number, None) if self._waiting is not None else None
        if job is None:
            return
        if isinstance(message, hop.Failed):
            job.error = hop.error_of(message)
        else:
            job.value = hop.tensors_of(message.tensors, body)
            job.run_s, job.together, job.leads = message.run_s, message.together, message.leads
            self._told_load(message.load)
        job.wake.release()


@dataclass
class _Way:
    """What is known of one kind."""

    line: _Line | None = None
    is_here: bool = False
    seek_at: float = 0.0


class Elsewhere:
    """By kind, where its requests are gathered. Thread-safe."""

    def __init__(self, seek: Callable[[str], object]) -> None:
        """`seek`: asks the supervisor, who answers by `here` or `there` some time."""
        self._seek = seek
        self._lock = threading.Lock()
        self._ways: dict[str, _Way] = {}
        self.told_load: Callable[[float], None] = lambda load: None
        """Told of the load at the process that ran a request."""

    def here(self, kind: str) -> None:
        """This process gathers them."""
        with self._lock:
            self._ways.setdefault(kind, _Way()).is_here = True

    def there(self, kind: str, sock: socket.socket) -> None:
        """The process at the other end of `sock` does."""
        with self._lock:
            way = self._ways.setdefault(kind, _Way())
            way.line = _Line(sock, self.told_load, lambda: self._lost(kind))

    def answered(self, kind: str, model: str, job: Job) -> bool:
        """Whether the process that gathers this kind has run it: `job` has its value. False: it is to be run here.

        Whatever that process refused it for, DeadlineExceeded, and LinkError where nobody waits for the result."""
        line = self._line(kind)
        if line is None:
            return False
        job.arrived = monotonic()
        try:
            self._wait(line, line.ask(model, job), job)
        except _Lost:
            return False
        except _Silent:
            log.warning("the process that gathers %s says nothing: its requests run here for a while", kind[:12])
            with self._lock:
                self._ways[kind].seek_at = monotonic() + LEFT_ALONE_S
            line.end()
            return False
        if isinstance(job.error, _Lost | hop.Alone):
            if isinstance(job.error, hop.Alone):
                self.here(kind)
            job.error = None
            return False
        if job.error is not None:
            raise job.error
        job.queue_s = max(0.0, monotonic() - job.arrived - job.run_s)
        return True

    @staticmethod
    def _wait(line: _Line, number: int, job: Job) -> None:
        patient_s = max(SILENT_S, SILENT_RUNS * job.pace.seconds(job.pace.most))
        while not job.wake.acquire(timeout=patience_s(job)):
            now = monotonic()
            if now > job.end or job.is_gone():
                line.leave(number)
                raise DeadlineExceeded(LATE) if now > job.end else LinkError(GONE)
            if now - max(job.arrived, line.heard_at) > patient_s and line.forget(number):
                raise _Silent

    def _line(self, kind: str) -> _Line | None:
        with self._lock:
            way = self._ways.setdefault(kind, _Way())
            now = monotonic()
            if way.is_here or way.line is not None or now < way.seek_at:
                return None if way.is_here else way.line
            way.seek_at = now + SEEK_AGAIN_S
        self._seek(kind)
        return None

    def _lost(self, kind: str) -> None:
        with self._lock:
            self._ways[kind].line = None
