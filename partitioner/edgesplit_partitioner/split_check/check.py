"""Checks that a model splits safely: cuts it at every boundary, runs both halves as slices run, compares with the
whole.

There is a boundary after each layer, in the layers' order; the cuts of a plan's rows, which may cut the graph
elsewhere, can be added. Between the operators of one layer no cut goes, and `IndivisibleLayer` gives the reason. The
halves are the slices that a release would hold, run by the runtimes of agent and offload server, in child processes
(`split_check.child`): a crash or a hang fails one boundary only, and the others are still checked.
"""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import msgspec
import numpy as np

from edgesplit.errors import EdgeError, Interrupted, ModelRefused, UsageError
from edgesplit.input_spec import FRAME, INPUT_LAYER, InputSpec
from edgesplit.plan import Row, cut_name
from edgesplit.release.manifest import TensorSpec
from edgesplit.runtime import Tensors
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.ir.prepared_model import WHOLE, PreparedModel, whole_model_chunks, whole_model_slice
from edgesplit_partitioner.ir.tensor_types import noise
from edgesplit_partitioner.onnx_format.indivisible import IndivisibleLayer, indivisible_layers
from edgesplit_partitioner.profiling.layers import Progress, Sample, synthetic_frame
from edgesplit_partitioner.sandbox.child_process import ChildFailed, ChildProcess
from edgesplit_partitioner.sandbox.limits import measurement_limits
from edgesplit_partitioner.slicing import CutSlice, atoms, cut_slices
from edgesplit_partitioner.split_check.child import CheckJob, CheckResult, Difference, store_samples

CHILD = "edgesplit_partitioner.split_check.child"
"""Module of the child process."""
TOLERANCE = 1e-5
"""Allowed error, relative to the largest absolute value of an output. Half-precision outputs are allowed one unit in
the last place of their own type (2^-10), which is more."""
TIMEOUT_S = 300.0
"""Time limit in seconds for both halves of one cut, in both modes, per sample."""
MAX_CRASHES_IN_A_ROW = 5
"""After so many boundaries in a row that crashed the runtime the remaining ones are not tried."""
MAX_CHILDREN = 4
"""Default maximum number of child processes."""
MIN_CUTS_PER_CHILD = 8
"""Minimum number of cuts per child process: starting a child takes as long as checking so many cuts of a small model.
"""

Verdict = Literal["exact", "within", "off", "refused"]
"""Outcome of one cut; `Cut.verdict` explains the values."""


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """One cut and the result of checking it."""

    name: str = ""
    """Name of the plan's row; empty for the boundary after a layer."""
    split_after: str
    """The last layer on the device; empty where all layers run remotely."""
    device_layers: int
    """Number of layers on the device."""
    sends: tuple[str, ...] = ()
    """Names of the tensors that cross."""
    up_bytes: int = 0
    """Bytes of these tensors without encoding, as declared or as a trial run showed."""
    open_lengths: bool = False
    """True where one of these tensors has a length that depends on the data."""
    verdict: Verdict
    """`exact`: equal to the whole bit for bit. `within`: the error is within the tolerance. `off`: it is not.
    `refused`: not cuttable, and `why` gives the reason. For the exact mode, in which slices run."""
    error: float | None = 0.0
    """Relative error in exact mode; None where the outputs cannot be compared."""
    fast: Verdict | None = None
    """The verdict in fast mode, against the whole model in fast mode; None where the engine has only one mode."""
    fast_error: float | None = None
    """Relative error in fast mode; None where there is none or the outputs cannot be compared."""
    reason: str = ""
    """Why the cut was refused or its outputs differ; empty otherwise."""

    @property
    def is_safe(self) -> bool:
        """Whether the cut is safe to deploy: right in the mode in which slices run."""
        return self.verdict in ("exact", "within")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking all boundaries of a model."""

    format: str
    layers: int
    operators: int
    inputs: str
    """What the model was fed, in a few words."""
    tolerance: float
    """Allowed relative error."""
    steady: bool
    """True where two runs of the whole model give the same bits; where they do not, no cut can be exact."""
    fast_error: float | None
    """Relative error that the runtime's own optimisation causes in the whole, uncut model; None where the engine has no
    such mode, or the outputs cannot be compared."""
    cuts: tuple[Cut, ...]
    inside: tuple[IndivisibleLayer, ...]
    """Layers inside which no cut goes."""

    @property
    def is_safe(self) -> bool:
        """Whether every cut is safe to deploy."""
        return all(cut.is_safe for cut in self.cuts)

    @property
    def is_safe_fast(self) -> bool:
        """Whether every cut is also right in fast mode."""
        return all(cut.fast in (None, "exact", "within") for cut in self.cuts)


@dataclass(frozen=True, slots=True)
class _PlannedCut:
    """A cut to be checked: the row's name, or empty, and the layers that stay on the device."""

    name: str
    device: frozenset[str]


def check_model(
    model: PreparedModel,
    graph: LayerGraph,
    spec: InputSpec | None = None,
    *,
    samples: Sequence[Sample] = (),
    rows: Iterable[Row] = (),
    seed: int = 0,
    jobs: int | None = None,
    progress: Progress | None = None,
    max_crashes: int = MAX_CRASHES_IN_A_ROW,
) -> Report:
    """Check every boundary of `model`, and the cuts of `rows` (whose layers are filled in, as the planner returns
    them).

    `graph` and `spec` are what `with_input_layer` returned, or the model's own graph and None. Without samples the
    model is fed noise from `seed`. `jobs` is the number of child processes. After `max_crashes` cuts in a row that
    crashed the runtime the others are not tried. ModelRefused where the whole model itself does not run.
    """
    cuts_to_try = cuts_to_check(graph, rows)
    feeds = [_feed(model, spec, sample, seed) for sample in samples or (None,)]
    with tempfile.TemporaryDirectory(prefix="edgesplit-check-") as name:
        workspace = _Workspace(Path(name), model, graph, spec)
        store_samples(workspace.folder, feeds)
        whole = workspace.run_whole(TIMEOUT_S * len(feeds))
        cuts = _check_cuts(_CutQueue(workspace, cuts_to_try, TIMEOUT_S * len(feeds), progress, max_crashes), jobs)
    return Report(
        format=model.format,
        layers=len(graph.layers),
        operators=len({place for layer in graph.layers for place in layer.nodes}),
        inputs=f"{len(samples)} samples" if samples else f"noise (seed {seed})",
        tolerance=tolerance(model.outputs),
        steady=whole.modes["exact"].same,
        fast_error=whole.modes["fast"].error if "fast" in whole.modes else None,
        cuts=tuple(cuts),
        inside=indivisible_layers(model),
    )


def cuts_to_check(graph: LayerGraph, rows: Iterable[Row] = ()) -> list[_PlannedCut]:
    """The cut before each layer, beginning with everything remote, then those cuts of `rows` that are none of these."""
    names = [layer.name for layer in graph.layers]
    cuts = [_PlannedCut("", frozenset(names[:count])) for count in range(len(names))]
    known = {cut.device for cut in cuts} | {frozenset(names)}
    for row in rows:
        device = frozenset(row.layers)
        if device not in known:
            known.add(device)
            cuts.append(_PlannedCut(row.name, device))
    return cuts


def tolerance(outputs: Iterable[TensorSpec]) -> float:
    """Allowed relative error: that of the coarsest output datatype."""
    return max((2.0**-10 if spec.datatype == "FP16" else TOLERANCE for spec in outputs), default=TOLERANCE)


def verdict(difference: Difference, allowed: float) -> Verdict:
    """The verdict on a difference: `exact`, `within` the allowed relative error, or `off`."""
    if difference.same:
        return "exact"
    return "within" if difference.error is not None and difference.error <= allowed else "off"


def _feed(model: PreparedModel, spec: InputSpec | None, sample: Sample | None, seed: int) -> Tensors:
    """The inputs of one sample as an application would send them, with noise for those that the sample does not
    give."""
    other_inputs = noise(
        (tensor_spec for tensor_spec in model.inputs if spec is None or tensor_spec.name != spec.tensor), seed
    )
    if isinstance(sample, bytes) and spec is None:
        raise UsageError("a sample is a frame, but the model has no input spec: say what arrives with --input")
    if spec is not None and (sample is None or isinstance(sample, bytes)):
        frame = synthetic_frame(spec, seed) if sample is None else sample
        return {FRAME: np.frombuffer(bytes(frame), np.uint8), **other_inputs}
    if spec is not None:
        raise UsageError(f"the model takes frames ({spec.media}), and a sample holds tensors")
    assert not isinstance(sample, bytes)
    return {**other_inputs, **(sample or {})}


class _Workspace:
    """The working folder, with the inputs, the whole model's outputs, and the slices of each cut while it is tried."""

    def __init__(self, folder: Path, model: PreparedModel, graph: LayerGraph, spec: InputSpec | None) -> None:
        self.folder = folder
        self.weight_bytes = sum(layer.weight_bytes for layer in model.graph.layers)
        self.allowed = tolerance(model.outputs)
        self._model, self._graph, self._spec = model, graph, spec
        self._outputs = tuple(spec.name for spec in model.outputs)

    def run_whole(self, limit_s: float) -> CheckResult:
        """Run the model as one slice and store its outputs in the folder; ModelRefused where it does not run."""
        model = self._model
        whole_slice = whole_model_slice(model)
        files = {str(name): runs for name, runs in whole_model_chunks(model).items()}
        _write_slice(self.folder / WHOLE, CutSlice(whole_slice, files))
        input_layers = [layer for layer in self._graph.layers if layer.name == INPUT_LAYER and not layer.nodes]
        input_slices = cut_slices(model, self._graph, [(INPUT_LAYER,)], self._spec) if input_layers else []
        slices = (*(cut.slice for cut in input_slices), whole_slice)
        job = CheckJob(folder=WHOLE, slices=slices, spec=self._spec, outputs=self._outputs)
        try:
            with _CheckProcess(self, limit_s) as child:
                result = child.run(job)
        except ChildFailed as failure:
            result = CheckResult(refused=str(failure))
        if result.refused:
            raise ModelRefused(f"the whole model does not run: {result.refused}")
        return result

    def write_cut(self, number: int, cut: _PlannedCut) -> CheckJob:
        """Write the slices of one cut to the folder and return the job for a child; ModelRefused where they cannot be
        made."""
        name = f"cut-{number}"
        halves = atoms(self._graph, [cut.device])
        slices = cut_slices(self._model, self._graph, halves, self._spec)
        for cut_slice in slices:
            _write_slice(self.folder / name, cut_slice)
        return CheckJob(
            folder=name, slices=tuple(slice_.slice for slice_ in slices), spec=self._spec, outputs=self._outputs
        )

    def cut_result(self, cut: _PlannedCut, result: CheckResult) -> Cut:
        """The report's entry for a cut, from the child's result."""
        sends = self._crossing_tensors(cut.device)
        tensors = [self._graph.tensors[name] for name in sends]
        here = [layer for layer in self._graph.layers if layer.name in cut.device]
        read_here = {name for layer in here for name in layer.reads}
        exact, fast = result.modes.get("exact"), result.modes.get("fast")
        return Cut(
            name=cut.name,
            split_after=cut_name(layer.name for layer in here if read_here.isdisjoint(layer.writes)),
            device_layers=len(here),
            sends=sends,
            up_bytes=sum(tensor.bytes for tensor in tensors),
            open_lengths=any(-1 in tensor.shape for tensor in tensors if tensor.name != FRAME),
            verdict=verdict(exact, self.allowed) if exact else "refused",
            error=exact.error if exact else None,
            fast=verdict(fast, self.allowed) if fast else None,
            fast_error=fast.error if fast else None,
            reason=result.refused or _difference_reason(exact),
        )

    def _crossing_tensors(self, device: frozenset[str]) -> tuple[str, ...]:
        """Names of the tensors that cross from the device, in the order in which layers write them."""
        layers = self._graph.layers
        read = {name for layer in layers if layer.name not in device for name in layer.reads}
        written = [name for layer in layers if layer.name in device for name in layer.writes]
        return tuple(name for name in (*self._graph.inputs, *written) if name in read)


def _difference_reason(exact: Difference | None) -> str:
    if exact is None or exact.same:
        return ""
    far = "cannot be compared with the whole's" if exact.error is None else f"differs by {exact.error:.2g}"
    return f"the output {exact.worst!r} {far}"


def _write_slice(folder: Path, cut: CutSlice) -> None:
    """Write the slice's files into a folder of its name."""
    (folder / cut.slice.name).mkdir(parents=True)
    cut.write(folder / cut.slice.name)


def _check_cuts(work_queue: _CutQueue, jobs: int | None) -> list[Cut]:
    """Check every cut, on several child processes at once; returns the results in the order of the queue's cuts."""
    cuts = work_queue.cuts
    workers = max(1, min(jobs or min(MAX_CHILDREN, os.cpu_count() or 1, len(cuts) // MIN_CUTS_PER_CHILD), len(cuts)))
    with ThreadPoolExecutor(workers) as pool:
        try:
            for future in [pool.submit(work_queue.work) for _ in range(workers)]:
                future.result()
        finally:
            work_queue.stop()
    return [work_queue.results[number] for number in range(len(cuts))]


@dataclass
class _CutQueue:
    """Queue of the cuts to check, shared by the worker threads, with the results so far."""

    workspace: _Workspace
    cuts: Sequence[_PlannedCut]
    limit_s: float
    progress: Progress | None
    max_crashes: int
    results: dict[int, Cut] = field(default_factory=dict)
    crashes: int = 0
    """Number of latest cuts in a row that crashed the runtime; cuts that were not run do not count."""
    _waiting: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for number in range(len(self.cuts)):
            self._waiting.put(number)

    def work(self) -> None:
        """Worker thread: check queued cuts in a child process of its own until the queue is empty."""
        with _CheckProcess(self.workspace, self.limit_s, len(self.cuts)) as child:
            while True:
                try:
                    number = self._waiting.get_nowait()
                except queue.Empty:
                    return
                result = self._check_cut(child, number)
                self._store_result(number, self.workspace.cut_result(self.cuts[number], result))

    def stop(self) -> None:
        """Empty the queue, so that the workers end after their present cut."""
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()

    def _check_cut(self, child: _CheckProcess, number: int) -> CheckResult:
        if self.crashes >= self.max_crashes:
            return CheckResult(refused=f"not tried: {self.crashes} cuts before it crashed the runtime")
        try:
            result = child.run(self.workspace.write_cut(number, self.cuts[number]))
        except ChildFailed as failure:
            with self._lock:
                self.crashes += 1
            return CheckResult(refused=str(failure))
        except Interrupted:
            raise
        except EdgeError as error:  # its slices cannot be made: nothing ran, so it is not counted either way
            return CheckResult(refused=str(error))
        finally:
            shutil.rmtree(self.workspace.folder / f"cut-{number}", ignore_errors=True)
        self.crashes = 0
        return result

    def _store_result(self, number: int, cut: Cut) -> None:
        with self._lock:
            self.results[number] = cut
            if self.progress is not None:
                self.progress(len(self.results), len(self.cuts))


class _CheckProcess:
    """A child process that runs check jobs one at a time; one that fails is replaced at the next job."""

    def __init__(self, workspace: _Workspace, limit_s: float, jobs: int = 1) -> None:
        """`limit_s`: for one job, `jobs`: how many it runs at most."""
        self._workspace, self._limit_s = workspace, limit_s
        self._limits = measurement_limits(workspace.weight_bytes, workspace.folder, limit_s * jobs)
        self._child: ChildProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, job: CheckJob) -> CheckResult:
        """Run one job in the child. ChildFailed where the job crashes the child or exceeds the time limit."""
        self._child = self._child or ChildProcess(CHILD, self._workspace.folder, limits=self._limits)
        try:
            return msgspec.json.decode(self._child.ask(msgspec.json.encode(job), self._limit_s), type=CheckResult)
        except EdgeError:
            self._stop()
            raise

    def _stop(self) -> None:
        if self._child is not None:
            self._child.stop()
        self._child = None
