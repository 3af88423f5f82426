"""Releases of one ONNX slice x -> y that do to their process what a test asks for, in workers with tight bounds.

Each model is harmless on small numbers and does its worst on large ones, so that it can be loaded, pass its golden
inputs and be timed before it strikes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from edgesplit.oip import protocol as oip
from edgesplit.plan import Plan, Row
from edgesplit.release.manifest import GoldenExample, Manifest, Slice, chunk_of, encode_manifest, release_digest
from edgesplit.runtime import Tensor, Timing
from edgesplit.runtime.options import EngineOptions
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.worker.host import SliceRun
from edgesplit_agent.worker.supervised_host import SupervisedHost
from edgesplit_agent.worker.watchdog_policy import Bounds
from support.agent_engine import CLASS, DIGEST, LINK, X, Y
from support.device_storage import _file as slice_file

F, I32, I64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
SMALL = np.arange(4, dtype=np.float32).reshape(1, 4)
ENDLESS = np.full((1, 4), 200, np.float32)
GREEDY = np.full((1, 4), 2.0**29, np.float32)
DEADLY = np.full((1, 4), -(2.0**31), np.float32)
BOUNDS = Bounds(512 * 2**20)
PLAIN = EngineOptions()
LOCAL = Row(name="local", device=("s",), device_s=0.01)
AWAY = Row(name="remote", remote=("s",), sends=("x",), receives=("y",), up_bytes=300, remote_s=0.5)


def double() -> list[NodeProto]:
    """y = 2 x."""
    return [helper.make_node("Add", ["x", "x"], ["y"])]


def endless() -> list[NodeProto]:
    """y = x, but a loop without an end where x is above 100."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Add", ["v", "v"], ["next"])], "body",
        [_tensor("i", I64, ()), _tensor("go", TensorProto.BOOL, ()), _tensor("v", F, (1, 4))],
        [_tensor("on", TensorProto.BOOL, ()), _tensor("next", F, (1, 4))],
    )  # fmt: skip
    return [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Constant", [], ["bound"], value=numpy_helper.from_array(np.float32(100))),
        helper.make_node("Greater", ["most", "bound"], ["begin"]),
        helper.make_node("Loop", ["", "begin", "x"], ["y"], body=body),
    ]


def greedy() -> list[NodeProto]:
    """y = x, by way of as many zeros as the largest x says."""
    return [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=1),
        helper.make_node("Cast", ["most"], ["many"], to=I64),
        helper.make_node("Constant", [], ["flat"], value=numpy_helper.from_array(np.array([1]))),
        helper.make_node("Reshape", ["many", "flat"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("ReduceMax", ["zeros"], ["zero"], keepdims=0),
        helper.make_node("Add", ["x", "zero"], ["y"]),
    ]


def deadly() -> list[NodeProto]:
    """y = x, by way of a division that x86 answers with a signal where x is the smallest integer."""
    return [
        helper.make_node("Cast", ["x"], ["whole"], to=I32),
        helper.make_node("Constant", [], ["minus"], value=numpy_helper.from_array(np.array([-1], np.int32))),
        helper.make_node("Mod", ["whole", "minus"], ["rest"]),
        helper.make_node("Cast", ["rest"], ["zero"], to=F),
        helper.make_node("Add", ["x", "zero"], ["y"]),
    ]


def _tensor(name: str, kind: int, shape: tuple[int, ...]) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def graph(nodes: list[NodeProto]) -> bytes:
    """An ONNX file of these, from x to y."""
    made = helper.make_graph(nodes, "s", [_tensor("x", F, (1, 4))], [_tensor("y", F, (1, 4))])
    opset = [helper.make_opsetid("", 17)]
    return bytes(onnx.ModelProto(ir_version=8, opset_import=opset, graph=made, producer_name="t").SerializeToString())


class Shelf:
    """What `open_release` would return."""

    digest = DIGEST

    def __init__(self, folder: Path, nodes: list[NodeProto], *rows: Row) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "graph.onnx").write_bytes(graph(nodes))
        self.plan = Plan(model="one@1", device_class=CLASS, rows=rows or (LOCAL,), link=LINK, slice_s={"s": 0.01})
        self.manifest = Manifest(
            model="one@1", model_sha256="0" * 64, created="2025-06-15T00:00:00Z", input_spec=None, inputs=(X,),
            outputs=(Y,), slices=(Slice("s", "onnx", ("s",), (X,), (Y,)),), plans={CLASS: self.plan},
        )  # fmt: skip

    def slice_folder(self, name: str) -> Path:
        """Without verification."""
        return self._folder


@contextmanager
def hosted(
    folder: Path, nodes: list[NodeProto], *rows: Row, bounds: Bounds = BOUNDS, setup: EngineOptions = PLAIN, **kind: Any
) -> Iterator[SupervisedHost]:
    """That model in a worker."""
    shelf: Any = Shelf(folder / "slice", nodes, *rows)
    host = SupervisedHost(shelf, shelf.plan, setup, bounds, **kind)
    try:
        yield host
    finally:
        host.close()


@contextmanager
def loaded(folder: Path, nodes: list[NodeProto], *rows: Row, **kind: Any) -> Iterator[LoadedRelease]:
    """The same as the engine has it."""
    with hosted(folder, nodes, *rows, **kind) as host:
        shelf = Shelf(folder / "slice", nodes, *rows)
        yield LoadedRelease(DIGEST, shelf.manifest, shelf.plan, host)


def run(host: SupervisedHost, x: Tensor, *, within_s: float = 60.0, expected_s: float | None = 0.01) -> Tensor:
    """y."""
    return host.run(SliceRun(["s"], {"x": x}, perf_counter() + within_s, expected_s), Timing())["y"]


def is_there(pid: int) -> bool:
    """Whether a process of that number lives."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def signal_worker(host: SupervisedHost, number: int) -> None:
    """To the worker that is there now, if any."""
    if pid := host.status()["pid"]:
        os.kill(pid, number)


class OneSlice:
    """A release of one such model, as `power_world.Source` adds it; the golden input is answered by numpy's `twice` of
    it, or by itself where the model is not `double`."""

    def __init__(self, version: int, nodes: list[NodeProto], golden: Tensor = SMALL) -> None:
        files = {"graph.onnx": [graph(nodes)]}
        y = golden * 2 if nodes[0].op_type == "Add" else golden
        request = b"".join(oip.encode_request(oip.InferRequest({"x": golden}, id=f"golden {version}"))[0])
        response = b"".join(oip.encode_response(oip.InferResponse("one", {"y": y}, id="golden"))[0])
        self.chunks = {chunk_of(data).sha256: data for data in (files["graph.onnx"][0], request, response)}
        slices = (Slice("s", "onnx", ("s",), (X,), (Y,), (slice_file("graph.onnx", files["graph.onnx"]),)),)
        plan = Plan(model=f"tiny@{version}", device_class=CLASS, rows=(LOCAL,), link=LINK)
        self.raw = encode_manifest(
            Manifest(
                model=f"tiny@{version}", model_sha256="0" * 64, created="2025-06-15T00:00:00Z", input_spec=None,
                inputs=(X,), outputs=(Y,), slices=slices, plans={CLASS: plan},
                golden=(GoldenExample(chunk_of(request), chunk_of(response)),),
            )
        )  # fmt: skip
        self.digest = release_digest(self.raw)
