"""Accelerators of onnxruntime: used where they are present, skipped where not, and the outcome is reported.

No accelerator is needed here: the tests use a provider that this onnxruntime does not have, and a session that fails
like one whose device has vanished.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgesplit.errors import InferenceFailed, UsageError
from edgesplit.release.manifest import Slice
from edgesplit.runtime.onnx import CpuFallback, OnnxProgram, OnnxRuntime
from edgesplit.runtime.options import EngineOptions
from edgesplit.runtime.providers import CPU, PROVIDERS, check_names, select_available
from edgesplit_agent.worker import supervised_host as hosted_worker
from support.agent_engine import eventually
from support.workers import SMALL, Shelf, X, Y, double, hosted, run, signal_worker

ONE = Slice("s", "onnx", ("s",), (X,), (Y,))


@pytest.mark.parametrize(
    ("wanted", "there", "use", "notes"),
    [
        ((), [CPU], (), 0),
        (("cpu", "cuda"), [PROVIDERS["cuda"]], (), 0),
        (("tensorrt", "cuda", "cpu"), [PROVIDERS["cuda"]], ("cuda",), 1),
        (("cuda", "openvino"), [PROVIDERS["cuda"]], ("cuda",), 0),
        (("cuda",), [CPU], (), 1),
    ],
)
def test_accelerators_are_tried_in_order_up_to_the_cpu(wanted: Any, there: list[str], use: Any, notes: int) -> None:
    """Missing ones are reported, unless a better one is present."""
    found, said = select_available(wanted, there)
    assert found == use and len(said) == notes


@pytest.mark.parametrize("names", [("gpu",), ("cuda", "cuda")])
def test_unknown_provider_names_are_refused(names: tuple[str, ...]) -> None:
    """A typo does not leave the accelerator unused for good."""
    with pytest.raises(UsageError):
        check_names(names)


def test_accelerator_that_is_not_built_in_falls_back_to_the_cpu(tmp_path: Path) -> None:
    """In a worker, as the agent runs it; its status says so."""
    with hosted(tmp_path, double(), setup=EngineOptions(providers=("cuda", "cpu"))) as host:
        assert np.array_equal(run(host, SMALL), SMALL * 2)
        assert any("cuda: not in this build" in note for note in host.status()["notes"])


def test_accelerator_that_refuses_a_slice_falls_back_to_the_cpu(tmp_path: Path) -> None:
    """onnxruntime lists it, but cannot use it, for example for lack of its driver."""
    Shelf(tmp_path, double())
    runtime = OnnxRuntime(providers=("cuda",), available=[PROVIDERS["cuda"], CPU])
    assert np.array_equal(runtime.load(ONE, tmp_path).run({"x": SMALL})["y"], SMALL * 2)
    assert any("refuses slice s" in note for note in runtime.notes)


class Vanished:
    """A session whose device is not there any more."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.runs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def run(self, *_: object) -> Any:
        self.runs += 1
        raise RuntimeError("CUDA failure 700")


def test_accelerator_that_fails_in_a_run_falls_back_to_the_cpu(tmp_path: Path) -> None:
    """The request in which it fails is answered by the CPU, later ones do not try it again."""
    Shelf(tmp_path, double())
    cpu = OnnxRuntime()._open(ONE, tmp_path, ())
    said: list[Exception] = []
    gone = Vanished(cpu[0])
    program = OnnxProgram(ONE, (gone, None), CpuFallback(lambda: cpu, said.append))  # type: ignore[arg-type]
    for _ in range(2):
        assert np.array_equal(program.run({"x": SMALL})["y"], SMALL * 2)
    assert gone.runs == 1 and "CUDA failure" in str(said[0])


def test_input_that_the_cpu_refuses_too_is_no_accelerator_failure(tmp_path: Path) -> None:
    """It stays in use."""
    Shelf(tmp_path, double())
    runtime = OnnxRuntime()
    opened = runtime._open(ONE, tmp_path, ())
    told: list[Exception] = []
    program = OnnxProgram(ONE, opened, CpuFallback(lambda: runtime._open(ONE, tmp_path, ()), told.append))
    with pytest.raises(InferenceFailed):
        program.run({"x": np.zeros((1, 4), np.int64)})
    assert program._opened is opened and not told


def test_repeated_worker_crashes_disable_the_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that ends the process: the CPU answers, the status says so, and after a while the accelerator is tried
    again."""
    monkeypatch.setattr(hosted_worker, "MAX_ACCELERATOR_LOSSES", 1)
    with hosted(tmp_path, double(), setup=EngineOptions(providers=("cuda",))) as host:
        signal_worker(host, signal.SIGSEGV)
        eventually("it is left out", lambda: any("accelerator gone" in note for note in host.status()["notes"]))
        assert np.array_equal(run(host, SMALL), SMALL * 2)
        monkeypatch.setattr(hosted_worker, "ACCELERATOR_PAUSE_S", 0.0)
        eventually("it is tried again", lambda: any("not in this build" in note for note in host.status()["notes"]))
        assert np.array_equal(run(host, SMALL), SMALL * 2)
        assert host.status()["starts"] == 3 and host.status()["lost"] == 1
