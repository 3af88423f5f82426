"""What a model costs and where it is narrow, counted from its graph and measured on real frames."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import zstandard
from numpy.typing import NDArray

FLOAT32_BYTES = 4
ZSTD_LEVEL = 1


@dataclass(frozen=True, slots=True)
class NarrowPoint:
    """A place where one tensor is all that lives, with fewer bytes than the frame's pixels."""

    tensor: str
    shape: list[int]
    bytes: int
    mflop_before_part: float
    """The part of the model's work that is done before this tensor exists, 0..1."""
    zero_part: float = 0.0
    zstd_bytes_mean: float = 0.0
    zstd_bytes_p95: float = 0.0


class Measured:
    """One ONNX model with static shapes. Counts a multiplication and its addition as two operations."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
        self._shapes = {v.name: [int(d.dim_value) for d in v.type.tensor_type.shape.dim] for v in values}
        self._weights = {w.name: [int(d) for d in w.dims] for w in model.graph.initializer}

    @property
    def parameters(self) -> int:
        """Numbers that training has set."""
        return sum(math.prod(shape) for shape in self._weights.values())

    def mflop(self) -> dict[str, float]:
        """Millions of operations for one frame, by kind."""
        kinds: Counter[str] = Counter()
        for node in self._model.graph.node:
            kinds[self._kind(node)] += self._flop(node)
        return {"total": kinds.total() / 1e6} | {kind: flop / 1e6 for kind, flop in sorted(kinds.items())}

    def narrow_points(self, below_bytes: int) -> list[NarrowPoint]:
        """Every place between layers where exactly one tensor lives, smaller than `below_bytes`."""
        nodes = list(self._model.graph.node)
        last_use = {name: at for at, node in enumerate(nodes) for name in node.input}
        live, flop, found = {self._model.graph.input[0].name}, 0, list[NarrowPoint]()
        total = sum(map(self._flop, nodes))
        for at, node in enumerate(nodes[:-1]):
            live = {name for name in live if last_use[name] > at} | set(node.output)
            flop += self._flop(node)
            shape = self._shapes[node.output[0]]
            size = math.prod(shape) * FLOAT32_BYTES
            fused = nodes[at + 1].op_type == "Relu"  # the runtime makes one layer of the two
            if len(live) == 1 and size < below_bytes and not fused:
                found.append(NarrowPoint(node.output[0], shape, size, round(flop / total, 4)))
        return found

    def compressed(self, points: Sequence[NarrowPoint], images: NDArray[np.float32]) -> list[dict[str, Any]]:
        """The same points with how well zstd packs what really passes there, image by image."""
        names = [point.tensor for point in points]
        session = _session_showing(self._model, names)
        sizes: list[list[int]] = []
        zeros: list[list[float]] = []
        for image in images:
            tensors = session.run(names, {"image": image[None]})
            packer = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
            sizes.append([len(packer.compress(tensor.tobytes())) for tensor in tensors])
            zeros.append([float((tensor == 0).mean()) for tensor in tensors])
        mean, p95 = np.mean(sizes, axis=0), np.percentile(sizes, 95, axis=0)
        return [
            asdict(point)
            | {
                "zero_part": round(float(zero), 4),
                "zstd_bytes_mean": round(float(m)),
                "zstd_bytes_p95": round(float(p)),
            }
            for point, zero, m, p in zip(points, np.mean(zeros, axis=0), mean, p95, strict=True)
        ]

    def _kind(self, node: onnx.NodeProto) -> str:
        if node.op_type == "Gemm":
            return "dense"
        if node.op_type != "Conv":
            return "elementwise"
        return "dense" if _groups(node) == 1 else "depthwise"

    def _flop(self, node: onnx.NodeProto) -> int:
        made = math.prod(self._shapes[node.output[0]])
        if node.op_type == "Conv":
            return 2 * made * math.prod(self._weights[node.input[1]][1:])
        if node.op_type == "Gemm":
            return 2 * math.prod(self._weights[node.input[1]])
        return math.prod(self._shapes[node.input[0]])


def _groups(node: onnx.NodeProto) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "group"), 1)


def _session_showing(model: onnx.ModelProto, names: Sequence[str]) -> onnxruntime.InferenceSession:
    """A session that also gives the tensors inside the model called `names`."""
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    outputs = {value.name for value in opened.graph.output}
    inner = [value for value in opened.graph.value_info if value.name in names and value.name not in outputs]
    opened.graph.output.extend(inner)
    return onnxruntime.InferenceSession(opened.SerializeToString(), providers=["CPUExecutionProvider"])
