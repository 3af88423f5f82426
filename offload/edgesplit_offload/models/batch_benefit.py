"""Measures in the background whether batching pays for a model on this machine, and up to which batch size.

Batches are never assumed to be equivalent: batches of noise must give, bit for bit, what each input gives alone, or the
model's requests run one by one for good. Then runs of growing batches are timed, as long as each size gains over the
previous one and the time budget lasts. With one thread the thread's own processor clock is used, so that other load on
the machine counts little (docs/decisions/0019).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from time import monotonic, perf_counter, thread_time

import numpy as np

from edgesplit.errors import EdgeError
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import TensorSpec
from edgesplit.runtime import Tensor
from edgesplit_offload.scheduling.run_times import BatchBenefit

log = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]
RunOne = Callable[[Tensors], Tensors]
SIZES = (2, 4, 8, 16, 32)
COMPARED_SIZES = (1, 2, 5, 8)
"""Batch sizes whose results are compared bit by bit."""
MIN_GAIN = 1.4
"""Least throughput gain for batching to be used: collecting and forwarding requests costs something too
(docs/decisions/0034)."""
MIN_STEP_GAIN = 1.05
"""Least gain of a batch size over the one before to be considered."""
SUFFICIENT_FACTOR = 1.5
"""A batch size whose time per request is at most this multiple of the best is sufficient for a run beside another:
requests that arrive during a run need not wait for its end while a core idles."""
BUDGET_S = 1.5
"""Time budget, by the clock that runs are timed with."""
WALL_CLOCK_FACTOR = 10
"""Wall-clock budget as a multiple of `BUDGET_S`: on a busy machine the processor clock advances more slowly."""
MIN_RUN_S = 0.0003
"""For shorter runs, forwarding costs what batching saves."""
MAX_RUN_S = 0.25
REPEATS = 5
NICENESS = 10
STOP_S = 5.0


def is_stackable(specs: Iterable[TensorSpec]) -> bool:
    """Whether every tensor is numeric, of fixed shape, and has a first dimension of 1."""
    return all(
        spec.shape and spec.shape[0] == 1 and -1 not in spec.shape and spec.datatype != "BYTES" for spec in specs
    )


def random_inputs(specs: Iterable[TensorSpec], rng: np.random.Generator) -> dict[str, Tensor]:
    """Random inputs for `specs`: small and large values of both signs."""
    inputs: dict[str, Tensor] = {}
    for spec in specs:
        dtype = oip.DTYPES[spec.datatype]
        scale = 10.0 ** rng.integers(-1, 2)
        if dtype.kind == "f":
            inputs[spec.name] = np.asarray(rng.normal(rng.normal(), 1, spec.shape) * scale).astype(dtype)
        elif dtype.kind == "b":
            inputs[spec.name] = rng.integers(0, 2, spec.shape).astype(dtype)
        else:
            high = min(int(np.iinfo(dtype).max), 255)
            inputs[spec.name] = rng.integers(0, high + 1, spec.shape).astype(dtype)
    return inputs


def stack(inputs: Sequence[Tensors]) -> dict[str, Tensor]:
    """The inputs concatenated along the first dimension."""
    return {name: np.concatenate([tensors[name] for tensors in inputs]) for name in inputs[0]}


def unstack(outputs: Tensors, count: int) -> list[dict[str, Tensor]]:
    """The outputs of a batch split along the first dimension, one mapping per request."""
    return [{name: tensor[index : index + 1] for name, tensor in outputs.items()} for index in range(count)]


def is_batchable(specs: Sequence[TensorSpec], run_one: RunOne, run_batch: RunOne, seed: int = 0) -> bool:
    """Whether batches give, bit for bit, what each of their inputs gives alone. `run_one` runs a single input,
    `run_batch` a batch."""
    rng = np.random.default_rng(seed)
    for count in COMPARED_SIZES:
        inputs = [random_inputs(specs, rng) for _ in range(count)]
        singles = [run_one(tensors) for tensors in inputs]
        together = run_batch(stack(inputs))
        if any(tensor.ndim < 1 or len(tensor) != count for tensor in together.values()):
            return False
        for part, single in zip(unstack(together, count), singles, strict=True):
            if any(
                part[name].shape != single[name].shape or part[name].tobytes() != single[name].tobytes()
                for name in single
            ):
                return False
    return True


def measure_benefit(
    specs: Sequence[TensorSpec],
    run_one: RunOne,
    run_batch: RunOne,
    clock: Callable[[], float] = thread_time,
    budget_s: float = BUDGET_S,
    typical: Callable[[Sequence[float]], float] = median,
) -> BatchBenefit:
    """Measure runs of growing batches; returns their times, and the batch sizes to use (1 if batching does not pay).

    The times include stacking the inputs and splitting the outputs. `typical` summarises several runs of one size.
    """
    rng = np.random.default_rng(0)
    limits = clock() + budget_s, monotonic() + WALL_CLOCK_FACTOR * budget_s

    def is_over() -> bool:
        return clock() >= limits[0] or monotonic() >= limits[1]

    seconds = {1: typical(_times(partial(run_one, random_inputs(specs, rng)), clock, is_over))}
    for size in SIZES:
        if is_over() or seconds[1] < MIN_RUN_S or seconds[max(seconds)] > MAX_RUN_S / 2:
            break
        previous = max(seconds)
        inputs = [random_inputs(specs, rng) for _ in range(size)]
        seconds[size] = typical(_times(partial(_run_stacked, run_batch, inputs), clock, is_over))
        # Stop growing once a doubled batch gains less than MIN_STEP_GAIN per request.
        if previous > 1 and _per_request(seconds, previous) < MIN_STEP_GAIN * _per_request(seconds, size):
            break
    return choose_batches(seconds)


def _run_stacked(run_batch: RunOne, inputs: Sequence[Tensors]) -> list[dict[str, Tensor]]:
    return unstack(run_batch(stack(inputs)), len(inputs))


def choose_batches(seconds: Mapping[int, float]) -> BatchBenefit:
    """The batch sizes to use, from the times of runs by batch size."""
    # Best: least time per request. Batching must gain MIN_GAIN in throughput over single runs. Sufficient: the smallest
    # batch whose time per request is within SUFFICIENT_FACTOR of the best (docs/decisions/0034).
    per_request = {size: run_s / size for size, run_s in seconds.items()}
    best = min(per_request, key=lambda size: per_request[size])
    if best == 1 or per_request[1] < MIN_GAIN * per_request[best]:
        return BatchBenefit(dict(seconds), 1, 1)
    limit = SUFFICIENT_FACTOR * per_request[best]
    enough = min(size for size in per_request if size > 1 and per_request[size] <= limit)
    return BatchBenefit(dict(seconds), best, min(enough, best))


def _per_request(seconds: Mapping[int, float], size: int) -> float:
    return max(1e-9, seconds[size] / size)


def _times(run: Callable[[], object], clock: Callable[[], float], is_over: Callable[[], bool]) -> list[float]:
    run()  # not timed: an engine allocates its buffers in the first run of a size
    times_s: list[float] = []
    while len(times_s) < REPEATS and (not times_s or not is_over()):
        begin = clock()
        run()
        times_s.append(clock() - begin)
    return times_s


class BackgroundMeasurements:
    """A low-priority thread that executes measurements one after the other."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="measuring", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue `work`."""
        self._queue.put(work)

    def stop(self) -> None:
        """Start nothing more and wait for what runs: an engine must not be active while its process ends."""
        self._queue.put(None)
        self._thread.join(STOP_S)

    def _work(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (work := self._queue.get()) is not None:
            try:
                work()
            except EdgeError as error:
                log.info("requests run one at a time: %s", error)
            except Exception:
                log.exception("requests run one at a time: batching could not be measured")


CLOCKS: Mapping[bool, Callable[[], float]] = {True: thread_time, False: perf_counter}
"""The clock to time runs with, by whether they use a single thread."""
