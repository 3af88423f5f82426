"""Runs inferences that operators send through the controller, one at a time, at low priority and with a bounded share
of the device's time.

A job is run only if the director signed it for this device and for the present session, once, before it expires
(`edgesplit.mqtt.remote_inference`). The network's thread only collects messages, within bounds; verifying, running and
answering happen on a thread of its own. The answer to a job that was cancelled is not sent. A replayed job gets no
reply, because no controller waits for one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from edgesplit import errors
from edgesplit.errors import (
    Busy,
    DeadlineExceeded,
    EdgeError,
    InferenceFailed,
    LinkError,
    MalformedMessage,
    TrustError,
    UsageError,
)
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.remote_inference import (
    MAX_REASON_CHARS,
    AnswerHead,
    BodyAssembly,
    BodyHead,
    CancelJob,
    InferenceJob,
    InferencePiece,
    JobFailed,
    JobProgress,
    Reply,
    Request,
    SignedJob,
    pieces,
    too_large,
)
from edgesplit.release.manifest import Signed
from edgesplit.terminal_text import shorten

log = logging.getLogger(__name__)

MAX_JOBS = 4
"""Jobs that are received, wait or run at a time; further ones are refused."""
TIME_SHARE = 0.25
"""Part of the time that jobs may take, where one follows the other: after each the next one waits."""
REPLAY_WINDOW_US = 60_000_000
"""A job numbered further below the newest accepted one is refused, in microseconds: processes of a controller may
number by different clocks."""
SEND_S = 10.0
"""Timeout of sending one message of an answer."""

Run = Callable[[str, bytes, "int | None", float], "tuple[bytes, int | None]"]
"""Runs a model on a request's body, given the length of its JSON part and the seconds until the deadline; returns the
answer's body and the length of its JSON part."""
SendReply = Callable[[int, Reply, "float | None"], None]
"""Sends a reply to this controller process, and with a timeout in seconds waits for the broker's acknowledgement."""


@dataclass
class JobLedger:
    """Which signed jobs were accepted, so that none is run twice. A new session begins a new ledger: jobs of another
    session are refused, so the ledger need not outlive the process."""

    session: int = 0
    newest: int = 0
    accepted: dict[str, int] = field(default_factory=dict)
    """Number by id, of the jobs within the window."""

    def accept(self, job: InferenceJob, session: int) -> None:
        """Note a verified job. LinkError if it was made for another session, TrustError for a replay."""
        if session != self.session:
            self.session, self.newest, self.accepted = session, 0, {}
        if job.session != session:
            raise LinkError("the device connected to the broker again meanwhile, and has run nothing: send it again")
        if job.id in self.accepted or job.number < self.newest - REPLAY_WINDOW_US:
            raise Replayed(f"job {job.id} was received before")
        self.newest = max(self.newest, job.number)
        self.accepted[job.id] = job.number
        oldest = self.newest - REPLAY_WINDOW_US
        self.accepted = {id_: number for id_, number in self.accepted.items() if number >= oldest}


class Replayed(TrustError):
    """A signed job that was accepted before."""


@dataclass(eq=False)
class _ReceivedJob:
    """A job being received, waiting or running. It is unverified until it runs."""

    signed: bytes
    job: InferenceJob
    deadline: float
    """By the monotonic clock."""
    assembly: BodyAssembly
    body: bytes | None = None
    is_cancelled: bool = False


class RemoteInferenceService:
    """Receives jobs by `on_message`, and runs them on its own thread."""

    def __init__(
        self,
        verify: Callable[[bytes], InferenceJob],
        run: Run,
        send: SendReply,
        session: Callable[[], int],
        *,
        allowed: bool = True,
        on_end: Callable[[EdgeError | None], None] = lambda error: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`verify` decodes what the director signed for this device. `session` returns the number of the present
        connection to the broker. `on_end` is called with the error of each job that ended, None for an answer."""
        self._verify = verify
        self._run = run
        self._send = send
        self._session = session
        self._allowed = allowed
        self._on_end = on_end
        self._clock = clock
        self._ledger = JobLedger()
        self._changed = threading.Condition()
        self._jobs: dict[str, _ReceivedJob] = {}
        self._rest_until = float("-inf")
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="remote-inference", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the present job, without waiting for it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def on_message(self, payload: bytes) -> None:
        """Take one message of the controller. Called on the network's thread; returns at once."""
        message: Request = messages.decode(payload, Request)  # type: ignore[arg-type]
        with self._changed:
            if isinstance(message, SignedJob):
                self._begin(message.signed)
            elif isinstance(message, InferencePiece):
                self._add_piece(message)
            elif isinstance(message, CancelJob) and (received := self._jobs.get(message.id)) is not None:
                received.is_cancelled = True
                if received.body is None:
                    del self._jobs[message.id]
            self._changed.notify_all()

    def _begin(self, signed: bytes) -> None:
        """Make room for a job's body. What is not verified yet decides only over these bounded buffers."""
        job = messages.decode(messages.decode(signed, Signed).payload, InferenceJob)
        now = self._clock()
        if job.id in self._jobs:
            return  # QoS 1 may deliver twice
        overdue = [id_ for id_, other in self._jobs.items() if other.body is None and other.deadline < now]
        for id_ in overdue:  # the rest of their body was lost
            del self._jobs[id_]
        if not self._allowed:
            self._refuse(job, UsageError("this device runs nothing for operators elsewhere (--no-remote-inference)"))
        elif len(self._jobs) >= MAX_JOBS:
            self._refuse(job, Busy(f"this device has {len(self._jobs)} inferences of operators already: try again"))
        else:
            self._jobs[job.id] = _ReceivedJob(signed, job, now + job.deadline_s, BodyAssembly(job.body))

    def _add_piece(self, piece: InferencePiece) -> None:
        received = self._jobs.get(piece.id)
        if received is None or received.body is not None:
            return
        try:
            received.body = received.assembly.add(piece)
        except MalformedMessage as error:
            del self._jobs[piece.id]
            self._refuse(received.job, error)
            return
        if received.body is not None:
            self._send(received.job.process, JobProgress(piece.id, "waiting"), None)

    def _loop(self) -> None:
        while (received := self._next()) is not None:
            try:
                self._process(received)
            except LinkError as error:
                log.info("inference %s could not be answered: %s", received.job.id, error)
            except Exception:
                log.exception("inference %s failed", received.job.id)
                self._refuse(received.job, InferenceFailed("the agent failed; its log says more"))
            finally:
                with self._changed:
                    self._jobs.pop(received.job.id, None)

    def _next(self) -> _ReceivedJob | None:
        """Wait for the next job whose body is whole and for the end of the rest; None when stopping. It stays among the
        jobs until it ends."""
        with self._changed:
            while not self._stopping:
                waiting = next((entry for entry in self._jobs.values() if entry.body is not None), None)
                rest_s = self._rest_until - self._clock()
                if waiting is not None and (rest_s <= 0 or waiting.is_cancelled or waiting.deadline < self._clock()):
                    return waiting
                self._changed.wait(None if waiting is None else max(0.0, min(rest_s, waiting.deadline - self._clock())))
            return None

    def _process(self, received: _ReceivedJob) -> None:
        """Verify a job, run it and send its answer, or the error; nothing where it was cancelled."""
        if received.is_cancelled:
            return
        process = received.job.process
        try:
            if received.deadline <= self._clock():
                share = f"inferences of operators get at most {TIME_SHARE:.0%} of this device's time"
                raise DeadlineExceeded(f"its turn did not come before the deadline: {share}")
            job = self._verify(received.signed)
            self._ledger.accept(job, self._session())
            self._send(process, JobProgress(job.id, "running"), None)
            body, json_bytes = self._timed_run(job, received)
        except Replayed as error:
            log.warning("dropped: %s", error)
        except EdgeError as error:
            self._on_end(error)
            self._refuse(received.job, error)
        else:
            self._on_end(None)
            replies: list[Reply] = [AnswerHead(job.id, BodyHead.of(body, json_bytes)), *pieces(job.id, body)]
            for message in replies:
                if not received.is_cancelled:
                    self._send(process, message, SEND_S)

    def _timed_run(self, job: InferenceJob, received: _ReceivedJob) -> tuple[bytes, int | None]:
        """Run a verified job within what is left of its time, then rest in proportion."""
        assert received.body is not None
        began = self._clock()
        try:
            answer = self._run(job.model, received.body, job.body.json_bytes, received.deadline - began)
        finally:
            self._rest_until = self._clock() + (self._clock() - began) * (1 / TIME_SHARE - 1)
        if len(answer[0]) > LIMITS.remote_inference_bytes:
            raise UsageError(too_large("an answer", len(answer[0])))
        return answer

    def _refuse(self, job: InferenceJob, error: EdgeError) -> None:
        """Tell the controller process why there is no answer."""
        reason = shorten(str(error), MAX_REASON_CHARS)
        self._send(job.process, JobFailed(job.id, errors.kind_of(error), reason), None)
