"""Runs the device's part of a request: slices on its single processor, in turn, and never waited for past the deadline.

A run that hangs keeps the processor, as it does in reality; the request that waits for it gets DeadlineExceeded in
time.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, InferenceFailed, UsageError
from edgesplit.runtime import Tensor, Timing
from edgesplit_agent.serving.device_queue import DeviceQueue
from edgesplit_agent.serving.request import Request
from edgesplit_agent.serving.thread_pool import BoundedThreads
from edgesplit_agent.worker.host import WorkerLost

log = logging.getLogger(__name__)

Live = Mapping[str, Tensor]
"""Tensors by name that are available so far."""
OnLateRun = Callable[[Request], None]
"""Callback for a request with a run that ended after the request was recorded."""


@dataclass(frozen=True)
class LocalExecutor:
    """Runs slices of any release. Thread-safe."""

    queue: DeviceQueue
    threads: BoundedThreads
    margin_s: float
    on_late_run: OnLateRun

    def run(
        self, request: Request, slices: Sequence[str], tensors: Live, timing: Timing, *, retry_lost: bool = True
    ) -> Live:
        """Run slices on this thread when the processor is free; returns all tensors available afterwards.

        `retry_lost`: retry once if the worker process was lost. Raises DeadlineExceeded, Dropped, or the reason of the
        failure.
        """
        if not slices:
            return dict(tensors)
        is_tail, queued = timing is not request.timing, perf_counter()
        with self.queue.turn(request.queue_entry, request.deadline - self.margin_s):
            request.trace.waited(queued, tail=is_tail)
            began = perf_counter()
            try:
                live = self._run(request, slices, tensors, timing, retry_lost)
            except (UsageError, Busy, DeadlineExceeded, WorkerLost):
                raise  # not the release's fault; lost workers are reported by their supervisor
            except Exception as error:
                self._record(request, error)
                raise
            finally:
                request.trace.ran(slices, request.release, timing, began, tail=is_tail)
        self._record(request, None)
        return live

    def _run(self, request: Request, slices: Sequence[str], tensors: Live, timing: Timing, retry_lost: bool) -> Live:
        # Ends before the deadline by the margin, or by a quarter of what is left where that is less.
        until = request.deadline - min(self.margin_s, request.left_s / 4)
        try:
            return request.release.run(slices, tensors, timing, until)
        except WorkerLost as lost:
            if not retry_lost:
                raise
            log.warning("%s; retrying once", lost)
            return request.release.run(slices, tensors, timing, until)

    def run_in_time(self, request: Request, slices: Sequence[str], tensors: Live, timing: Timing) -> Live:
        """Like `run`, but guaranteed to return by the deadline: a host that cannot keep a deadline runs on another
        thread, which is abandoned when the deadline passes."""
        if not slices:
            self.queue.begin(request.queue_entry)
            return dict(tensors)
        if request.release.host.in_time:
            try:
                return self.run(request, slices, tensors, timing, retry_lost=False)
            except EdgeError:
                raise
            except Exception as error:
                raise InferenceFailed(f"the device's part failed: {error!r}") from error
        results: queue.SimpleQueue[Live | Exception] = queue.SimpleQueue()

        def work() -> None:
            try:
                results.put(self.run(request, slices, tensors, timing, retry_lost=False))
            except Exception as error:
                results.put(error)
            except BaseException as error:
                results.put(InferenceFailed(f"the device's part failed: {error!r}"))
                raise

        if not self.threads.start(work):
            raise Busy("the device has no thread free for it: its models hang, or it is out of memory")
        try:
            result = results.get(timeout=max(0.0, request.left_s - self.margin_s / 2))
        except queue.Empty:
            self.queue.withdraw(request.queue_entry)
            raise DeadlineExceeded("the device's part was not finished before the deadline") from None
        if isinstance(result, EdgeError):
            raise result
        if isinstance(result, Exception):
            raise InferenceFailed(f"the device's part failed: {result!r}") from result
        return result

    def _record(self, request: Request, error: Exception | None) -> None:
        # In this order, and the engine sets `is_recorded` before it takes the runs: one of the two sees each run.
        request.device_runs.append(error)
        if request.is_recorded:
            self.on_late_run(request)
