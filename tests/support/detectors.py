"""Two small detectors of coloured quarters of a picture, whose layouts and input sizes differ, with pictures and what
they show.

A quarter of the picture that is bright in one colour is a thing of that class. The small detector (yolox, 64 pixels)
confuses the colours somewhat and is less sharp; the large one (yolov8, 128 pixels) sees what there is.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from PIL import Image

INPUT = "image/jpeg 128x128 q95 rgb scale=1/255"
CLASSES = 3
QUARTERS = ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.5, 0.5))
"""Left and top of each, in the order of the detectors' cells."""
SMALL, LARGE = "boxes:yolox:0.5", "boxes:yolov8:0.5"
SURE = "sure"
"""Output of the small detector: the least distance of any class's score to one half."""


@dataclass(frozen=True)
class Picture:
    """A frame with the boxes that it shows."""

    jpeg: bytes
    boxes: tuple[tuple[tuple[float, float, float, float], int], ...]
    """Corners, and class."""


def draw_pictures(count: int, seed: int) -> list[Picture]:
    """Each quarter is a thing or not; some things are dim, and some that are none are nearly as bright."""
    rng = np.random.default_rng(seed)
    return [_draw(rng) for _ in range(count)]


def _draw(rng: np.random.Generator) -> Picture:
    pixels = np.zeros((128, 128, 3))
    boxes = []
    for left, top in QUARTERS:
        colour = rng.uniform(0.0, 0.35, 3)
        if rng.random() < 0.5:
            label = int(rng.integers(CLASSES))
            colour[label] = rng.uniform(0.6, 1.0)
            boxes.append(((left, top, left + 0.5, top + 0.5), label))
        across, down = int(left * 128), int(top * 128)
        pixels[down : down + 64, across : across + 64] = colour
    file = io.BytesIO()
    Image.fromarray((pixels * 255).astype(np.uint8)).save(file, "JPEG", quality=95)
    return Picture(file.getvalue(), tuple(boxes))


def small_detector(seed: int = 3, *, with_score: bool = False) -> bytes:
    """Layout yolox, [1, 84, 8], of 64 pixels; with the output `SURE` too."""
    rng = np.random.default_rng(seed)
    mix = np.eye(CLASSES) + rng.normal(0.0, 0.16, (CLASSES, CLASSES))
    nodes = [
        _node("Conv", ["image", "mean"], ["cells"], kernel_shape=[32, 32], strides=[32, 32]),
        _node("Conv", ["cells", "mix", "bias"], ["logits"], kernel_shape=[1, 1]),
        _node("Sigmoid", ["logits"], ["likely"]),
        _node("Reshape", ["likely", "by_cell"], ["flat"]),
        _node("Concat", ["boxes", "flat"], ["found"], axis=1),
        _node("Transpose", ["found"], ["rows"], perm=[0, 2, 1]),
        _node("Concat", ["nothing", "rows"], ["dets"], axis=1),
    ]
    outputs = [onnx.helper.make_tensor_value_info("dets", onnx.TensorProto.FLOAT, [1, 84, 5 + CLASSES])]
    if with_score:
        nodes += [
            _node("Sub", ["flat", "half"], ["distance"]),
            _node("Abs", ["distance"], ["margins"]),
            _node("ReduceMin", ["margins"], ["least"], axes=[1, 2], keepdims=0),
            _node("Reshape", ["least", "one"], [SURE]),
        ]
        outputs.append(onnx.helper.make_tensor_value_info(SURE, onnx.TensorProto.FLOAT, [1]))
    # Centres in the middle of each cell, as large as it, and sure that something is there.
    boxes = np.repeat(np.array([0.5, 0.5, 0.0, 0.0, 1.0])[None, :, None], 4, axis=2)
    weights = {
        "mean": np.eye(3)[:, :, None, None] * np.ones((32, 32)) / 32**2, "mix": 14.0 * mix[:, :, None, None],
        "bias": np.full(CLASSES, -7.0), "boxes": boxes, "nothing": np.zeros((1, 80, 5 + CLASSES)),
    }  # fmt: skip
    shapes = {"by_cell": [1, CLASSES, 4]}
    if with_score:
        weights["half"], shapes["one"] = np.array(0.5), [1]
    return _model(nodes, outputs, weights, shapes, 64)


def large_detector(width: int = 24, seed: int = 4) -> bytes:
    """Layout yolov8, [1, 7, 336], of 128 pixels; `width` channels make it slow."""
    rng = np.random.default_rng(seed)
    wide, back = rng.normal(0.0, 0.05, (width, 3, 3, 3)), np.zeros((3, width, 3, 3))
    wide[:3] = 0.0
    wide[range(3), range(3), 1, 1] = 1.0
    back[range(3), range(3), 1, 1] = 1.0
    nodes = [
        _node("Conv", ["image", "wide"], ["seen"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        _node("Conv", ["seen", "back"], ["clean"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        _node("Conv", ["clean", "mean", "bias"], ["logits"], kernel_shape=[64, 64], strides=[64, 64]),
        _node("Sigmoid", ["logits"], ["likely"]),
        _node("Reshape", ["likely", "by_cell"], ["flat"]),
        _node("Concat", ["boxes", "flat"], ["found"], axis=1),
        _node("Concat", ["found", "nothing"], ["output0"], axis=2),
    ]
    outputs = [onnx.helper.make_tensor_value_info("output0", onnx.TensorProto.FLOAT, [1, 4 + CLASSES, 336])]
    centres = np.array(QUARTERS).T * 128 + 32
    weights = {
        "wide": wide, "back": back, "mean": 40.0 * np.eye(3)[:, :, None, None] * np.ones((64, 64)) / 64**2,
        "bias": np.full(CLASSES, -19.0), "boxes": np.concatenate((centres, np.full((2, 4), 64.0)))[None],
        "nothing": np.zeros((1, 4 + CLASSES, 332)),
    }  # fmt: skip
    return _model(nodes, outputs, weights, {"by_cell": [1, CLASSES, 4]}, 128)


def _node(kind: str, reads: Sequence[str], writes: Sequence[str], **attributes: object) -> onnx.NodeProto:
    return onnx.helper.make_node(kind, reads, writes, f"{kind.lower()}-{writes[0]}", **attributes)


def _model(
    nodes: Sequence[onnx.NodeProto], outputs: Sequence[onnx.ValueInfoProto], weights: dict[str, np.ndarray],
    shapes: dict[str, list[int]], side: int,
) -> bytes:  # fmt: skip
    initialisers = [onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    initialisers += [onnx.numpy_helper.from_array(np.array(shape, np.int64), name) for name, shape in shapes.items()]
    image = onnx.helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [1, 3, side, side])
    graph = onnx.helper.make_graph(nodes, "detector", [image], outputs, initialisers)
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    raw: bytes = made.SerializeToString()
    return raw
