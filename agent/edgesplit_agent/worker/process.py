"""One worker process, from its start to its end: it runs one request at a time, is watched, and is killed for
misbehaving.

A caller waits until its request is answered, its deadline passes, or the worker has ended. If the caller gives up, the
answer stays pending, and the next caller waits for it first.
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
from edgesplit_agent.worker import ipc
from edgesplit_agent.worker.dataflow import Dataflow
from edgesplit_agent.worker.direct.broker import LaneBroker
from edgesplit_agent.worker.host import SliceRun, WorkerLost
from edgesplit_agent.worker.memory_maps import MemoryMaps
from edgesplit_agent.worker.proc_stats import read_process_stats
from edgesplit_agent.worker.stderr_tail import StderrTail
from edgesplit_agent.worker.tensor_allocator import TensorAllocator, TensorBlock
from edgesplit_agent.worker.tensor_refs import Memory, pack, packed_bytes, read_tensor, write_tensors
from edgesplit_agent.worker.watchdog_policy import (
    Bounds,
    ProcessStats,
    Task,
    check_interval_s,
    load_limit_s,
    run_limit_s,
    watchdog_verdict,
)

log = logging.getLogger(__name__)
MODULE = "edgesplit_agent.worker.child"
"""Module that the worker process runs."""
NO_BUFFER = ipc.SharedBuffer(0, 0, 0)
COPY_BELOW = 64 * 1024
"""Smaller outputs are copied, so that a cache that keeps them does not keep shared memory."""
FOREVER_S = 1e6
"""Stands for no timeout, and bounds plausible durations."""
SEND_SLICE_TIMEOUT_S = 60.0
"""Timeout in seconds of sending one slice's description: a starting process does not read yet."""
EXIT_TIMEOUT_S = 10.0
"""Timeout in seconds between the closing of a worker's socket and its end."""
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="worker-nursery")
"""Thread that starts all workers: the kernel ends a child when the thread that started it ends (PR_SET_PDEATHSIG), so
it must live as long as this process."""


@dataclass(slots=True)
class _PendingRun:
    """A run that the worker has not answered yet, and the objects that must stay alive until it has."""

    number: int
    keep_alive: list[object]


class Worker:
    """One worker process. All methods but `run`, `reopen` and `kill` belong to the thread that watches it."""

    def __init__(self, name: str, bounds: Bounds, allocator: TensorAllocator) -> None:
        """Start the process. EdgeError where that fails."""
        self._bounds = bounds
        self._allocator = allocator
        self._request_lock = threading.Lock()
        self._pending: _PendingRun | None = None
        self._number = 0
        self.notes: tuple[str, ...] = ()
        self._task: Task | None = None
        self._watched_task: Task | None = None
        self._cpu_before_s = 0.0
        self._ended = threading.Event()
        self.end_reason = ""
        """Why it ended; empty while it lives."""
        self.lanes = LaneBroker(bounds)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel: ipc.Channel[ipc.ToAgent] = ipc.Channel(ours, ipc.ToAgent)  # type: ignore[arg-type]
        try:
            with theirs:
                self._process = _STARTER.submit(_start_process, theirs.fileno()).result()
        except OSError as error:
            ours.close()
            self.lanes.close()
            raise EdgeError(f"no worker process can be started: {error.strerror}") from error
        self.output = StderrTail(name, self._process.stdout)
        self._maps = MemoryMaps(self._channel)
        self._poll = select.poll()
        self._poll.register(self._channel.fileno(), 0)  # hang-up only: answers are read by the request threads
        self._poll.register(self.output.fileno(), select.POLLIN)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    @property
    def is_idle(self) -> bool:
        """Whether neither the agent nor a lane has a run in progress."""
        return self._task is None and self.lanes.current_task(perf_counter()) is None

    # Called by the watching thread

    def load(self, slices: Mapping[str, tuple[Slice, SliceSource | None]]) -> None:
        """Send the files of all slices. ModelRefused for a slice whose description is too long; WorkerLost."""
        self._start_task("received the model's files", self._bounds.start_s)
        try:
            self.lanes.connect_worker(self._channel)
        except OSError as error:
            self._finish("")
            raise WorkerLost(f"the model's worker process {self.end_reason}") from error
        for slice_, source in slices.values():
            files = dict(source.descriptors) if isinstance(source, SliceInMemory) else {}
            folder = str(source.absolute()) if isinstance(source, Path) else ""
            message = ipc.AddSlice(slice_, folder, tuple(files))
            try:
                self._send(message, tuple(files.values()), perf_counter() + SEND_SLICE_TIMEOUT_S)
            except MalformedMessage as error:
                raise ModelRefused(f"slice {slice_.name} has too many tensors: {error}") from error
            except OSError as error:
                self._finish("did not accept the model's files" if isinstance(error, TimeoutError) else "")
                raise WorkerLost(f"the model's worker process {self.end_reason}") from error

    def open(self, request: ipc.OpenSlices, file_bytes: int) -> ipc.Opened:
        """Have the worker open the slices. ModelRefused where it cannot; WorkerLost where it ended or broke the
        protocol."""
        self._start_task("opened the model's files", load_limit_s(self._bounds, file_bytes))
        try:
            self._send(request)
            while True:
                try:
                    answer = self._channel.receive(check_interval_s(self._task, perf_counter()))
                    break
                except TimeoutError:
                    self.check(0.0)
        except (OSError, EOFError, MalformedMessage) as error:
            self._finish(f"violated the protocol: {error}" if isinstance(error, MalformedMessage) else "")
            raise WorkerLost(f"the model's worker process {self.end_reason}") from error
        finally:
            self._task = None
        if not isinstance(answer, (ipc.Opened, ipc.Failed)):
            self._finish("violated the protocol: it opened nothing")
            raise WorkerLost(f"the model's worker process {self.end_reason}")
        return _check_opened(answer)

    def check(self, wait_s: float | None = None) -> bool:
        """Wait up to `wait_s` for output or the end of the process, then check it. False once it has ended (see
        `end_reason`)."""
        now = perf_counter()
        lane_task = self.lanes.check(now)
        task = self._task or lane_task
        wait_s = check_interval_s(task, now) if wait_s is None else wait_s
        for descriptor, _ in self._poll.poll(1000 * wait_s):
            if descriptor == self.output.fileno():
                if not self.output.read():
                    self._poll.unregister(descriptor)
            else:
                self._finish("")
        if not self._ended.is_set():
            stats = read_process_stats(self.pid)
            if stats is None:
                self._finish("")
            elif reason := self._reason_to_kill(stats):
                self._finish(reason)
        return not self._ended.is_set()

    def _reason_to_kill(self, stats: ProcessStats) -> str:
        # An answer that is ready to be read ends the task, even if its caller gave up before reading it.
        """Why the worker must be killed now; empty if it may live."""
        task = None if select.select([self._channel], [], [], 0)[0] else self._task
        task = task or self.lanes.current_task(perf_counter())
        # A new task: its processor seconds are counted from here.
        if task is not self._watched_task:
            self._watched_task, self._cpu_before_s = task, stats.cpu_s
        # Shared mappings count as the process's memory, so they are added to its limit.
        memory = self._bounds.memory_bytes + self._maps.bytes + self.lanes.shared_bytes
        return watchdog_verdict(task, stats, self._cpu_before_s, perf_counter(), memory)

    def _finish(self, reason: str) -> None:
        """Kill the worker if there is a reason, wait for its end, and wake the threads that wait for it."""
        if self._ended.is_set():
            return
        if reason:
            self._process.kill()
        self._channel.shutdown()  # wakes the request threads that wait for an answer
        try:
            exit_code = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            exit_code = self._process.wait()
        # Most specific first: the watchdog's reason, that of `kill` from another thread, the exit code.
        self.end_reason = reason or self.end_reason or exit_reason(exit_code)
        self.output.read_rest()
        if self.output.last:
            self.end_reason += f" ({self.output.last})"
        self.lanes.close()
        self._ended.set()

    def dispose(self) -> None:
        """Close what is left of an ended worker, once no request is using it."""
        with self._request_lock:
            self._channel.close()
            self.output.close()
            self._pending = None

    def kill(self, reason: str) -> None:
        """Kill it, from any thread; the watching thread notices the end and reports the reason."""
        self.end_reason = self.end_reason or reason
        self._process.kill()
        self._channel.shutdown()

    # Called by request threads

    def reopen(self, request: ipc.OpenSlices, file_bytes: int) -> ipc.Opened:
        """Have the worker open the slices with another setup when it is free. ModelRefused (nothing is open then);
        WorkerLost."""
        with self._request_lock:
            try:
                self._await_pending(math.inf)
                self._start_task("opened the model's files", load_limit_s(self._bounds, file_bytes))
                self._send(request)
                answer = self._channel.receive(FOREVER_S)
                if not isinstance(answer, (ipc.Opened, ipc.Failed)):
                    raise MalformedMessage("it has opened nothing")
            except (OSError, EOFError, MalformedMessage) as error:
                raise self._worker_lost(error) from error
            finally:
                self._task = None
        return _check_opened(answer)

    def run(self, job: SliceRun, flow: Dataflow, timing: Timing) -> dict[str, Tensor]:
        """The job's tensors and its outputs, as `Host.run`; Busy where there is no shared memory for them."""
        if not self._request_lock.acquire(timeout=_timeout_s(job.deadline)):
            raise DeadlineExceeded("the model's worker was busy until the deadline")
        try:
            self._await_pending(job.deadline)
            return self._run(job, flow, timing)
        except (OSError, EOFError, MalformedMessage) as error:
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the model did not answer before the deadline") from error
            raise self._worker_lost(error) from error
        finally:
            if self._pending is None:  # else the run goes on without its caller, still under the watchdog's limit
                self._task = None
            self._request_lock.release()

    def _await_pending(self, deadline: float) -> None:
        """Wait for the answer to a run whose caller gave up."""
        while self._pending is not None:
            answer = self._channel.receive(_timeout_s(deadline))
            if isinstance(answer, ipc.BufferTooSmall):  # the outputs are not wanted any more: let the run fail
                self._send(ipc.GrantBuffer(answer.number, NO_BUFFER))
            elif isinstance(answer, (ipc.RunResult, ipc.Failed)) and answer.number == self._pending.number:
                self._pending = None
            else:
                raise MalformedMessage("an answer to no request")

    def _run(self, job: SliceRun, flow: Dataflow, timing: Timing) -> dict[str, Tensor]:
        """One run; the caller holds the lock. The pending run stays set if the caller gives up."""
        self._maps.unmap_closed()  # before new segments are mapped
        given = {name: job.tensors[name] for name in flow.reads if name in job.tensors}
        inputs, inputs_alive = self._share_inputs(given)
        block = self._allocator.allocate(flow.room_bytes)
        self._number += 1
        buffer = ipc.SharedBuffer(self._maps.number(block.segment), block.offset, len(block.memory))
        request = ipc.RunRequest(self._number, tuple(job.order), inputs, flow.returns, buffer)
        self._pending = _PendingRun(request.number, [inputs_alive, block])
        limit_s = run_limit_s(self._bounds, job.expected_s, _timeout_s(job.deadline), job.predicted_s)
        self._start_task("computed", limit_s)
        self._send(request, deadline=job.deadline)
        answer = self._channel.receive(_timeout_s(job.deadline))
        if isinstance(answer, ipc.BufferTooSmall) and answer.number == request.number:
            buffer, block = self._grow_buffer(answer, buffer, block)
            flow.room_bytes = buffer.bytes
            self._pending.keep_alive.append(block)
            answer = self._channel.receive(_timeout_s(job.deadline))
        if not isinstance(answer, (ipc.RunResult, ipc.Failed)) or answer.number != request.number:
            raise MalformedMessage(f"{type(answer).__name__} instead of an answer")
        self._pending = None
        if isinstance(answer, ipc.Failed):
            # Only slices that decode frames can find fault with the application's input.
            raise UsageError(answer.text) if answer.kind == "usage" and flow.decodes else InferenceFailed(answer.text)
        record_times(answer, job, timing)
        self.notes = answer.notes
        return {**job.tensors, **read_outputs(answer.outputs, flow.returns, buffer, block.memory)}

    def _share_inputs(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[ipc.SharedTensor, ...], list[object]]:
        """References to the inputs, and what keeps them alive: those in shared memory already are used in place, the
        others are written now."""
        refs: list[ipc.SharedTensor] = []
        unshared: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            location = self._maps.locate(tensor)
            if location is None:
                unshared[name] = tensor
            else:
                refs.append(ipc.SharedTensor(name, *location, tensor.nbytes, oip.datatype(tensor), tensor.shape))
        if not unshared:
            return tuple(refs), [tensors]
        flat = {name: pack(unshared_tensor) for name, unshared_tensor in unshared.items()}
        block = self._allocator.allocate(packed_bytes(flat))
        buffer = ipc.SharedBuffer(self._maps.number(block.segment), block.offset, len(block.memory))
        return (*refs, *write_tensors(unshared, buffer, block.memory)), [tensors, block]

    def _grow_buffer(
        self, too_small: ipc.BufferTooSmall, buffer: ipc.SharedBuffer, block: TensorBlock
    ) -> tuple[ipc.SharedBuffer, TensorBlock]:
        """Grant the worker a larger output buffer, or an empty one where there is no room."""
        try:
            block = self._allocator.allocate(too_small.bytes)
        except Busy:
            self._send(ipc.GrantBuffer(too_small.number, NO_BUFFER))
            return buffer, block
        buffer = ipc.SharedBuffer(self._maps.number(block.segment), block.offset, len(block.memory))
        self._send(ipc.GrantBuffer(too_small.number, buffer))
        return buffer, block

    def _start_task(self, description: str, limit_s: float) -> None:
        self._task = Task(perf_counter(), limit_s, description)

    def _send(self, message: ipc.ToWorker, files: tuple[int, ...] = (), deadline: float = math.inf) -> None:
        self._channel.send(message, files, _timeout_s(deadline))

    def _worker_lost(self, error: Exception) -> WorkerLost:
        """The error for a worker that ended or broke the protocol; kills it."""
        if isinstance(error, MalformedMessage):
            self.kill(f"violated the protocol: {error}")
        else:
            self.kill("")
        self._ended.wait(EXIT_TIMEOUT_S)
        return WorkerLost(f"the model's worker process {self.end_reason or 'ended'}")


def _check_opened(answer: ipc.Opened | ipc.Failed) -> ipc.Opened:
    if isinstance(answer, ipc.Opened):
        return answer
    is_release_fault = answer.kind in ("refused", "usage")
    raise ModelRefused(answer.text if is_release_fault else f"a worker process could not load it: {answer.text}")


def _timeout_s(deadline: float) -> float:
    """Seconds until the deadline, at least 1 ms: a socket treats a timeout of 0 as non-blocking."""
    return min(FOREVER_S, max(0.001, deadline - perf_counter()))


def record_times(answer: ipc.RunResult, job: SliceRun, timing: Timing) -> None:
    """Record the durations that the worker reports. MalformedMessage where they are implausible."""
    known = {name: seconds for name, seconds in answer.seconds.items() if name in job.order}
    if len(known) != len(answer.seconds) or not all(0 <= duration < FOREVER_S for duration in known.values()):
        raise MalformedMessage("it reports impossible run times")
    timing.seconds.update(known)
    timing.overruns += min(answer.late, len(job.order))


def read_outputs(
    refs: tuple[ipc.SharedTensor, ...], wants: tuple[str, ...], buffer: ipc.SharedBuffer, memory: Memory
) -> dict[str, Tensor]:
    """The outputs, read from the buffer that was granted. MalformedMessage where the references differ from the
    request."""
    outputs: dict[str, Tensor] = {}
    for ref in refs:
        if ref.segment != buffer.segment:
            raise MalformedMessage(f"the tensor {ref.name[:80]!r} lies outside of its buffer")
        tensor = read_tensor(ref, memory, buffer.offset)
        outputs[ref.name] = tensor.copy() if tensor.nbytes < COPY_BELOW else tensor
    if len(refs) != len(wants) or outputs.keys() != set(wants):
        raise MalformedMessage("it returned other tensors than requested")
    return outputs


def _start_process(descriptor: int) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-m", MODULE, str(descriptor), str(os.getpid())]
    return subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(descriptor,),
        cwd="/", env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def exit_reason(code: int) -> str:
    """What a process's exit code says about its end, for operators."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
