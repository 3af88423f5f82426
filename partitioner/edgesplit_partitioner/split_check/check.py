"""Will this model split safely? Cut at every boundary, run both halves as slices run, compare with the whole.

A boundary lies after each layer, in the layers' order; cuts of a plan's table, which may take another way through the
graph, can be added. Between the operators of one layer no cut goes, and `Inside` says why. The halves are the very
slices that a release would hold, run by the very runtimes of agent and offload server, in child processes
(`check_run`): one that crashes or hangs is one boundary's answer, and the others go on.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from edgesplit.errors import EdgeError, Interrupted, ModelRefused, UsageError
from edgesplit.input_spec import FRAME, INPUT_LAYER, InputSpec
from edgesplit.plan import Row
from edgesplit.release.manifest import Slice, TensorSpec
from edgesplit.runtime import Tensor, Tensors
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.ir.prepared_model import PreparedModel, whole_runs
from edgesplit_partitioner.onnx_format.indivisible import Inside, insides
from edgesplit_partitioner.profiling.layers import Progress, Sample, stand_in_frame
from edgesplit_partitioner.sandbox.exit_status import check_not_interrupted
from edgesplit_partitioner.slicing import CutSlice, atoms, cut_slices
from edgesplit_partitioner.split_check.child import WHOLE, Difference, Found, Job, store_samples

CHILD = (sys.executable, "-m", "edgesplit_partitioner.split_check.child")
TOLERANCE = 1e-5
"""Of the largest absolute value of an output. One unit in the last place of the output's own type, where that is
more (half precision: 2^-10)."""
LIMIT_S = 300.0
"""For both halves of one cut, in both modes, over all samples."""
MEMORY_BYTES = 16 * 2**30
"""Address space of a child, beyond sixteen times the model's weights."""
MOST_CRASHES = 5
"""After so many boundaries in a row that killed the runtime the rest are not tried."""
MOST_JOBS = 4
CUTS_A_CHILD = 8
"""A child takes as long to start as a small model to be cut so often."""

Verdict = Literal["exact", "within", "off", "refused"]


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """One cut and what became of it."""

    name: str = ""
    """Of a plan's row; empty for the boundary after a layer."""
    after: str
    """The last layer on the device; empty where all run remotely."""
    device_layers: int
    sends: tuple[str, ...] = ()
    """Tensors that cross."""
    up_bytes: int = 0
    """Raw; as declared, or as a trial run showed."""
    open_lengths: bool = False
    """One of them has a length that depends on the data."""
    verdict: Verdict
    """`exact`: bit for bit as the whole. `within`: the error is within the tolerance. `off`: it is not.
    `refused`: not cuttable, and `why` says why. Of the exact mode: the one that slices run in."""
    error: float | None = 0.0
    """Relative, in exact mode; None where the answers cannot be compared."""
    fast: Verdict | None = None
    """The same in fast mode, against the whole in fast mode; None where the engine has one mode."""
    fast_error: float | None = None
    why: str = ""

    @property
    def fine(self) -> bool:
        """Safe to deploy: right in the mode that slices run in."""
        return self.verdict in ("exact", "within")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All boundaries of a model."""

    format: str
    layers: int
    operators: int
    inputs: str
    """What was fed, in a few words."""
    tolerance: float
    steady: bool
    """The whole answers the same bits when it is asked twice; where it does not, nothing can be exact."""
    fast_error: float | None
    """What the runtime's own optimisation changes in the whole, uncut; None where it has none, or it cannot be said."""
    cuts: tuple[Cut, ...]
    inside: tuple[Inside, ...]
    """Where no cut goes."""

    @property
    def fine(self) -> bool:
        """Every cut may be deployed."""
        return all(cut.fine for cut in self.cuts)

    @property
    def fast_fine(self) -> bool:
        """And in fast mode too."""
        return all(cut.fast in (None, "exact", "within") for cut in self.cuts)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A cut to be tried."""

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
) -> Report:
    """Every boundary of `model`, and the cuts of `rows` (with their layers, as the planner gives them).

    `graph` and `spec` as `with_input_layer` made them, or the model's own and None. Without samples, seeded noise.
    ModelRefused where the whole model itself does not run.
    """
    wanted = wanted_cuts(graph, rows)
    feeds = [_feed(model, spec, sample, seed) for sample in samples or (None,)]
    with tempfile.TemporaryDirectory(prefix="edgesplit-check-") as name:
        workplace = _Workplace(Path(name), model, graph, spec)
        store_samples(workplace.folder, feeds)
        whole = workplace.whole(LIMIT_S * len(feeds))
        if whole.refused:
            raise ModelRefused(f"the whole model does not run: {whole.refused}")
        cuts = _tried(workplace, wanted, LIMIT_S * len(feeds), jobs, progress)
    return Report(
        format=model.format,
        layers=len(graph.layers),
        operators=len({place for layer in graph.layers for place in layer.nodes}),
        inputs=f"{len(samples)} samples" if samples else f"noise (seed {seed})",
        tolerance=tolerance(model.outputs),
        steady=whole.modes["exact"].same,
        fast_error=whole.modes["fast"].error if "fast" in whole.modes else None,
        cuts=tuple(cuts),
        inside=insides(model),
    )


def wanted_cuts(graph: LayerGraph, rows: Iterable[Row] = ()) -> list[_Wanted]:
    """The closed set before each layer, everything remote first, then those of `rows` that are none of these."""
    names = [layer.name for layer in graph.layers]
    wanted = [_Wanted("", frozenset(names[:count])) for count in range(len(names))]
    known = {one.device for one in wanted} | {frozenset(names)}
    for row in rows:
        device = frozenset(row.layers)
        if device not in known:
            known.add(device)
            wanted.append(_Wanted(row.name, device))
    return wanted


def tolerance(outputs: Iterable[TensorSpec]) -> float:
    """Relative: of the coarsest output."""
    return max((2.0**-10 if one.datatype == "FP16" else TOLERANCE for one in outputs), default=TOLERANCE)


def verdict(found: Difference, allowed: float) -> Verdict:
    """How good this is."""
    if found.same:
        return "exact"
    return "within" if found.error is not None and found.error <= allowed else "off"


def noise(specs: Iterable[TensorSpec], seed: int) -> dict[str, Tensor]:
    """Inputs that keep every operator busy: floats between 0 and 1, bytes of all values, ones for whole numbers that
    may be lengths or places. Open lengths are 1."""
    rng = np.random.default_rng(seed)
    made: dict[str, Tensor] = {}
    for one in specs:
        shape = [max(length, 1) for length in one.shape]
        if one.datatype in ("FP16", "FP32", "FP64"):
            made[one.name] = rng.random(shape).astype(f"float{one.datatype[2:]}")
        elif one.datatype in ("UINT8", "INT8"):
            dtype = np.uint8 if one.datatype == "UINT8" else np.int8
            made[one.name] = rng.integers(0, 256, shape, dtype=np.uint8).view(dtype)
        else:
            made[one.name] = np.ones(shape, one.datatype.lower())
    return made


def _feed(model: PreparedModel, spec: InputSpec | None, sample: Sample | None, seed: int) -> Tensors:
    """What an application would send; inputs that a sample does not give get noise."""
    rest = noise((one for one in model.inputs if spec is None or one.name != spec.tensor), seed)
    if isinstance(sample, bytes) and spec is None:
        raise UsageError("a sample is a frame, but the model has no input spec: say what arrives with --input")
    if spec is not None and (sample is None or isinstance(sample, bytes)):
        frame = stand_in_frame(spec, seed) if sample is None else sample
        return {FRAME: np.frombuffer(bytes(frame), np.uint8), **rest}
    if spec is not None:
        raise UsageError(f"the model takes frames ({spec.media}), and a sample holds tensors")
    assert not isinstance(sample, bytes)
    return {**rest, **(sample or {})}


class _Workplace:
    """A folder with the inputs and the whole's answers, into which cuts are written one by one."""

    def __init__(self, folder: Path, model: PreparedModel, graph: LayerGraph, spec: InputSpec | None) -> None:
        self.folder = folder
        self.memory_bytes = MEMORY_BYTES + 16 * sum(layer.weight_bytes for layer in model.graph.layers)
        self.allowed = tolerance(model.outputs)
        self._model, self._graph, self._spec = model, graph, spec
        self._outputs = tuple(one.name for one in model.outputs)

    def whole(self, limit_s: float) -> Found:
        """Run the model as one file, and keep its answers."""
        model = self._model
        one = Slice(WHOLE, model.format, (), model.inputs, model.outputs, kernels=model.kernels)
        place = self.folder / WHOLE / one.name
        place.mkdir(parents=True)
        for file, runs in whole_runs(model).items():
            with (place / file).open("wb") as target:
                target.writelines(runs)
        first = [layer for layer in self._graph.layers if layer.name == INPUT_LAYER and not layer.nodes]
        before = cut_slices(model, self._graph, [(INPUT_LAYER,)], self._spec) if first else []
        job = Job(folder=WHOLE, slices=(*(cut.slice for cut in before), one), spec=self._spec, outputs=self._outputs)
        with _Child(self, limit_s) as child:
            return child.ask(job)

    def cut(self, number: int, wanted: _Wanted) -> Job:
        """Write both halves of one cut; ModelRefused where they cannot be made."""
        name = f"cut-{number}"
        halves = atoms(self._graph, [wanted.device])
        slices = cut_slices(self._model, self._graph, halves, self._spec)
        for one in slices:
            _write(self.folder / name / one.slice.name, one)
        return Job(folder=name, slices=tuple(one.slice for one in slices), spec=self._spec, outputs=self._outputs)

    def described(self, wanted: _Wanted, found: Found) -> Cut:
        """What became of a cut, in the report's words."""
        sends = self._crossing(wanted.device)
        tensors = [self._graph.tensors[name] for name in sends]
        there = [layer.name for layer in self._graph.layers if layer.name in wanted.device]
        exact, fast = found.modes.get("exact"), found.modes.get("fast")
        return Cut(
            name=wanted.name,
            after=there[-1] if there else "",
            device_layers=len(there),
            sends=sends,
            up_bytes=sum(one.bytes for one in tensors),
            open_lengths=any(-1 in one.shape for one in tensors if one.name != FRAME),
            verdict=verdict(exact, self.allowed) if exact else "refused",
            error=exact.error if exact else None,
            fast=verdict(fast, self.allowed) if fast else None,
            fast_error=fast.error if fast else None,
            why=found.refused or _why_off(exact),
        )

    def _crossing(self, device: frozenset[str]) -> tuple[str, ...]:
        """Tensors that go up, in the order of their makers."""
        layers = self._graph.layers
        read = {name for layer in layers if layer.name not in device for name in layer.reads}
        here = [name for layer in layers if layer.name in device for name in layer.writes]
        return tuple(name for name in (*self._graph.inputs, *here) if name in read)


def _why_off(exact: Difference | None) -> str:
    if exact is None or exact.same:
        return ""
    far = "cannot be compared with the whole's" if exact.error is None else f"differs by {exact.error:.2g}"
    return f"the output {exact.worst!r} {far}"


def _write(folder: Path, cut: CutSlice) -> None:
    folder.mkdir(parents=True)
    cut.write(folder)


def _tried(
    workplace: _Workplace, wanted: Sequence[_Wanted], limit_s: float, jobs: int | None, progress: Progress | None
) -> list[Cut]:
    """Every cut, on several children at once."""
    workers = max(1, min(jobs or min(MOST_JOBS, os.cpu_count() or 1, len(wanted) // CUTS_A_CHILD), len(wanted)))
    line = _Line(workplace, wanted, limit_s, progress)
    with ThreadPoolExecutor(workers) as pool:
        try:
            for done in [pool.submit(line.work) for _ in range(workers)]:
                done.result()
        finally:
            line.stop()
    return [line.found[number] for number in range(len(wanted))]


@dataclass
class _Line:
    """Cuts waiting for a child, and what became of those that had one."""

    workplace: _Workplace
    wanted: Sequence[_Wanted]
    limit_s: float
    progress: Progress | None
    found: dict[int, Cut] = field(default_factory=dict)
    crashes: int = 0
    """In a row."""
    _waiting: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for number in range(len(self.wanted)):
            self._waiting.put(number)

    def work(self) -> None:
        """One worker: a child of its own, and cuts until there are none."""
        with _Child(self.workplace, self.limit_s) as child:
            while True:
                try:
                    number = self._waiting.get_nowait()
                except queue.Empty:
                    return
                found = self._try(child, number)
                self._note(number, self.workplace.described(self.wanted[number], found))

    def stop(self) -> None:
        """No further cuts."""
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()

    def _try(self, child: _Child, number: int) -> Found:
        if self.crashes >= MOST_CRASHES:
            return Found(refused=f"not tried: {self.crashes} cuts before it killed the runtime")
        try:
            return child.ask(self.workplace.cut(number, self.wanted[number]))
        except Interrupted:
            raise
        except EdgeError as error:
            return Found(refused=str(error))
        finally:
            with self._lock:
                self.crashes = self.crashes + 1 if child.died else 0
            shutil.rmtree(self.workplace.folder / f"cut-{number}", ignore_errors=True)

    def _note(self, number: int, cut: Cut) -> None:
        with self._lock:
            self.found[number] = cut
            if self.progress is not None:
                self.progress(len(self.found), len(self.wanted))


class _Child:
    """A child process that answers jobs; one that dies is replaced at the next job."""

    def __init__(self, workplace: _Workplace, limit_s: float) -> None:
        self.died = False
        """It did, on the latest job."""
        self._workplace, self._limit_s = workplace, limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, job: Job) -> Found:
        """Its answer, or what killed it."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        clock = threading.Timer(self._limit_s, kill)
        clock.start()
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            clock.cancel()
        self.died = not answer.endswith(b"\n")
        if not self.died:
            return msgspec.json.decode(answer, type=Found)
        status = process.wait()
        self._end()
        if late.is_set():
            return Found(refused=f"the runtime was not done after {self._limit_s:.0f} s")
        check_not_interrupted(status)
        ended = f"signal {-status}" if status < 0 else f"exit status {status}"
        return Found(refused=f"running it kills the runtime ({ended})")

    def _start(self) -> subprocess.Popen[bytes]:
        memory = str(self._workplace.memory_bytes)
        command = [*CHILD, str(self._workplace.folder), memory]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
            process.wait()
