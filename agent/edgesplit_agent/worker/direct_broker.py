"""The agent's side of one worker's lanes: grants them, ends them, reads what the worker notes of them.

A lane that is ended is not answered by anything that had not begun; what had begun is. Descriptors go with the client,
with the lane's end or with the worker, whichever is first. Of the worker only times and counts are taken, as far as
they can be.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from edgesplit.client.direct.grant import READY, LaneTensor
from edgesplit.errors import Busy, UsageError
from edgesplit.shared_memory.segment import Segment
from edgesplit_agent.worker import direct_shared_state
from edgesplit_agent.worker.direct_shared_state import MOST_LANES, MOST_SLICES, LaneWords
from edgesplit_agent.worker.ipc import Channel, Desk, Lane, ToAgent
from edgesplit_agent.worker.watchdog_policy import Bounds, Task, run_limit_s

SMOOTHING = 0.3
NO_STREAM = "a lane is a connected Unix stream socket"
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


@dataclass(frozen=True)
class LaneNotes:
    """What came of lanes since the last notes."""

    answers: Sequence[tuple[float, float]] = ()
    """Latency and run of each, in seconds."""
    failures: int = 0
    slice_s: tuple[float, ...] = ()
    """What each slice of the order took, on average."""


@dataclass(frozen=True)
class LaneOrder:
    """What is asked on a lane, for the worker."""

    order: tuple[str, ...]
    inputs: tuple[LaneTensor, ...]
    outputs: tuple[LaneTensor, ...]
    answers_at: int
    bytes: int
    expected_s: float | None
    """What it took before."""
    predicted_s: float
    """What it should take by the plan."""
    told: Callable[[LaneNotes], None]
    """Told what came of it, by any thread; it only takes it in."""
    noted: Callable[[], None] = lambda: None
    """Called when there is time to do something about it."""


@dataclass(frozen=True)
class _End:
    sock: socket.socket
    """The worker's end: shut down, it gives the worker nothing more to read."""
    shared_bytes: int


class LaneDesk:
    """Thread-safe."""

    def __init__(self, bounds: Bounds) -> None:
        """OSError where there are no descriptors for it."""
        self._bounds = bounds
        self._lock = threading.RLock()
        self._segment = Segment.made(-(-direct_shared_state.BYTES // 4096) * 4096)
        self._words = LaneWords(self._segment.memory)
        try:
            self._door, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            self._segment.close()
            raise
        self._door.setblocking(False)
        self._ends: dict[int, _End] = {}
        self._numbers = itertools.count(1)
        self._order: LaneOrder | None = None
        self._expected_s: float | None = None
        self._taken = self._failures = self._runs = 0
        self._slice_s: list[float] = []
        self._task: Task | None = None
        self._stirred_at = 0
        self._closed = False

    def furnish(self, channel: Channel[ToAgent]) -> None:
        """Tell the worker of it, once."""
        with self._theirs:
            channel.send(Desk(direct_shared_state.BYTES), (self._segment.descriptor, self._theirs.fileno()))

    @property
    def count(self) -> int:
        """Lanes there are."""
        return len(self._ends)

    @property
    def shared_bytes(self) -> int:
        """Memory that the worker shares with their clients."""
        return self._segment.size + sum(end.shared_bytes for end in list(self._ends.values()))

    def open(self, order: LaneOrder, descriptor: int, *, shared: bool) -> None:
        """A lane over this socket, which stays the caller's to close. Busy; UsageError where it is no such socket."""
        sock = _stream(descriptor)
        try:
            self._open(order, sock, shared=shared)
        except OSError as error:
            sock.close()
            raise Busy(f"no lane can be had now: {error.strerror or error}") from error
        except BaseException:
            sock.close()
            raise

    def _open(self, order: LaneOrder, sock: socket.socket, *, shared: bool) -> None:
        with self._lock:
            if self._closed:
                raise Busy("the model's worker has ended")
            if self._words.noted:
                raise Busy("the model's worker does not run as it was opened")
            self._tidy()
            place = next((one for one in range(MOST_LANES) if one not in self._ends), None)
            if place is None:
                raise Busy(f"{MOST_LANES} lanes are in use already")
            self._begin(order)
            number = next(self._numbers)
            lane = Lane(
                number, place, order.order, order.inputs, order.outputs, order.answers_at, order.bytes, shared
            )  # fmt: skip
            self._introduce(lane, sock)
            self._words.open(place, number)
            self._ends[place] = _End(sock, order.bytes if shared else 0)

    def end(self) -> None:
        """No request that has not begun is answered by any lane that there is now; the clients ask the agent."""
        with self._lock:
            for place, end in self._ends.items():
                self._words.shut(place)
                with contextlib.suppress(OSError):
                    end.sock.shutdown(socket.SHUT_RD)
                end.sock.close()
            self._ends.clear()
            self.note()

    def close(self) -> None:
        """The worker has ended: what it left is told, and everything given up."""
        self._note_now()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.end()
            self._door.close()
            self._theirs.close()
            self._segment.close()

    def look(self) -> bool:
        """Give up what clients have left, and have noted what came. True where requests came since the last look."""
        with self._lock:
            self._tidy()
            if self._words.noted:
                self.end()
        stirred, self._stirred_at = self._stirred_at != self._words.answers, self._words.answers
        self._note_now()
        return stirred

    def tell(self, predicted_s: float, scale: float) -> None:
        """What answers are to say from now on of the plan and of power."""
        self._words.tell(predicted_s, scale)

    def note(self) -> None:
        """What came of lanes and was not told yet is told."""
        with self._lock:
            words, order = self._words, self._order
            if order is None or (words.answers == self._taken and words.failures == self._failures):
                return
            answered, failed = words.answers, words.failures  # more may come while they are read
            answers = words.between(self._taken, answered)
            failures = min(max(0, failed - self._failures), direct_shared_state.RING)
            self._taken, self._failures = answered, failed
            slice_s = self._slices_since(len(order.order))
            if answers:
                mean_s = sum(run_s for _, run_s in answers) / len(answers)
                before = self._expected_s if self._expected_s is not None else mean_s
                self._expected_s = before + SMOOTHING * (mean_s - before)
            order.told(LaneNotes(answers, failures, slice_s))

    def _note_now(self) -> None:
        self.note()
        order = self._order
        if order is not None:
            order.noted()

    def task(self, now: float) -> Task | None:
        """What the worker is at for a lane; the same object for as long as it is."""
        busy = self._words.busy(now)
        if busy is None:
            self._task = None
            return None
        since, left_s = busy
        if self._task is None or since > self._task.since:
            predicted_s = self._order.predicted_s if self._order is not None else 0.0
            limit_s = run_limit_s(self._bounds, self._expected_s, left_s, predicted_s)
            self._task = Task(since, limit_s, "computed")
        return self._task

    def _begin(self, order: LaneOrder) -> None:
        """What was noted of another order is told to whom it concerns."""
        before = self._order
        if before is not None and before.order == order.order:
            self._order = order
            return
        self.note()
        self._order, self._expected_s = order, order.expected_s

    def _introduce(self, lane: Lane, sock: socket.socket) -> None:
        """The client gets its memory, the worker both."""
        raw = msgspec.msgpack.encode(lane)
        segment = Segment.made(lane.bytes) if lane.shared else None
        memory = [segment.descriptor] if segment is not None else []
        try:
            socket.send_fds(sock, [READY], memory, socket.MSG_DONTWAIT)
            socket.send_fds(self._door, [raw], [sock.fileno(), *memory])
        finally:
            if segment is not None:
                segment.close()

    def _tidy(self) -> None:
        """Those whose clients have gone, or the worker has closed, are given up."""
        if not self._ends:
            return
        poll, by_descriptor = select.poll(), {end.sock.fileno(): place for place, end in self._ends.items()}
        for descriptor in by_descriptor:
            poll.register(descriptor, 0)
        for descriptor, what in poll.poll(0):
            if what & _GONE:
                place = by_descriptor[descriptor]
                self._words.shut(place)
                self._ends.pop(place).sock.close()

    def _slices_since(self, many: int) -> tuple[float, ...]:
        """What each slice took on average since this was asked last."""
        runs, sums = self._words.slice_s
        before, self._slice_s = self._slice_s or [0.0] * MOST_SLICES, sums
        count, self._runs = runs - self._runs, runs
        if not 0 < count < direct_shared_state.LONGEST_S:
            return ()
        means = tuple((now - then) / count for now, then in zip(sums[:many], before, strict=False))
        return means if all(0.0 <= one < direct_shared_state.LONGEST_S for one in means) else ()


def _stream(descriptor: int) -> socket.socket:
    """A descriptor of ours for the same socket. UsageError where it is none that a lane could be."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise UsageError(NO_STREAM)
    try:
        sock = socket.socket(fileno=os.dup(descriptor))
    except OSError as error:
        raise Busy(f"no lane can be had now: {error.strerror}") from error
    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM or listens:
        sock.close()
        raise UsageError(NO_STREAM)
    return sock
