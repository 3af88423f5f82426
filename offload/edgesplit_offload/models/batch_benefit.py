"""Is running several requests of a model together worth it here? Tried and measured, in the background.

Together is never assumed to be the same: stacks of noise must give, bit for bit, what each input gives alone, or the
model's requests run one by one for good. Then runs of growing stacks are timed, as long as each size gains over the one
before and all of it stays within a second or two. On one thread the processor's own clock is read, so that what else
the machine does just then counts little.
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
from edgesplit_offload.scheduling.run_times import Gain

log = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]
RunOne = Callable[[Tensors], Tensors]
SIZES = (2, 4, 8, 16, 32)
TRIED = (1, 2, 5, 8)
"""Sizes of the stacks whose bits are compared."""
WORTH = 1.4
"""So many times as many requests a second must be answered together before a request is made to share a run: waiting
for company and being handed to it cost something too."""
FURTHER = 1.05
"""What a doubled stack must gain over the one before to be used."""
NEARLY = 1.5
"""A stack that takes at most so many times as much per request as the best one is enough for a run beside another:
those that come while a run is on need not all wait for its end where a core idles."""
BUDGET_S = 1.5
"""By the clock that runs are timed by."""
PATIENCE = 10
"""On a busy machine the processor's clock runs so much slower than the wall's, at most."""
SHORTEST_RUN_S = 0.0003
"""Below this, handing over costs what sharing saves."""
LONGEST_RUN_S = 0.25
REPEATS = 5
NICENESS = 10
STOP_S = 5.0


def stackable(specs: Iterable[TensorSpec]) -> bool:
    """Has every one of these tensors a first length of one, and is made of numbers?"""
    return all(
        spec.shape and spec.shape[0] == 1 and -1 not in spec.shape and spec.datatype != "BYTES" for spec in specs
    )


def noise(specs: Iterable[TensorSpec], rng: np.random.Generator) -> dict[str, Tensor]:
    """One input of each, drawn anew: small and large, of both signs."""
    made: dict[str, Tensor] = {}
    for spec in specs:
        dtype = oip.DTYPES[spec.datatype]
        scale = 10.0 ** rng.integers(-1, 2)
        if dtype.kind == "f":
            made[spec.name] = np.asarray(rng.normal(rng.normal(), 1, spec.shape) * scale).astype(dtype)
        elif dtype.kind == "b":
            made[spec.name] = rng.integers(0, 2, spec.shape).astype(dtype)
        else:
            high = min(int(np.iinfo(dtype).max), 255)
            made[spec.name] = rng.integers(0, high + 1, spec.shape).astype(dtype)
    return made


def joined(inputs: Sequence[Tensors]) -> dict[str, Tensor]:
    """All of them as one, along the first length."""
    return {name: np.concatenate([one[name] for one in inputs]) for name in inputs[0]}


def apart(outputs: Tensors, count: int) -> list[dict[str, Tensor]]:
    """Each one's part of what a stack gave."""
    return [{name: tensor[place : place + 1] for name, tensor in outputs.items()} for place in range(count)]


def keeps_apart(specs: Sequence[TensorSpec], one: RunOne, many: RunOne, seed: int = 0) -> bool:
    """Do stacks give, bit for bit, what each of their inputs gives alone?"""
    rng = np.random.default_rng(seed)
    for count in TRIED:
        inputs = [noise(specs, rng) for _ in range(count)]
        alone = [one(given) for given in inputs]
        together = many(joined(inputs))
        if any(tensor.ndim < 1 or len(tensor) != count for tensor in together.values()):
            return False
        for got, want in zip(apart(together, count), alone, strict=True):
            if any(got[name].shape != want[name].shape or got[name].tobytes() != want[name].tobytes() for name in want):
                return False
    return True


def measured(
    specs: Sequence[TensorSpec],
    one: RunOne,
    many: RunOne,
    clock: Callable[[], float] = thread_time,
    budget_s: float = BUDGET_S,
    typical: Callable[[Sequence[float]], float] = median,
) -> Gain:
    """What runs take, by how many are in them, and how many should be; none together where it is not worth it.

    Stacking what came apart, and taking the answers apart, is part of what it takes. `typical`: of what several runs
    of one size take.
    """
    rng = np.random.default_rng(0)
    ends = clock() + budget_s, monotonic() + PATIENCE * budget_s

    def is_over() -> bool:
        return clock() >= ends[0] or monotonic() >= ends[1]

    seconds = {1: typical(_times(partial(one, noise(specs, rng)), clock, is_over))}
    for size in SIZES:
        if is_over() or seconds[1] < SHORTEST_RUN_S or seconds[max(seconds)] > LONGEST_RUN_S / 2:
            break
        last = max(seconds)
        inputs = [noise(specs, rng) for _ in range(size)]
        seconds[size] = typical(_times(partial(_together, many, inputs), clock, is_over))
        if last > 1 and _per_request(seconds, last) < FURTHER * _per_request(seconds, size):
            break
    return chosen(seconds)


def _together(many: RunOne, inputs: Sequence[Tensors]) -> list[dict[str, Tensor]]:
    return apart(many(joined(inputs)), len(inputs))


def chosen(seconds: Mapping[int, float]) -> Gain:
    """How many should run together, by what runs of each size take."""
    per_request = {size: taken / size for size, taken in seconds.items()}
    best = min(per_request, key=lambda size: per_request[size])
    if best == 1 or per_request[1] < WORTH * per_request[best]:
        return Gain(dict(seconds), 1, 1)
    enough = min(size for size in per_request if size > 1 and per_request[size] <= NEARLY * per_request[best])
    return Gain(dict(seconds), best, min(enough, best))


def _per_request(seconds: Mapping[int, float], size: int) -> float:
    return max(1e-9, seconds[size] / size)


def _times(run: Callable[[], object], clock: Callable[[], float], is_over: Callable[[], bool]) -> list[float]:
    run()  # the first of a size sets up its memory
    taken: list[float] = []
    while len(taken) < REPEATS and (not taken or not is_over()):
        begin = clock()
        run()
        taken.append(clock() - begin)
    return taken


class Background:
    """One thread, of low priority, that does what it is asked one after the other."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="measuring", daemon=True)
        self._thread.start()

    def ask(self, work: Callable[[], None]) -> None:
        """Have it done some time."""
        self._asked.put(work)

    def stop(self) -> None:
        """Begin nothing more, and wait for what runs: an engine must not be at work while its process ends."""
        self._asked.put(None)
        self._thread.join(STOP_S)

    def _work(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (work := self._asked.get()) is not None:
            try:
                work()
            except EdgeError as error:
                log.info("requests run one at a time: %s", error)
            except Exception:
                log.exception("requests run one at a time: sharing runs could not be tried")


CLOCKS: Mapping[bool, Callable[[], float]] = {True: thread_time, False: perf_counter}
"""By whether runs take one thread."""
