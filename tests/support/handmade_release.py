"""A release of two tiny ONNX slices, made by hand: mid = a + b; out = mid + mid, same = mid."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgesplit.errors import NotFound
from edgesplit.oip import protocol as oip
from edgesplit.plan import Link, Plan, Row
from edgesplit.release.manifest import Manifest, Slice, TensorSpec

DIGEST = "ab" * 32
DEVICE_CLASS = "raspberrypi3b+"
CUT = oip.remote_name(DIGEST, DEVICE_CLASS, "cut-1")
REMOTE = oip.remote_name(DIGEST, DEVICE_CLASS, "remote")
LOCAL = oip.remote_name(DIGEST, DEVICE_CLASS, "local")
CODEC = oip.remote_name(DIGEST, DEVICE_CLASS, "cut-2")
LATER = oip.remote_name(DIGEST, DEVICE_CLASS, "cut-3")
COARSE = {
    "int6": oip.remote_name(DIGEST, DEVICE_CLASS, "cut-4"),
    "int4": oip.remote_name(DIGEST, DEVICE_CLASS, "cut-5"),
}
"""Rows by their codec."""
MID = np.array([[1, 2, 3, 4]], np.float32)

SPECS = {name: TensorSpec(name, "FP32", (1, 4)) for name in ("a", "b", "mid", "out", "same")}
_HEAD = Slice("s01-head", "onnx", ("add1",), (SPECS["a"], SPECS["b"]), (SPECS["mid"],))
_TAIL = Slice("s02-tail", "onnx", ("add2", "id"), (SPECS["mid"],), (SPECS["out"], SPECS["same"]))
_NODES = {
    "s01-head": [helper.make_node("Add", ["a", "b"], ["mid"])],
    "s02-tail": [helper.make_node("Add", ["mid", "mid"], ["out"]), helper.make_node("Identity", ["mid"], ["same"])],
}
_ENDS = ("out", "same")


class HandmadeRelease:
    """What `open_release` would return, with its slices in `folder`; counts how often each is asked for."""

    digest = DIGEST

    def __init__(self, folder: Path) -> None:
        self.manifest = make_manifest()
        self.asked: Counter[str] = Counter()
        self._folder = folder
        for one in self.manifest.slices:
            (folder / one.name).mkdir(parents=True, exist_ok=True)
            (folder / one.name / "graph.onnx").write_bytes(graph_bytes(one))

    def slice_folder(self, name: str) -> Path:
        """As the real one's, without verification."""
        self.asked[name] += 1
        return self._folder / name

    def open(self, digest: str) -> HandmadeRelease:
        """An opener that knows this release only."""
        if digest != DIGEST:
            raise NotFound(f"release {digest[:12]} is not here")
        return self


def make_manifest() -> Manifest:
    """Rows: all local, all remote, a cut after the head, raw, by int8, by a codec of a later day, by int6 and int4."""
    head, tail, both = ("s01-head",), ("s02-tail",), ("s01-head", "s02-tail")
    rows = (
        Row(name="local", device=both),
        Row(name="remote", remote=both, sends=("a", "b"), receives=_ENDS),
        Row(name="cut-1", device=head, remote=tail, sends=("mid",), receives=_ENDS),
        Row(name="cut-2", device=head, remote=tail, sends=("mid",), receives=_ENDS, codecs={"mid": "int8"}),
        Row(name="cut-3", device=head, remote=tail, sends=("mid",), receives=_ENDS, codecs={"mid": "int2"}),
        Row(name="cut-4", device=head, remote=tail, sends=("mid",), receives=_ENDS, codecs={"mid": "int6"}),
        Row(
            name="cut-5",
            device=head,
            remote=tail,
            sends=("mid",),
            receives=_ENDS,
            codecs={"mid": "int4"},
            clips={"mid": 0.5},
        ),
    )
    link = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.01)
    return Manifest(
        model="handmade@1",
        model_sha256="0" * 64,
        created="2025-01-01T00:00:00Z",
        input_spec=None,
        inputs=(SPECS["a"], SPECS["b"]),
        outputs=(SPECS["out"], SPECS["same"]),
        slices=(_HEAD, _TAIL),
        plans={DEVICE_CLASS: Plan(model="handmade", device_class=DEVICE_CLASS, rows=rows, link=link)},
    )


def graph_bytes(one: Slice) -> bytes:
    """The slice as an ONNX file's bytes."""
    ends = [
        [helper.make_tensor_value_info(spec.name, TensorProto.FLOAT, spec.shape) for spec in specs]
        for specs in (one.inputs, one.outputs)
    ]
    graph = helper.make_graph(_NODES[one.name], one.name, ends[0], ends[1])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())
