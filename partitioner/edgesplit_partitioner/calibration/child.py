"""The child process that calibration times in: `python -m edgesplit_partitioner.calibration.child`, the job on standard
input, one JSON line (a `Seen`) on standard output for each batch measured.

Sessions of a batch run in turns, so that each finds the caches as another operator left them, and a disturbance falls
on all of them. Batches are visited several times, minutes apart where there is time. Whole models run as slices do:
the graph as it stands, threads that never spin.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgesplit.release.manifest import Slice, TensorSpec
from edgesplit_partitioner.calibration.networks import nets
from edgesplit_partitioner.calibration.operator_grid import PORTS, Point, build, copies_of, grid, ports

WARMUP, LEAST_PASSES, MOST_PASSES = 2, 5, 150
EMPTY = Point("Relu", ((1, 16),))
"""Built with no copies: what a run costs that computes nothing."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """How long to measure, and how."""

    seconds: float
    threads: int = 1
    visits: int = 3
    batch: int = 24
    most_points: int = 100_000


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One visit to one batch."""

    batch: int
    batches: int
    whole: bool
    """Small networks by their places in `nets()`; else operators by their places in `grid()`."""
    empty_s: float
    """Of a run that computes nothing, with one input and one output."""
    tensor_s: float
    """Of each further input or output of a run."""
    seconds: dict[int, float]
    """Median seconds of a run, by place: of one copy of an operator, the empty run taken off; of a whole network as it
    is."""


def main() -> None:
    """Do the job on standard input."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    points = grid()[: job.most_points]
    operators = [range(len(points))[start : start + job.batch] for start in range(0, len(points), job.batch)]
    networks = [range(len(nets()))[start : start + job.batch] for start in range(0, len(nets()), job.batch)]
    batches = [(False, one) for one in operators] + [(True, one) for one in networks]
    begun = perf_counter()
    slot_s = job.seconds / (job.visits * len(batches))
    for visit in range(job.visits):
        # The networks first: a fit needs them, and a slow machine may not come to all operators.
        for number in (len(batches) - 1, *range(len(batches) - 1)):
            late = perf_counter() - begun > job.seconds
            if late and (visit or number > len(batches) // 4):
                return
            whole, places = batches[number]
            seen = _visit(places, whole, job.threads, slot_s)
            answer = msgspec.structs.replace(seen, batch=number, batches=len(batches))
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()


def _visit(places: Sequence[int], whole: bool, threads: int, slot_s: float) -> Seen:
    """Medians of one visit."""
    if whole:
        models = [nets()[place] for place in places]
        copies = [1] * len(places)
    else:
        points = [grid()[place] for place in places]
        copies = [copies_of(point) for point in points]
        models = [build(point, number) for point, number in zip(points, copies, strict=True)]
    runs = [_Run(raw, threads) for raw in (build(EMPTY, 0), ports(True), ports(False), *models)]
    empty_s, wide_s, narrow_s, *medians = [statistics.median(one) for one in _in_turns(runs, slot_s)]
    if not whole:
        medians = [max(one - empty_s, 1e-9) / number for one, number in zip(medians, copies, strict=True)]
    return Seen(
        batch=0,
        batches=0,
        whole=whole,
        empty_s=empty_s,
        tensor_s=max(wide_s - narrow_s, 0.0) / (2 * PORTS - 2),
        seconds=dict(zip(places, medians, strict=True)),
    )


def _in_turns(runs: Sequence[_Run], slot_s: float) -> list[list[float]]:
    """Seconds of every pass by run, the warm-up left out, until the slot is over."""
    for _ in range(WARMUP):
        for one in runs:
            one()
    begun = perf_counter()
    times: list[list[float]] = [[] for _ in runs]
    for done in range(MOST_PASSES):
        if done >= LEAST_PASSES and perf_counter() - begun > slot_s:
            break
        for place, one in enumerate(runs):
            one()  # finds the caches as another model left them; the next ones as its own kind leaves them
            times[place] += [one(), one()]
    return times


class _Run:
    """One model, loaded as the agent loads a slice, with noise to run on."""

    def __init__(self, raw: bytes, threads: int) -> None:
        import onnxruntime  # only in the child: the parent shares this module for its formats

        from edgesplit.runtime.onnx import OnnxProgram, OnnxRuntime

        options = OnnxRuntime(threads, "exact").options()
        session = onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
        given = tuple(TensorSpec(one.name, "FP32", tuple(one.shape)) for one in session.get_inputs())
        out = tuple(TensorSpec(one.name, "FP32", ()) for one in session.get_outputs())
        self._program = OnnxProgram(Slice("point", "onnx", (), given, out), (session, None))
        self._feeds = {one.name: _noise(one) for one in session.get_inputs()}

    def __call__(self) -> float:
        """Seconds of one run."""
        start = perf_counter()
        self._program.run(self._feeds)
        return perf_counter() - start


def _noise(one: Any) -> npt.NDArray[np.generic]:
    """Values around zero: half of a rectifier's input is negative."""
    block = np.random.default_rng(0).standard_normal(8192)
    return np.resize(block.astype(np.float16 if "16" in one.type else np.float32), one.shape)


if __name__ == "__main__":
    main()
