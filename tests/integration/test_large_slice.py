"""A slice that is larger than what the controller and the agent may take of memory: pushed, cut, published, run.

268 MB here; `EDGESPLIT_LARGE_MODEL=1` (`make soak`) takes 2 GiB. Memory is what nothing else can have back (anonymous
pages): mapped files are the page cache's.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from edgesplit_partitioner.onnx_format import archive
from support import onnx_models as tiny
from support.edgesplit_processes import Cloud, eventually

LARGE = bool(os.environ.get("EDGESPLIT_LARGE_MODEL"))
WIDTH = 23_168 if LARGE else 8_192
"""Of the one square matrix that the model consists of."""
MOST_GROWN_BYTES = 96 * 2**20
"""By which the controller, and the agent until it loads the model, may grow: half of the smaller slice."""


class Memory:
    """The most anonymous memory that a process has had since this began to look."""

    def __init__(self, pid: int | None, until: Callable[[], bool] = lambda: False) -> None:
        assert pid is not None
        self._pid, self._until = pid, until
        self._stop = threading.Event()
        self.before = self.most = anonymous_bytes(pid)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.02) and not self._until():
            self.most = max(self.most, anonymous_bytes(self._pid))

    def grown(self) -> int:
        """Ends the looking; bytes."""
        self._stop.set()
        self._thread.join()
        return self.most - self.before


def anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon: Linux before 4.5")


def large_model(folder: Path) -> Path:
    """One product with noise of WIDTH x WIDTH, its weights in a file beside the model."""
    folder.mkdir()
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    ends = [tiny.value("x", [1, WIDTH])], [tiny.value("y", [1, WIDTH])]
    weights = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[WIDTH, WIDTH])
    archive.set_external_location(weights, "w.data", 0, 4 * WIDTH * WIDTH)
    source = np.random.default_rng(1)
    with (folder / "w.data").open("wb") as file:
        for _ in range(0, WIDTH, 32):
            file.write(source.random((32, WIDTH), np.float32).tobytes())
    graph = helper.make_graph([node], "large", *ends, [weights])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "model.onnx").write_bytes(made.SerializeToString())
    return folder / "model.onnx"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cloud]:
    """A controller of this test's own."""
    cloud = Cloud(tmp_path)
    cloud.start()
    yield cloud
    cloud.stop()
    shutil.rmtree(tmp_path)  # pytest keeps the folders of its last runs, and these are large


@pytest.mark.timeout(3600 if LARGE else 900)
def test_a_large_slice_is_delivered_and_run_in_little_memory(own: Cloud, tmp_path: Path) -> None:
    """Pushed, deployed whole to the device, fetched over MQTT, answered: neither side holds the slice in memory."""
    model = large_model(tmp_path / "model")
    device = own.agent("pi-large")
    controller = Memory(own.process.pid)
    own.edgectl("model", "push", str(model), "--name", "large", timeout=1800)
    pushed = controller.most - controller.before
    releases = device.data / "releases"
    agent = Memory(device.process.pid, until=lambda: any(releases.glob("*/manifest.json")))
    own.edgectl("deploy", "large", "--partition", "device", "--to", "pi-large", "--wait", "1800", timeout=1800)
    grown = {"controller, push": pushed, "controller": controller.grown(), "agent": agent.grown()}
    size = 4 * WIDTH * WIDTH
    print(f"a slice of {size / 1e6:.0f} MB: " + ", ".join(f"{who} +{of / 1e6:.0f} MB" for who, of in grown.items()))
    x = np.full((1, WIDTH), np.float32(1 / WIDTH))
    answer = eventually("an answer", lambda: device.infer("large", {"x": x}, deadline_s=120))
    weights = np.memmap(model.parent / "w.data", np.float32, "r", shape=(WIDTH, WIDTH))
    np.testing.assert_allclose(answer.outputs["y"], weights.mean(axis=0, keepdims=True), rtol=1e-3)
    assert max(grown.values()) < MOST_GROWN_BYTES, grown
