"""Features of operators for the predictor: family and sizes."""

from __future__ import annotations

from typing import Any

import pytest
from onnx import helper

from edgesplit_partitioner.onnx_format.operator_features import FEATURES
from edgesplit_partitioner.onnx_format.operator_work import work_of
from edgesplit_partitioner.onnx_format.tensor_lookup import TensorLookup

Shapes = dict[str, tuple[int, ...]]


def features_of(operator: str, shapes: Shapes, weights: tuple[str, ...] = (), **attributes: Any) -> tuple[str, Any]:
    """Family and sizes by name of a node that reads all but the last of these tensors and writes it."""
    *reads, out = shapes
    node = helper.make_node(operator, reads, [out], **attributes)
    work = work_of(node, TensorLookup(shapes.get, lambda _: 4, weights.__contains__))
    return work.family, dict(zip(FEATURES.get(work.family, ("elements",)), work.sizes, strict=True))


IMAGE = (1, 16, 20, 30)


@pytest.mark.parametrize(
    ("weights", "stride", "group", "out", "family", "sizes"),
    [
        ((8, 16, 1, 1), 1, 1, (1, 8, 20, 30), "conv1", {"out_channels": 8, "in_channels": 16, "pixels": 600}),
        ((8, 16, 1, 1), 2, 1, (1, 8, 10, 15), "convk", {"taps": 1, "stride": 4, "pixels": 150, "row": 15}),
        ((8, 16, 3, 3), 1, 1, (1, 8, 20, 30), "convk", {"taps": 9, "stride": 1, "in_channels": 16}),
        ((16, 1, 3, 3), 1, 16, (1, 16, 20, 30), "depthwise", {"channels": 16, "taps": 9, "pixels": 600}),
        ((32, 4, 3, 3), 1, 4, (1, 32, 20, 30), "convg", {"groups": 4, "out_each": 8, "in_each": 4}),
    ],
)
def test_convolutions_have_distinct_families(
    weights: tuple[int, ...], stride: int, group: int, out: tuple[int, ...], family: str, sizes: dict[str, float]
) -> None:
    """One by one, with more taps or a stride, depthwise, grouped: each is another loop in the runtime."""
    found, numbers = features_of(
        "Conv", {"x": IMAGE, "w": weights, "y": out}, ("w",), strides=[stride, stride], group=group
    )

    assert found == family and {name: numbers[name] for name in sizes} == sizes


def test_products_with_and_without_weights_have_distinct_families() -> None:
    """A product with stored weights is packed beforehand, one of two activations is not."""
    shapes: Shapes = {"a": (2, 5, 7), "b": (7, 3), "y": (2, 5, 3)}

    assert features_of("MatMul", shapes, ("b",)) == ("gemm", {"rows": 10, "inner": 7, "columns": 3})
    row: Shapes = {"a": (1, 7), "b": (7, 3), "y": (1, 3)}
    assert features_of("Gemm", row, ("b",)) == ("gemv", {"inner": 7, "columns": 3})
    pixel: Shapes = {"x": (1, 7, 1, 1), "w": (3, 7, 1, 1), "y": (1, 3, 1, 1)}
    assert features_of("Conv", pixel, ("w",)) == ("conv1-pixel", {"out_channels": 3, "in_channels": 7})
    assert features_of("MatMul", shapes) == ("matmul", {"count": 2, "rows": 5, "inner": 7, "columns": 3})


@pytest.mark.parametrize(
    ("small", "run"), [((1, 16, 1, 1), 600), ((30,), 30), ((1, 16, 20, 1), 30), ((16, 20, 30), 9600)]
)
def test_a_broadcast_operand_counts_its_runs(small: tuple[int, ...], run: int) -> None:
    """Neighbouring results that go by one stretch of the smaller operand."""
    family, sizes = features_of("Mul", {"x": (2, 16, 20, 30), "s": small, "y": (2, 16, 20, 30)})

    assert family == "broadcast" and sizes == {"elements": 19200, "run": run}


def test_a_scalar_operand_is_no_broadcast() -> None:
    """Adding a scalar is like adding a tensor."""
    assert features_of("Add", {"x": IMAGE, "s": (), "y": IMAGE}) == ("Add", {"elements": 9600})
    assert features_of("Sqrt", {"x": IMAGE, "y": IMAGE}) == ("Div", {"elements": 9600})


@pytest.mark.parametrize(
    ("order", "run", "row"), [([0, 2, 3, 1], 1, 16), ([0, 1, 3, 2], 1, 20), ([0, 2, 1, 3], 30, 16)]
)
def test_transposes_move_elements_or_blocks(order: list[int], run: int, row: int) -> None:
    """Trailing axes that keep their place are moved as blocks."""
    family, sizes = features_of("Transpose", {"x": IMAGE, "y": tuple(IMAGE[axis] for axis in order)}, perm=order)

    assert family == "Transpose" and (sizes["run"], sizes["row"]) == (run, row)


def test_a_transpose_that_moves_nothing_is_free() -> None:
    """Only axes of length one change places."""
    assert features_of("Transpose", {"x": (1, 1, 9), "y": (1, 1, 9)}, perm=[1, 0, 2]) == ("free", {})


def test_unknown_operators_have_no_family() -> None:
    """Neither an unknown operator nor a convolution without a shape."""
    stranger = helper.make_node("Frobnicate", ["x"], ["y"])
    assert work_of(stranger, TensorLookup(lambda _: IMAGE, lambda _: 4, lambda _: False)).family == ""
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    assert work_of(node, TensorLookup(lambda _: None, lambda _: 4, lambda _: True)).family == ""


def test_equal_work_ignores_family_and_sizes() -> None:
    """Family and sizes are looked up, not compared: a work made by hand equals one that was read."""
    node = helper.make_node("Relu", ["x"], ["y"])
    work = work_of(node, TensorLookup(lambda _: IMAGE, lambda _: 4, lambda _: False))

    assert work == type(work)(work.operator, work.flops, work.bytes_moved) and work.family == "Relu"
