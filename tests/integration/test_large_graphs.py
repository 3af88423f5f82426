"""Graphs with as many tensors, chunks and names as vit_b_16, vgg11 and a model of 2 GB have, in a real worker process.

The slice is described in the manifest as large as the original; the seeded weights themselves are scaled down, because
what failed was the description. `test_large_slice` delivers and runs weights of full size.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from edgesplit.limits import LIMITS
from edgesplit.plan import Plan, Row
from edgesplit.release.manifest import (
    Chunk,
    Manifest,
    Slice,
    SliceFile,
    TensorSpec,
    chunk_of,
    decode_manifest,
    encode_manifest,
)
from edgesplit.runtime import Timing
from edgesplit_agent.worker.host import SliceRun
from edgesplit_agent.worker.supervised_host import SupervisedHost
from support.agent_engine import CLASS, DIGEST, LINK
from support.workers import BOUNDS, PLAIN

WIDTH = 16
LAYERS = {
    "vit_b_16": [f"/encoder/layers/encoder_layer_{block}/{part}_{op}" for block in range(12)
                 for part in ("ln_1", "self_attention", "mlp") for op in range(28)],
    "vgg11": [f"/features/features.{block}/{part}" for block in range(21) for part in ("Conv", "Relu")],
    "two_gigabytes": [f"/model/layers.{block}/block_sparse_moe/experts.{op}/w" for block in range(32)
                      for op in range(64)],
}  # fmt: skip
"""Names of the operators; each writes one tensor that the worker returns."""
BYTES = {"vit_b_16": 346_300_000, "vgg11": 531_500_000, "two_gigabytes": 2 * 2**30}
"""Size of the weights as the manifest lists them."""


def network(names: list[str]) -> onnx.ModelProto:
    """A chain of these operators, products with seeded weights and activations in turns."""
    source = np.random.default_rng(6)
    nodes: list[NodeProto] = []
    weights: list[TensorProto] = []
    before = "x"
    for place, name in enumerate(names):
        output = f"{name}_output_0"
        if place % 2:
            nodes.append(helper.make_node("Tanh", [before], [output], name=name))
        else:
            values = source.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 4
            weights.append(numpy_helper.from_array(values, f"{name}.weight"))
            nodes.append(helper.make_node("MatMul", [before, f"{name}.weight"], [output], name=name))
        before = output
    values = [helper.make_tensor_value_info(f"{name}_output_0", TensorProto.FLOAT, [1, WIDTH]) for name in names]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, WIDTH])]
    graph = helper.make_graph(nodes, "large", inputs, values, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class LargeRelease:
    """What `open_release` would return, of a slice that is listed with as many chunks as weights of that size have."""

    digest = DIGEST

    def __init__(self, folder: Path, model: str) -> None:
        self._folder = folder
        made = network(LAYERS[model])
        (folder / "graph.onnx").write_bytes(made.SerializeToString())
        outputs = tuple(TensorSpec(f"{name}_output_0", "FP32", (1, WIDTH)) for name in LAYERS[model])
        inputs = (TensorSpec("x", "FP32", (1, WIDTH)),)
        slice_ = Slice("all", "onnx", tuple(LAYERS[model]), inputs, outputs, (file_of(BYTES[model]),))
        row = Row(name="local", device=("all",), device_s=1.0)
        self.plan = Plan(model=f"{model}@1", device_class=CLASS, rows=(row,), link=LINK)
        self.manifest = decode_manifest(
            encode_manifest(
                Manifest(
                    model=f"{model}@1", model_sha256="0" * 64, created="2025-06-15T00:00:00Z", input_spec=None,
                    inputs=inputs, outputs=outputs, slices=(slice_,), plans={CLASS: self.plan},
                )
            )
        )  # fmt: skip

    def slice_folder(self, name: str) -> Path:
        """Without verification."""
        return self._folder


def file_of(size: int) -> SliceFile:
    """A file of that size, cut into chunks as the controller cuts it."""
    count, rest = divmod(size, LIMITS.chunk_bytes)
    chunks = [Chunk(chunk_of(str(place).encode()).sha256, LIMITS.chunk_bytes) for place in range(count)]
    if rest:
        chunks.append(Chunk(chunk_of(b"rest").sha256, rest))
    return SliceFile("weights.bin", size, "0" * 64, tuple(chunks))


@pytest.mark.parametrize("model", LAYERS)
def test_vit_b_16_was_planned_signed_and_delivered_and_then_refused_by_the_worker(tmp_path: Path, model: str) -> None:
    """A slice whose manifest is valid is opened and run, and returns each of its tensors, however many there are."""
    release: Any = LargeRelease(tmp_path, model)
    host = SupervisedHost(release, release.plan, PLAIN, BOUNDS)
    try:
        x = np.random.default_rng(7).standard_normal((1, WIDTH)).astype(np.float32)
        answer = host.run(SliceRun(["all"], {"x": x}, perf_counter() + 120.0), Timing())
    finally:
        host.close()
    session = onnxruntime.InferenceSession(tmp_path / "graph.onnx", providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    assert len(names) == len(LAYERS[model])
    for name, expected in zip(names, session.run(names, {"x": x}), strict=True):
        np.testing.assert_allclose(answer[name], expected, rtol=1e-4, atol=1e-6)
