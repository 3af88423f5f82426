"""One worker process, from its start to its end: it is asked one thing at a time, watched, and ended for what it does.

Who asks waits until it is answered, until its own time is over, or until the worker has ended. An answer that nobody
waits for any more is waited for by the next who asks.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from edgesplit.crypto.slice_encryption import SliceInMemory, SliceSource
from edgesplit.errors import (
    Busy,
    DeadlineExceeded,
    EdgeError,
    InferenceFailed,
    MalformedMessage,
    ModelRefused,
    UsageError,
)
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Tensor, Timing
from edgesplit_agent.worker.dataflow import Flow
from edgesplit_agent.worker.direct_broker import LaneDesk
from edgesplit_agent.worker.host import Job, WorkerLost
from edgesplit_agent.worker.ipc import (
    Channel,
    Failed,
    Give,
    Open,
    Opened,
    Placed,
    Ran,
    Room,
    Run,
    Take,
    ToAgent,
    TooSmall,
    ToWorker,
)
from edgesplit_agent.worker.memory_maps import Shared
from edgesplit_agent.worker.proc_stats import vitals
from edgesplit_agent.worker.stderr_tail import LastWords
from edgesplit_agent.worker.tensor_allocator import Piece, TensorRoom
from edgesplit_agent.worker.tensor_refs import Memory, get, packed, put, room_for
from edgesplit_agent.worker.watchdog_policy import (
    Bounds,
    Task,
    Vitals,
    load_limit_s,
    looks_again_s,
    run_limit_s,
    verdict,
)

log = logging.getLogger(__name__)
MODULE = "edgesplit_agent.worker.child"
NO_ROOM = Room(0, 0, 0)
COPY_BELOW = 64 * 1024
"""Smaller outputs are copied, so that whoever keeps them does not keep shared memory."""
FOREVER_S = 1e6
TAKING_S = 60.0
"""One slice's description; a process that is starting reads nothing yet."""
AT_WORK = Task(0.0, math.inf, "answered lanes")
"""A worker that lanes have asked since it was looked at last is looked at again soon."""
DYING_S = 10.0
"""Between a socket that closes and the end of its process."""
_NURSERY = ThreadPoolExecutor(1, thread_name_prefix="worker-nursery")
"""Workers are started by a thread that lives as long as we do: the kernel ends them when the one that did ends."""


@dataclass(slots=True)
class _Asked:
    """What the worker is at, and what must stay in place until it has answered."""

    number: int
    kept: list[object]


class Worker:
    """A process. Everything but `run` is called by the thread that watches it."""

    def __init__(self, name: str, bounds: Bounds, room: TensorRoom) -> None:
        """EdgeError where it cannot be started."""
        self._bounds = bounds
        self._room = room
        self._turn = threading.Lock()
        self._asked: _Asked | None = None
        self._number = 0
        self.notes: tuple[str, ...] = ()
        self._task: Task | None = None
        self._watched: Task | None = None
        self._cpu_before_s = 0.0
        self._over = threading.Event()
        self._why = ""
        self.lanes = _desk(bounds)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel: Channel[ToAgent] = Channel(ours, ToAgent)  # type: ignore[arg-type]
        try:
            with theirs:
                self._process = _NURSERY.submit(_start, theirs.fileno()).result()
        except OSError as error:
            ours.close()
            self.lanes.close()
            raise EdgeError(f"no worker process can be started: {error.strerror}") from error
        self.words = LastWords(name, self._process.stdout)
        self._shared = Shared(self._channel)
        self._poll = select.poll()
        self._poll.register(self._channel.fileno(), 0)  # nothing but that the other end hangs up
        self._poll.register(self.words.fileno(), select.POLLIN)

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    @property
    def is_idle(self) -> bool:
        """Whether it is at nothing."""
        return self._task is None and self.lanes.task(perf_counter()) is None

    @property
    def why(self) -> str:
        """Why it ended; empty while it lives."""
        return self._why

    # What the watching thread does

    def load(self, slices: Mapping[str, tuple[Slice, SliceSource | None]]) -> None:
        """Hand it the files of all slices. ModelRefused for one that cannot be told of; WorkerLost."""
        self._begin("was handed the model's files", self._bounds.start_s)
        try:
            self.lanes.furnish(self._channel)
        except OSError as error:
            self._end("")
            raise WorkerLost(f"the model's worker process {self._why}") from error
        for slice_, source in slices.values():
            files = dict(source.descriptors) if isinstance(source, SliceInMemory) else {}
            folder = str(source.absolute()) if isinstance(source, Path) else ""
            try:
                self._tell(Take(slice_, folder, tuple(files)), tuple(files.values()), perf_counter() + TAKING_S)
            except MalformedMessage as error:
                raise ModelRefused(f"slice {slice_.name} has too many tensors: {error}") from error
            except OSError as error:
                self._end("takes no files" if isinstance(error, TimeoutError) else "")
                raise WorkerLost(f"the model's worker process {self._why}") from error

    def open(self, ask: Open, file_bytes: int) -> Opened:
        """Have it open them; ModelRefused where it cannot or did not live through it."""
        self._begin("opened the model's files", load_limit_s(self._bounds, file_bytes))
        try:
            self._tell(ask)
            while True:
                try:
                    answer = self._channel.receive(looks_again_s(self._task, perf_counter()))
                    break
                except TimeoutError:
                    self.look(0.0)
        except (OSError, EOFError, MalformedMessage) as error:
            self._end(f"spoke nonsense: {error}" if isinstance(error, MalformedMessage) else "")
            raise WorkerLost(f"the model's worker process {self._why}") from error
        finally:
            self._task = None
        if not isinstance(answer, (Opened, Failed)):
            self._end("spoke nonsense: it has opened nothing")
            raise WorkerLost(f"the model's worker process {self._why}")
        return _opened(answer)

    def look(self, wait_s: float | None = None) -> bool:
        """Wait a while for its end, then judge it. False once it has ended (`why` says of what)."""
        now = perf_counter()
        stirred = self.lanes.look()
        task = self._task or self.lanes.task(now) or (AT_WORK if stirred else None)
        wait_s = looks_again_s(task, now) if wait_s is None else wait_s
        for descriptor, _ in self._poll.poll(1000 * wait_s):
            if descriptor == self.words.fileno():
                if not self.words.read():
                    self._poll.unregister(descriptor)
            else:
                self._end("")
        if not self._over.is_set():
            seen = vitals(self.pid)
            if seen is None:
                self._end("")
            elif reason := self._judge(seen):
                self._end(reason)
        return not self._over.is_set()

    def _judge(self, seen: Vitals) -> str:
        # What it has answered it is not at any more, though nobody may have waited long enough to read it.
        task = None if select.select([self._channel], [], [], 0)[0] else self._task
        task = task or self.lanes.task(perf_counter())
        if task is not self._watched:
            self._watched, self._cpu_before_s = task, seen.cpu_s
        memory = self._bounds.memory_bytes + self._shared.bytes + self.lanes.shared_bytes
        return verdict(task, seen, self._cpu_before_s, perf_counter(), memory)

    def _end(self, why: str) -> None:
        """It goes now; who waits for it is told."""
        if self._over.is_set():
            return
        if why:
            self._process.kill()
        self._channel.shut()
        try:
            code = self._process.wait(DYING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._why = why or self._why or ended_by(code)
        self.words.read_rest()
        if self.words.last:
            self._why += f" ({self.words.last})"
        self.lanes.close()
        self._over.set()

    def dispose(self) -> None:
        """Close what is left of one that has ended, once nobody is in the middle of asking it."""
        with self._turn:
            self._channel.close()
            self.words.close()
            self._asked = None

    def kill(self, why: str) -> None:
        """End it, from any thread; the one that watches it sees that, and says why."""
        self._why = self._why or why
        self._process.kill()
        self._channel.shut()

    # What requests do

    def reopen(self, ask: Open, file_bytes: int) -> Opened:
        """Have it open everything another way, when it is free. ModelRefused, and then nothing is open; WorkerLost."""
        with self._turn:
            try:
                self._catch_up(math.inf)
                self._begin("opened the model's files", load_limit_s(self._bounds, file_bytes))
                self._tell(ask)
                answer = self._channel.receive(FOREVER_S)
                if not isinstance(answer, (Opened, Failed)):
                    raise MalformedMessage("it has opened nothing")
            except (OSError, EOFError, MalformedMessage) as error:
                raise self._lost(error) from error
            finally:
                self._task = None
        return _opened(answer)

    def run(self, job: Job, flow: Flow, timing: Timing) -> dict[str, Tensor]:
        """The job's tensors and what its slices gave; as `Host.run`, and Busy where there is no room for them."""
        if not self._turn.acquire(timeout=_left_s(job.until)):
            raise DeadlineExceeded("the model's worker was at something else until the deadline")
        try:
            self._catch_up(job.until)
            return self._run(job, flow, timing)
        except (OSError, EOFError, MalformedMessage) as error:
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the model did not answer before the deadline") from error
            raise self._lost(error) from error
        finally:
            if self._asked is None:
                self._task = None
            self._turn.release()

    def _catch_up(self, until: float) -> None:
        """Wait for the answer that somebody gave up waiting for."""
        while self._asked is not None:
            answer = self._channel.receive(_left_s(until))
            if isinstance(answer, TooSmall):
                self._tell(Give(answer.number, NO_ROOM))
            elif isinstance(answer, (Ran, Failed)) and answer.number == self._asked.number:
                self._asked = None
            else:
                raise MalformedMessage("an answer to nothing that was asked")

    def _run(self, job: Job, flow: Flow, timing: Timing) -> dict[str, Tensor]:
        self._shared.tidy()
        inputs, kept = self._placed({name: job.tensors[name] for name in flow.reads if name in job.tensors})
        piece = self._room.take(flow.room_bytes)
        self._number += 1
        room = Room(self._shared.number(piece.segment), piece.offset, len(piece.memory))
        ask = Run(self._number, tuple(job.order), inputs, flow.wants, room)
        self._asked = _Asked(ask.number, [kept, piece])
        self._begin("computed", run_limit_s(self._bounds, job.expected_s, _left_s(job.until), job.predicted_s))
        self._tell(ask, until=job.until)
        answer = self._channel.receive(_left_s(job.until))
        if isinstance(answer, TooSmall) and answer.number == ask.number:
            room, piece = self._more_room(answer, room, piece)
            flow.room_bytes = room.bytes
            self._asked.kept.append(piece)
            answer = self._channel.receive(_left_s(job.until))
        if not isinstance(answer, (Ran, Failed)) or answer.number != ask.number:
            raise MalformedMessage(f"{type(answer).__name__} in place of an answer")
        self._asked = None
        if isinstance(answer, Failed):
            # Only what decodes frames can tell that the application gave a bad one.
            raise UsageError(answer.text) if answer.kind == "usage" and flow.decodes else InferenceFailed(answer.text)
        take_times(answer, job, timing)
        self.notes = answer.notes
        return {**job.tensors, **outputs_of(answer.outputs, flow.wants, room, piece.memory)}

    def _placed(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[Placed, ...], list[object]]:
        """The inputs where the worker sees them, and what keeps them there: written now, unless they lie in shared
        memory already."""
        placed: list[Placed] = []
        outside: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            where = self._shared.place_of(tensor)
            if where is None:
                outside[name] = tensor
            else:
                placed.append(Placed(name, *where, tensor.nbytes, oip.datatype(tensor), tensor.shape))
        if not outside:
            return tuple(placed), [tensors]
        flat = {name: packed(one) for name, one in outside.items()}
        piece = self._room.take(room_for(flat))
        room = Room(self._shared.number(piece.segment), piece.offset, len(piece.memory))
        return (*placed, *put(outside, room, piece.memory)), [tensors, piece]

    def _more_room(self, asked: TooSmall, room: Room, piece: Piece) -> tuple[Room, Piece]:
        try:
            piece = self._room.take(asked.bytes)
        except Busy:
            self._tell(Give(asked.number, NO_ROOM))
            return room, piece
        room = Room(self._shared.number(piece.segment), piece.offset, len(piece.memory))
        self._tell(Give(asked.number, room))
        return room, piece

    def _begin(self, what: str, limit_s: float) -> None:
        self._task = Task(perf_counter(), limit_s, what)

    def _tell(self, message: ToWorker, files: tuple[int, ...] = (), until: float = math.inf) -> None:
        self._channel.send(message, files, _left_s(until))

    def _lost(self, error: Exception) -> WorkerLost:
        """Why nothing came: what it said was nonsense, or it has ended."""
        if isinstance(error, MalformedMessage):
            self.kill(f"spoke nonsense: {error}")
        else:
            self.kill("")
        self._over.wait(DYING_S)
        return WorkerLost(f"the model's worker process {self._why or 'ended'}")


def _desk(bounds: Bounds) -> LaneDesk:
    try:
        return LaneDesk(bounds)
    except OSError as error:
        raise EdgeError(f"no worker process can be started: {error.strerror}") from error


def _opened(answer: Opened | Failed) -> Opened:
    if isinstance(answer, Opened):
        return answer
    said = answer.text if answer.kind in ("refused", "usage") else f"a worker process could not load it: {answer.text}"
    raise ModelRefused(said)


def _left_s(until: float) -> float:
    """Seconds that may be waited: never none at all, which a socket would take for something else."""
    return min(FOREVER_S, max(0.001, until - perf_counter()))


def take_times(answer: Ran, job: Job, timing: Timing) -> None:
    """Take in what it says that its slices took; MalformedMessage where that cannot be."""
    known = {name: seconds for name, seconds in answer.seconds.items() if name in job.order}
    if len(known) != len(answer.seconds) or not all(0 <= one < FOREVER_S for one in known.values()):
        raise MalformedMessage("it says it took times that cannot be")
    timing.seconds.update(known)
    timing.late += min(answer.late, len(job.order))


def outputs_of(placed: tuple[Placed, ...], wants: tuple[str, ...], room: Room, memory: Memory) -> dict[str, Tensor]:
    """What it gave, where it was told to put it, and nothing else; MalformedMessage where it says otherwise."""
    found: dict[str, Tensor] = {}
    for one in placed:
        if one.segment != room.segment:
            raise MalformedMessage(f"the tensor {one.name[:80]!r} does not lie where it should")
        tensor = get(one, memory, room.offset)
        found[one.name] = tensor.copy() if tensor.nbytes < COPY_BELOW else tensor
    if len(placed) != len(wants) or found.keys() != set(wants):
        raise MalformedMessage("it gives other tensors than it was asked for")
    return found


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-m", MODULE, str(descriptor), str(os.getpid())]
    return subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(descriptor,),
        cwd="/", env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def ended_by(code: int) -> str:
    """What the end of a process says about it, for people."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
