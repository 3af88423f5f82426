"""The agent's side of one worker's lanes: opens and ends them, and collects what the worker records about them.

A lane that was ended answers only a request that had begun. Descriptors are closed with the client, with the lane's end
or with the worker, whichever comes first. Of the worker's records only plausible times and counts are used.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import select
import socket
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from edgesplit.client.direct.grant import READY, LaneTensor
from edgesplit.errors import Busy, EdgeError, UsageError
from edgesplit.shared_memory.segment import Segment
from edgesplit_agent.worker.direct import shared_state
from edgesplit_agent.worker.direct.shared_state import MAX_LANES, MAX_SLICES, LaneSharedState
from edgesplit_agent.worker.ipc import LANE_BYTES, Channel, OpenLane, PrepareLanes, ToAgent
from edgesplit_agent.worker.watchdog_policy import Bounds, Task, run_limit_s

SMOOTHING = 0.3
"""Weight of the latest mean in the exponential average of a request's duration."""
ANSWERING = Task(0.0, math.inf, "answered lanes")
"""Task of a worker that answered lane requests since the last check, so that it is checked again soon."""
NOT_A_STREAM = "a lane needs a connected Unix stream socket"
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


@dataclass(frozen=True)
class LaneResults:
    """What happened on lanes since the last collection."""

    answers: Sequence[tuple[float, float]] = ()
    """Latency and run seconds of each answer."""
    failures: int = 0
    slice_s: tuple[float, ...] = ()
    """Mean seconds of each slice of the order; empty if none is known."""


@dataclass(frozen=True)
class LaneSpec:
    """What the requests of a lane run, and who receives the results."""

    slices: tuple[str, ...]
    inputs: tuple[LaneTensor, ...]
    outputs: tuple[LaneTensor, ...]
    answers_at: int
    bytes: int
    expected_s: float | None
    """Previous duration in seconds; None if unknown."""
    predicted_s: float
    """Duration that the plan predicts, in seconds."""
    on_results: Callable[[LaneResults], None]
    """Receives the results, on any thread and under a lock; it must only queue them."""
    deliver: Callable[[], None] = lambda: None
    """Called without the lock after `on_results`, to process what was queued."""


@dataclass(frozen=True)
class _LaneEnd:
    """The agent's end of one lane."""

    sock: socket.socket
    """The worker's end of the socket: shutting it down leaves the worker nothing more to read."""
    shared_bytes: int


class LaneBroker:
    """Opens, ends and collects the lanes of one worker. Thread-safe."""

    def __init__(self, bounds: Bounds) -> None:
        """EdgeError where no descriptors are available."""
        self._bounds = bounds
        self._lock = threading.RLock()
        self._segment = Segment.create(-(-shared_state.BYTES // 4096) * 4096)
        self._state = LaneSharedState(self._segment.memory)
        try:
            self._lane_socket, self._worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self._segment.close()
            raise EdgeError(f"no worker process can be started: {error.strerror}") from error
        self._lane_socket.setblocking(False)
        self._ends: dict[int, _LaneEnd] = {}
        self._numbers = itertools.count(1)
        self._spec: LaneSpec | None = None
        self._expected_s: float | None = None
        self._collected_answers = self._collected_failures = self._runs = 0
        self._slice_s: list[float] = []
        self._task: Task | None = None
        self._checked_answers = 0
        self._closed = False

    def connect_worker(self, channel: Channel[ToAgent]) -> None:
        """Send the shared state and the lane socket to the worker, once."""
        with self._worker_end:
            channel.send(PrepareLanes(shared_state.BYTES), (self._segment.descriptor, self._worker_end.fileno()))

    @property
    def count(self) -> int:
        """Number of lanes."""
        return len(self._ends)

    @property
    def shared_bytes(self) -> int:
        """Bytes of memory that the worker shares with the agent and the clients for lanes."""
        return self._segment.size + sum(end.shared_bytes for end in list(self._ends.values()))

    def open(self, spec: LaneSpec, descriptor: int, *, shared: bool) -> None:
        """Open a lane over this socket, which stays the caller's to close. Busy; UsageError where the socket is
        unsuitable."""
        sock = _duplicate_stream(descriptor)
        try:
            self._open(spec, sock, shared=shared)
        except OSError as error:
            sock.close()
            raise Busy(f"no lane is available now: {error.strerror or error}") from error
        except BaseException:
            sock.close()
            raise

    def _open(self, spec: LaneSpec, sock: socket.socket, *, shared: bool) -> None:
        with self._lock:
            if self._closed:
                raise Busy("the model's worker has ended")
            if self._state.has_changed:
                raise Busy("the model's worker has changed since it opened the model")
            self._close_abandoned()
            slot = next((candidate for candidate in range(MAX_LANES) if candidate not in self._ends), None)
            if slot is None:
                raise Busy(f"{MAX_LANES} lanes are in use already")
            self._set_spec(spec)
            number = next(self._numbers)
            lane = OpenLane(
                number, slot, spec.slices, spec.inputs, spec.outputs, spec.answers_at, spec.bytes, shared
            )  # fmt: skip
            # The slot is opened last: a request that arrives earlier is answered with "ask the agent".
            self._send_lane(lane, sock)
            self._state.open_slot(slot, number)
            self._ends[slot] = _LaneEnd(sock, spec.bytes if shared else 0)

    def end_all(self) -> None:
        """End all lanes: no request that has not begun is answered any more, and the clients turn to the agent."""
        with self._lock:
            for slot, end in self._ends.items():
                # First the word that the worker checks before each request, then the socket: a request that has begun
                # is still answered, because only reading is shut down.
                self._state.close_slot(slot)
                with contextlib.suppress(OSError):
                    end.sock.shutdown(socket.SHUT_RD)
                end.sock.close()
            self._ends.clear()
            self.collect()

    def close(self) -> None:
        """The worker has ended: collect what it left, and release everything."""
        self._collect_and_deliver()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.end_all()
            self._lane_socket.close()
            self._worker_end.close()
            self._segment.close()

    def check(self, now: float) -> Task | None:
        """Close abandoned lanes and collect results. The run in progress, for the watchdog; `ANSWERING` if requests
        were answered since the last call."""
        with self._lock:
            self._close_abandoned()
            if self._state.has_changed:  # it no longer runs as its grants say
                self.end_all()
        answers = self._state.answer_count
        has_answered, self._checked_answers = answers != self._checked_answers, answers
        self._collect_and_deliver()
        return self.current_task(now) or (ANSWERING if has_answered else None)

    def set_predictions(self, predicted_s: float, scale: float) -> None:
        """Set the predicted seconds and the energy scale that lane answers contain from now on."""
        self._state.set_predictions(predicted_s, scale)

    def collect(self) -> None:
        """Deliver lane results that have not been reported to the engine yet."""
        with self._lock:
            state, order = self._state, self._spec
            if order is None or (
                state.answer_count == self._collected_answers and state.failure_count == self._collected_failures
            ):
                return
            answered, failed = state.answer_count, state.failure_count  # read once: the worker may add more meanwhile
            answers = state.answers_between(self._collected_answers, answered)
            failures = min(max(0, failed - self._collected_failures), shared_state.RING_ENTRIES)
            self._collected_answers, self._collected_failures = answered, failed
            slice_s = self._mean_slice_s(len(order.slices))
            if answers:
                mean_s = sum(run_s for _, run_s in answers) / len(answers)
                before = self._expected_s if self._expected_s is not None else mean_s
                self._expected_s = before + SMOOTHING * (mean_s - before)
            order.on_results(LaneResults(answers, failures, slice_s))

    def _collect_and_deliver(self) -> None:
        self.collect()
        if self._spec is not None:
            self._spec.deliver()

    def current_task(self, now: float) -> Task | None:
        """The lane run in progress, for the watchdog; the same object for as long as it lasts. None if there is
        none."""
        busy = self._state.current_run(now)
        if busy is None:
            self._task = None
            return None
        since, left_s = busy
        if self._task is None or since > self._task.since:
            predicted_s = self._spec.predicted_s if self._spec is not None else 0.0
            limit_s = run_limit_s(self._bounds, self._expected_s, left_s, predicted_s)
            self._task = Task(since, limit_s, "computed")
        return self._task

    def _set_spec(self, spec: LaneSpec) -> None:
        """Make `spec` current; results of another order are first delivered to its receiver."""
        before = self._spec
        if before is not None and before.slices == spec.slices:
            self._spec = spec
            return
        self.collect()
        self._spec, self._expected_s = spec, spec.expected_s

    def _send_lane(self, lane: OpenLane, sock: socket.socket) -> None:
        """Send the client its memory, and the worker both socket and memory. UsageError where it has too many
        tensors for a lane."""
        raw = msgspec.msgpack.encode(lane)
        if len(raw) > LANE_BYTES:
            raise UsageError(
                f"no lane for so many tensors: their description has {len(raw)} bytes, at most {LANE_BYTES}"
            )
        segment = Segment.create(lane.bytes) if lane.shared else None
        memory = [segment.descriptor] if segment is not None else []
        try:
            socket.send_fds(sock, [READY], memory, socket.MSG_DONTWAIT)
            socket.send_fds(self._lane_socket, [raw], [sock.fileno(), *memory])
        finally:
            if segment is not None:
                segment.close()

    def _close_abandoned(self) -> None:
        """Close the lanes whose client, or the worker, has closed the socket."""
        if not self._ends:
            return
        poll, by_descriptor = select.poll(), {end.sock.fileno(): slot for slot, end in self._ends.items()}
        for descriptor in by_descriptor:
            poll.register(descriptor, 0)
        for descriptor, events in poll.poll(0):
            if events & _GONE:
                slot = by_descriptor[descriptor]
                self._state.close_slot(slot)
                self._ends.pop(slot).sock.close()

    def _mean_slice_s(self, slice_count: int) -> tuple[float, ...]:
        """Mean seconds of each slice since the last call; empty if no run ended or the figures are implausible."""
        runs, sums = self._state.slice_totals
        before, self._slice_s = self._slice_s or [0.0] * MAX_SLICES, sums
        count, self._runs = runs - self._runs, runs
        if not 0 < count < shared_state.MAX_PLAUSIBLE_S:
            return ()
        means = tuple((now - then) / count for now, then in zip(sums[:slice_count], before, strict=False))
        return means if all(0.0 <= mean < shared_state.MAX_PLAUSIBLE_S for mean in means) else ()


class ReleaseLanes:
    """The lanes of one release: those of whichever worker process runs it now."""

    def __init__(self, current_broker: Callable[[], LaneBroker | None], on_answered: Callable[[], None]) -> None:
        """`current_broker` returns None while no worker is ready; `on_answered` is called when lanes have answered."""
        self._current_broker = current_broker
        self._on_answered = on_answered

    @property
    def count(self) -> int:
        """Number of lanes."""
        broker = self._current_broker()
        return broker.count if broker is not None else 0

    def open(self, spec: LaneSpec, descriptor: int, *, shared: bool) -> None:
        """Open a lane over this socket, as `LaneBroker.open`."""
        broker = self._current_broker()
        if broker is None:
            raise Busy("no worker process is ready")

        def on_results(results: LaneResults) -> None:
            if results.answers:
                self._on_answered()
            spec.on_results(results)

        broker.open(replace(spec, on_results=on_results), descriptor, shared=shared)

    def end_all(self) -> None:
        """End all lanes: no request that has not begun is answered over a lane any more."""
        broker = self._current_broker()
        if broker is not None:
            broker.end_all()

    def collect(self, predicted_s: float, scale: float) -> None:
        """Report the lanes' results now; set the predictions that lane answers contain from now on."""
        broker = self._current_broker()
        if broker is not None:
            broker.set_predictions(predicted_s, scale)
            broker.collect()


def _duplicate_stream(descriptor: int) -> socket.socket:
    """A duplicate of the descriptor as a socket. UsageError unless it is a connected Unix stream socket."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise UsageError(NOT_A_STREAM)
    try:
        sock = socket.socket(fileno=os.dup(descriptor))
    except OSError as error:
        raise Busy(f"no lane is available now: {error.strerror}") from error
    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM or listens:
        sock.close()
        raise UsageError(NOT_A_STREAM)
    return sock
