"""Inputs that look like pictures, and the size of their JPEG."""

from __future__ import annotations

import pytest

from edgesplit.input_spec import parse_input_spec
from edgesplit_partitioner.ir.graph import Tensor
from edgesplit_partitioner.ir.pictures import jpeg_bytes, picture_spec, spec_text


@pytest.mark.parametrize(
    ("shape", "datatype", "text"),
    [
        ((1, 3, 224, 320), "FP32", "image/jpeg 320x224 rgb nchw"),
        ((1, 224, 320, 3), "UINT8", "image/jpeg 320x224 rgb nhwc uint8"),
        ((1, 1, 64, 48), "FP32", "image/jpeg 48x64 gray nchw"),
    ],
)
def test_a_decoded_picture_is_recognised_with_its_spec(shape: tuple[int, ...], datatype: str, text: str) -> None:
    """Either plane order; what is printed can be typed again."""
    spec = picture_spec(Tensor("x", datatype, shape, 0))
    assert spec is not None and spec_text(spec) == text
    assert parse_input_spec(text).width == spec.width
    assert 600 < jpeg_bytes(spec) < 3 * shape[1] * shape[2] * shape[3]


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (4, 3, 224, 224), (1, 64, 56, 56), (1, 512), (-1, 3, 224, 224)])
def test_features_and_batches_are_no_picture(shape: tuple[int, ...]) -> None:
    """Small tensors, batches, many planes, other ranks, free lengths."""
    assert picture_spec(Tensor("x", "FP32", shape, 0)) is None
    assert picture_spec(Tensor("x", "INT64", (1, 3, 224, 224), 0)) is None
