"""The device's part of a request: slices, run on its one processor, in turn, and never waited for beyond the deadline.

A run that hangs keeps the processor, as it does in truth; the request that waits for it is told in time.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, InferenceFailed, UsageError
from edgesplit.runtime import Tensor, Timing
from edgesplit_agent.serving.device_queue import Processor
from edgesplit_agent.serving.request import Request
from edgesplit_agent.serving.thread_pool import Crew
from edgesplit_agent.worker.host import WorkerLost

log = logging.getLogger(__name__)

Live = Mapping[str, Tensor]
OwnPart = Callable[[str, "Exception | None"], None]
"""Told, by release, each time the device's own part of it has done its work (None) or has failed."""


class Device:
    """Runs slices of any release."""

    def __init__(self, processor: Processor, crew: Crew, margin_s: float, own_part: OwnPart) -> None:
        self._processor = processor
        self._crew = crew
        self._margin_s = margin_s
        self._own_part = own_part

    def run(
        self, request: Request, slices: Sequence[str], tensors: Live, timing: Timing, *, again: bool = True
    ) -> Live:
        """Run slices, in this thread, when the processor is free; `again`, if the worker that ran them was lost.
        DeadlineExceeded, Dropped, or why they failed."""
        if not slices:
            return dict(tensors)
        tail, queued = timing is not request.timing, perf_counter()
        with self._processor.turn(request.place, request.deadline - self._margin_s):
            request.course.waited(queued, tail=tail)
            began = perf_counter()
            try:
                live = self._run(request, slices, tensors, timing, again)
            except (
                UsageError,
                Busy,
                DeadlineExceeded,
                WorkerLost,
            ):  # the application's; lost workers are told of elsewhere
                raise
            except Exception as error:
                self._tell(request.release.digest, error)
                raise
            finally:
                request.course.ran(slices, request.release, timing, began, tail=tail)
        self._tell(request.release.digest, None)
        return live

    def _run(self, request: Request, slices: Sequence[str], tensors: Live, timing: Timing, again: bool) -> Live:
        until = request.deadline - min(self._margin_s, request.left_s / 4)
        try:
            return request.release.run(slices, tensors, timing, until)
        except WorkerLost as lost:
            if not again:
                raise
            log.warning("%s; once more", lost)
            return request.release.run(slices, tensors, timing, until)

    def run_in_time(self, request: Request, slices: Sequence[str], tensors: Live, timing: Timing) -> Live:
        """The same; where the run itself could outlast the deadline on another thread, which is left alone with it."""
        if not slices:
            self._processor.begin(request.place)
            return dict(tensors)
        if request.release.host.in_time:
            try:
                return self.run(request, slices, tensors, timing, again=False)
            except EdgeError:
                raise
            except Exception as error:
                raise InferenceFailed(f"the device's part failed: {error!r}") from error
        done: queue.SimpleQueue[Live | Exception] = queue.SimpleQueue()

        def work() -> None:
            try:
                done.put(self.run(request, slices, tensors, timing, again=False))
            except Exception as error:
                done.put(error)
            except BaseException as error:
                done.put(InferenceFailed(f"the device's part failed: {error!r}"))
                raise

        if not self._crew.start(work):
            raise Busy("the device has no thread free for it: its models hang, or it is out of memory")
        try:
            result = done.get(timeout=max(0.0, request.left_s - self._margin_s / 2))
        except queue.Empty:
            self._processor.withdraw(request.place)
            raise DeadlineExceeded("the device's part was not done before the deadline") from None
        if isinstance(result, EdgeError):
            raise result
        if isinstance(result, Exception):
            raise InferenceFailed(f"the device's part failed: {result!r}") from result
        return result

    def _tell(self, release: str, error: Exception | None) -> None:
        try:
            self._own_part(release, error)
        except Exception:
            log.exception("nobody could be told how the device's part went")
