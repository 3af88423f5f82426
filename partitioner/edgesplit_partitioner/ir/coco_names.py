"""Names of the classes of COCO (Lin et al., 1405.0312): the 80 that have pictures, and the 90 numbers that SSD models
of TensorFlow answer, ten of which are of no class."""

from __future__ import annotations

COCO_80 = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "mouse", "remote", "keyboard", "cell phone", "microwave", "oven", "toaster", "sink",
    "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)  # fmt: skip
_UNUSED = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)
"""Numbers, from 1, that COCO gives to no class."""


def _with_gaps() -> tuple[str, ...]:
    names = iter(COCO_80)
    return tuple("" if number in _UNUSED else next(names) for number in range(1, 91))


COCO_90 = _with_gaps()
"""By the class index of TensorFlow's SSD models, which is COCO's number less 1; empty for none."""
