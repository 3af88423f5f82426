"""The emulated runtime: real answers, the emulated device's time."""

from __future__ import annotations

import threading
from pathlib import Path
from time import perf_counter

import numpy as np

from edgesplit.release.manifest import Slice
from edgesplit.runtime import Program, Tensor, Tensors, Timing, run_slices
from edgesplit.runtime.emulated import EmulatedRuntime


class Instant:
    """Adds one, at once, or when the test allows."""

    name = "instant"

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.gate: threading.Event | None = None

    def load(self, slice_: Slice, folder: Path) -> Program:
        return self

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        self.running += 1
        self.most = max(self.most, self.running)
        if self.gate is not None:
            self.gate.wait(10)
        self.running -= 1
        return {"y": tensors["x"] + np.float32(1)}


SLICE = Slice("s", "onnx", ("s",), (), ())
X = {"x": np.zeros(2, np.float32)}


def test_run_takes_the_predicted_time_and_gives_the_real_answer(tmp_path: Path) -> None:
    """Never less than the profile says, and the inner engine's outputs bit for bit."""
    program = EmulatedRuntime(Instant(), {"s": 0.03}).load(SLICE, tmp_path)
    start = perf_counter()
    outputs = program.run(X)
    assert perf_counter() - start >= 0.03
    assert np.array_equal(outputs["y"], np.ones(2, np.float32))
    assert not program.last_was_late


def test_slower_host_is_marked_late(tmp_path: Path) -> None:
    """The sample is counted, never hidden; a slice without a prediction is never late."""
    inner = Instant()
    inner.gate = threading.Event()
    late = EmulatedRuntime(inner, {"s": 1e-6}).load(SLICE, tmp_path)
    threading.Timer(0.05, inner.gate.set).start()
    timing = Timing()
    run_slices({"s": late}, ["s"], X, timing)
    assert timing.overruns == 1
    assert not EmulatedRuntime(Instant(), {}).load(SLICE, tmp_path).last_was_late


def test_emulated_device_has_one_processor(tmp_path: Path) -> None:
    """Two requests at once share it, also across runtimes of one device."""
    inner, processor = Instant(), threading.Lock()
    programs = [EmulatedRuntime(inner, {"s": 0.01}, processor).load(SLICE, tmp_path) for _ in range(4)]
    threads = [threading.Thread(target=program.run, args=(X,)) for program in programs]
    start = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert inner.most == 1
    assert perf_counter() - start >= 0.04
