"""Child process of the calibration: `python -m edgesplit_partitioner.calibration.child`. The job is on standard input;
each measured batch is one JSON line (a `BatchTimes`) on standard output.

Sessions of a batch run in turns, so that each finds the caches as another operator left them, and a disturbance affects
all of them. Batches are visited several times, minutes apart if the time allows. Whole networks run as slices do with
the job's engine options; threads that spin disturb all other sessions, so then networks alone are timed, one by one. Of
single operators only those with weights are opened with the job's optimisation: an optimiser merges equal copies of the
others.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgesplit.release.manifest import Slice, TensorSpec
from edgesplit.runtime.options import EngineOptions
from edgesplit_partitioner.calibration.design import Engine, design_of, has_spinning_pool
from edgesplit_partitioner.calibration.operator_grid import PORT_COUNT
from edgesplit_partitioner.ir.tensor_types import noise

WARMUP, MIN_PASSES, MAX_PASSES = 2, 5, 150
"""Passes over a batch: not timed, at least timed, at most timed."""


class CalibrationJob(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how to measure."""

    seconds: float
    """Time limit of the whole measurement."""
    setup: EngineOptions = EngineOptions()
    engine: Engine = "onnxruntime"
    visits: int = 3
    """Number of visits to each batch."""
    batch: int = 24
    """Number of models in a batch."""
    most_points: int = 100_000
    """Maximum number of grid points to measure."""


class BatchTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one visit to one batch."""

    batches: int
    """Number of all batches."""
    whole: bool
    """True: `seconds` are of small networks, else of operators; by index into the design of the engine."""
    empty_s: float
    """Seconds of a run that computes nothing, with one input and one output."""
    tensor_s: float
    """Seconds of each further input or output of a run."""
    seconds: dict[int, float]
    """Median seconds of a run, by index: of a whole network as measured; of copies of an operator, divided by how many
    fewer the run in `around` has."""
    around: dict[int, float] = {}
    """Median seconds of a run with fewer copies of the operator or none, divided by the same number."""


def batches_of(job: CalibrationJob) -> list[tuple[bool, range]]:
    """The batches in the order of a visit: whether they are of networks, and their indices.

    All networks come first: a fit needs small ones for the correction and wide ones for weights that no cache keeps,
    and a slow machine may not reach all operators. With threads that spin only networks are measured, each alone.
    """
    design = design_of(job.engine)
    points = 0 if has_spinning_pool(job.engine, job.setup) else min(design.point_count, job.most_points)
    counts = {True: design.network_count, False: points}
    return [
        (whole, range(start, min(start + job.batch, count)))
        for whole, count in counts.items()
        for start in range(0, count, job.batch)
    ]


def main() -> None:
    """Run the job from standard input."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=CalibrationJob)
    batches = batches_of(job)
    # The first visit measures all networks and a quarter of the operators even when the time is over.
    least = sum(whole for whole, _ in batches) + len(batches) // 4
    started = perf_counter()
    for visit in range(job.visits):
        for number, (whole, indices) in enumerate(batches):
            if perf_counter() - started > job.seconds and (visit or number > least):
                return
            times = _measure_batch(indices, whole, job, len(batches))
            sys.stdout.buffer.write(msgspec.json.encode(times) + b"\n")
            sys.stdout.buffer.flush()


def _measure_batch(indices: Sequence[int], whole: bool, job: CalibrationJob, batches: int) -> BatchTimes:
    """Median times of one visit to the batch of these indices."""
    visit_s = job.seconds / (job.visits * batches)
    plain = msgspec.structs.replace(job.setup, optimise="exact")
    design = design_of(job.engine)
    open_model = _TimedSession if job.engine == "onnxruntime" else _TimedInterpreter
    open_point = _TimedSession if job.engine == "onnxruntime" else _TimedInvocation
    openers: list[Callable[[], Callable[[], float]]] = [
        partial(open_model, raw, plain) for raw in design.small_models()
    ]
    copies, fewer = dict.fromkeys(indices, 1), dict[int, int]()
    if whole:
        openers += [partial(open_model, design.network_model(index), job.setup) for index in indices]
    else:
        copies = {index: design.copies(index) for index in indices}
        setups = {index: job.setup if design.is_fusible(index) else plain for index in indices}
        # An optimised convolution by itself converts its input to a blocked layout, which inside a network is there:
        # the difference between two models has no conversion.
        is_blocked = {
            index: setups[index].optimise == "fast" and design.point_work(index).operator in ("conv", "depthwise")
            for index in indices
        }
        fewer = {index: copies[index] // 2 for index in indices if is_blocked[index]}
        openers += [
            partial(open_point, design.point_model(index, count), setups[index])
            for index, count in (*copies.items(), *fewer.items())
        ]
    if has_spinning_pool(job.engine, job.setup):  # threads of other sessions would spin beside each run
        times = [_interleaved_times([open_alone()], visit_s / len(openers))[0] for open_alone in openers]
    else:
        times = _interleaved_times([open_one() for open_one in openers], visit_s)
    empty_s, wide_s, narrow_s, *medians = map(statistics.median, times)
    around: dict[int, float] = {}
    if not whole:
        around = dict.fromkeys(indices, empty_s if job.engine == "onnxruntime" else 0.0)
        around |= dict(zip(fewer, medians[len(indices) :], strict=True))
    seconds, around = (
        {index: run_s / (copies[index] - fewer.get(index, 0)) for index, run_s in runs.items()}
        for runs in (dict(zip(indices, medians, strict=False)), around)
    )
    return BatchTimes(
        batches=batches,
        whole=whole,
        empty_s=empty_s,
        tensor_s=max(wide_s - narrow_s, 0.0) / (2 * PORT_COUNT - 2),
        seconds=seconds,
        around=around,
    )


def _interleaved_times(sessions: Sequence[Callable[[], float]], visit_s: float) -> list[list[float]]:
    """Seconds of every pass by session, without the warm-up, until the visit's share of the time is over."""
    for _ in range(WARMUP):
        for session in sessions:
            session()
    started = perf_counter()
    times: list[list[float]] = [[] for _ in sessions]
    for pass_number in range(MAX_PASSES):
        if pass_number >= MIN_PASSES and perf_counter() - started > visit_s:
            break
        for index, session in enumerate(sessions):
            session()  # untimed: this run finds the caches as another model left them, the timed ones as this one does
            times[index] += [session(), session()]
    return times


class _TimedSession:
    """One model, loaded as the agent loads a slice, with random inputs."""

    def __init__(self, raw: bytes, setup: EngineOptions) -> None:
        import onnxruntime  # only in the child: the parent shares this module for its formats

        from edgesplit.runtime.onnx import OnnxProgram, OnnxRuntime

        options = OnnxRuntime(setup.threads, setup.optimise, spinning=setup.spinning).session_options()
        session = onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
        inputs = tuple(TensorSpec(tensor.name, "FP32", tuple(tensor.shape)) for tensor in session.get_inputs())
        outputs = tuple(TensorSpec(tensor.name, "FP32", ()) for tensor in session.get_outputs())
        self._program = OnnxProgram(Slice("point", "onnx", (), inputs, outputs), (session, None))
        self._feeds = {tensor.name: _values_around_zero(tensor) for tensor in session.get_inputs()}

    def __call__(self) -> float:
        """Seconds of one run."""
        start = perf_counter()
        self._program.run(self._feeds)
        return perf_counter() - start


class _TimedInterpreter:
    """One TFLite model, run as the agent runs a slice, with random inputs."""

    def __init__(self, raw: bytes, setup: EngineOptions) -> None:
        from edgesplit.runtime.tflite import import_litert, invoke  # only in the child

        self._interpreter = import_litert().Interpreter(model_content=raw, num_threads=setup.threads)
        self._interpreter.allocate_tensors()
        details = self._interpreter.get_input_details()
        kinds = {"float32": "FP32", "int8": "INT8", "uint8": "UINT8"}
        specs = [
            TensorSpec(detail["name"], kinds[np.dtype(detail["dtype"]).name], tuple(map(int, detail["shape"])))
            for detail in details
        ]
        self._feeds, self._invoke = noise(specs, seed=0), invoke
        invoke(self._interpreter, self._feeds)

    def __call__(self) -> float:
        """Seconds of one run."""
        start = perf_counter()
        self._invoke(self._interpreter, self._feeds)
        return perf_counter() - start


class _TimedInvocation(_TimedInterpreter):
    """One TFLite model without copying its inputs and outputs, which belong to slices and not to operators."""

    def __call__(self) -> float:
        """Seconds of one run."""
        start = perf_counter()
        self._interpreter.invoke()
        return perf_counter() - start


def _values_around_zero(tensor: Any) -> npt.NDArray[np.generic]:
    """Values around zero, so that half of a ReLU's input is negative."""
    block = np.random.default_rng(0).standard_normal(8192)
    return np.resize(block.astype(np.float16 if "16" in tensor.type else np.float32), tensor.shape)


if __name__ == "__main__":
    main()
