"""The work of operators, against counts made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from edgesplit.input_spec import InputSpec
from edgesplit_partitioner.ir.graph import OperatorWork
from edgesplit_partitioner.onnx_format.operator_work import NO_WORK, input_work, work_of
from edgesplit_partitioner.onnx_format.tensor_lookup import TensorLookup

Shapes = dict[str, tuple[int, ...]]


def work(
    operator: str,
    inputs: Mapping[str, tuple[int, ...]],
    out: tuple[int, ...],
    *,
    weights: str = "wb",
    **attributes: Any,
) -> OperatorWork:
    """The work of one float32 node with these input shapes and this output shape."""
    node = helper.make_node(operator, list(inputs), ["y"], **attributes)
    shapes: Shapes = {**inputs, "y": out}
    return work_of(node, TensorLookup(shapes.get, lambda name: 4, lambda name: name in weights))


def moved(*shapes: tuple[int, ...]) -> float:
    """Bytes of float32 tensors."""
    return float(sum(4 * prod(shape) for shape in shapes))


def test_convolution_counts_two_operations_per_multiply_accumulate() -> None:
    """AlexNet's first convolution: 55 x 55 x 96 outputs of 363 products each; bytes in, out and weights."""
    x, w, b, y = (1, 3, 227, 227), (96, 3, 11, 11), (96,), (1, 96, 55, 55)

    assert work("Conv", {"x": x, "w": w, "b": b}, y) == OperatorWork(
        "conv", 2.0 * 55 * 55 * 96 * 363, moved(x, w, b, y)
    )


def test_grouped_convolution_sums_over_its_group_only() -> None:
    """Two groups halve the products; it stays dense."""
    grouped = work("Conv", {"x": (1, 8, 10, 10), "w": (16, 4, 3, 3)}, (1, 16, 8, 8), group=2)

    assert (grouped.operator, grouped.flops) == ("conv", 2.0 * 16 * 64 * 4 * 9)


@pytest.mark.parametrize("multiplier", [1, 2])
def test_depthwise_convolution_is_its_own_class(multiplier: int) -> None:
    """One input channel per filter is depthwise, whatever the number of filters per channel."""
    shapes = {"x": (1, 32, 10, 10), "w": (32 * multiplier, 1, 3, 3)}
    depthwise = work("Conv", shapes, (1, 32 * multiplier, 8, 8), group=32)

    assert (depthwise.operator, depthwise.flops) == ("depthwise", 2.0 * 32 * multiplier * 64 * 9)


def test_a_one_channel_image_makes_no_depthwise_convolution() -> None:
    """With one group, one input channel is a dense convolution of a grey picture."""
    assert work("Conv", {"x": (1, 1, 28, 28), "w": (8, 1, 5, 5)}, (1, 8, 24, 24)).operator == "conv"


def test_transposed_convolution_spreads_each_input() -> None:
    """ConvTranspose counts inputs, not outputs."""
    spread = work("ConvTranspose", {"x": (1, 8, 4, 4), "w": (8, 5, 2, 2)}, (1, 5, 8, 8), strides=[2, 2])

    assert (spread.operator, spread.flops) == ("conv", 2.0 * 8 * 16 * 5 * 4)


def test_quantised_convolution_finds_its_weights() -> None:
    """QLinearConv keeps its weights in the fourth place."""
    scalars = dict.fromkeys(("xs", "xz"), ())
    tail: Shapes = dict.fromkeys(("ws", "wz", "ys", "yz"), ())
    shapes: Shapes = {"x": (1, 3, 8, 8), **scalars, "w": (4, 3, 3, 3), **tail}

    quantised = work("QLinearConv", shapes, (1, 4, 6, 6))
    assert quantised.flops == 2.0 * 4 * 36 * 27 and quantised.is_int8
    assert not work("Conv", {"x": (1, 3, 8, 8), "w": (4, 3, 3, 3)}, (1, 4, 6, 6)).is_int8


@pytest.mark.parametrize("operator", ["MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"])
def test_a_product_that_is_quantised_in_each_run_counts_as_one(operator: str) -> None:
    """What `int8-dynamic` makes of a product computes as much as before, in integers."""
    product = work(operator, {"x": (1, 16, 128), "w": (128, 64)}, (1, 16, 64))

    assert (product.operator, product.flops, product.is_int8) == ("gemm", 2.0 * 16 * 64 * 128, True)


@pytest.mark.parametrize(("transposed", "a"), [(0, (1, 128)), (1, (128, 1))])
def test_gemm_finds_the_inner_length(transposed: int, a: tuple[int, ...]) -> None:
    """A Gemm's inner length is its first factor's last axis, or its first where that is transposed."""
    assert work("Gemm", {"x": a, "w": (128, 10)}, (1, 10), transA=transposed).flops == 2.0 * 128 * 10


def test_matmul_multiplies_in_batches() -> None:
    """A batched MatMul counts every output element."""
    product = work("MatMul", {"x": (2, 4, 16, 8), "w": (2, 4, 8, 32)}, (2, 4, 16, 32))

    assert (product.operator, product.flops) == ("gemm", 2.0 * 2 * 4 * 16 * 8 * 32)


def test_a_matrix_product_of_one_row_moves_mostly_weights() -> None:
    """AlexNet's fc6 reads 151 MB of weights for 75 M operations: memory will bound it."""
    fc6 = work("Gemm", {"x": (1, 9216), "w": (9216, 4096)}, (1, 4096))

    assert fc6.bytes_moved > fc6.flops


def test_recurrent_layers_multiply_both_matrices_each_step() -> None:
    """An LSTM multiplies input and state weights once for each step and each of the batch."""
    lstm = work("LSTM", {"x": (5, 2, 16), "w": (1, 128, 16), "r": (1, 128, 32)}, (5, 1, 2, 32))

    assert (lstm.operator, lstm.flops) == ("gemm", 2.0 * 5 * 2 * (128 * 16 + 128 * 32))


def test_einsum_counts_every_combination_of_labels() -> None:
    """bij,bjk->bik is b*i*j*k multiply-accumulates; with an ellipsis only bytes are known."""
    assert work("Einsum", {"x": (2, 3, 4), "w": (2, 4, 5)}, (2, 3, 5), equation="bij, bjk -> bik").flops == 240.0
    assert work("Einsum", {"x": (2, 3), "w": (2, 3)}, (2, 3), equation="...i,...i->...i").flops == 0.0


@pytest.mark.parametrize("operator", ["Reshape", "Flatten", "Squeeze", "Identity", "Shape"])
def test_reshaping_operators_are_free(operator: str) -> None:
    """Reshaping moves no byte."""
    assert work(operator, {"x": (1, 64, 8, 8)}, (1, 4096)) == NO_WORK


def test_elementwise_counts_elements_and_costly_functions_more() -> None:
    """A Relu is one operation an element, a sigmoid several; both move input and output."""
    x = (1, 16, 8, 8)
    relu, sigmoid = work("Relu", {"x": x}, x), work("Sigmoid", {"x": x}, x)

    assert relu == OperatorWork("elementwise", 1024.0, moved(x, x))
    assert sigmoid.operator == "elementwise" and sigmoid.flops > 4 * relu.flops


def test_pooling_reads_each_window() -> None:
    """A 3x3 pool does nine operations per output."""
    pool = work("MaxPool", {"x": (1, 8, 9, 9)}, (1, 8, 4, 4), kernel_shape=[3, 3])

    assert (pool.operator, pool.flops) == ("memory", 8 * 16 * 9.0)


def test_gather_reads_only_what_it_writes() -> None:
    """A lookup in a table of a million rows does not read the table."""
    assert work("Gather", {"w": (1_000_000, 64), "i": (3,)}, (3, 64)).bytes_moved == 2 * moved((3, 64))


@pytest.mark.parametrize("operator", ["Concat", "Transpose", "Resize", "SomethingNobodyKnows"])
def test_other_operators_count_their_bytes(operator: str) -> None:
    """Copies, and unknown operators, count what they read and write."""
    one = work(operator, {"x": (1, 4, 4, 4)}, (1, 4, 8, 8))

    assert (one.operator, one.bytes_moved) == ("memory", moved((1, 4, 4, 4), (1, 4, 8, 8)))


def test_an_input_read_twice_counts_once() -> None:
    """x * x reads x once."""
    node = helper.make_node("Mul", ["x", "x"], ["y"])
    square = work_of(node, TensorLookup({"x": (10,), "y": (10,)}.get, lambda name: 4, lambda name: False))

    assert square.bytes_moved == 80.0


def test_unknown_lengths_and_missing_inputs_count_zero() -> None:
    """An operator whose shapes are unknown, or whose optional inputs were left out, raises nothing."""
    for operator in ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "Softmax", "Resize", "ReduceMean", "Einsum"):
        node = helper.make_node(operator, ["x", ""], ["y"])
        assert work_of(node, TensorLookup(lambda name: None, lambda name: 4, lambda name: False)).bytes_moved == 0.0


def test_a_branch_costs_what_its_heavier_side_does() -> None:
    """An If counts its heavier branch, with the weights inside it; what it captures has the outer shape."""
    weights = helper.make_tensor("w", TensorProto.FLOAT, [8, 8], [0.0] * 64)
    out = [helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 8])]
    heavy = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["z"])], "then", [], out, [weights])
    light = helper.make_graph([helper.make_node("Relu", ["x"], ["z"])], "else", [], out)
    node = helper.make_node("If", ["c"], ["y"], then_branch=heavy, else_branch=light)
    shapes: Shapes = {"x": (1, 8), "c": (1,), "y": (1, 8)}

    branch = work_of(node, TensorLookup(shapes.get, lambda name: 4, lambda name: False))

    assert (branch.operator, branch.flops) == ("gemm", 128.0)
    assert branch.bytes_moved >= 64 * 4


def test_the_input_layer_counts_pixels_of_the_frame() -> None:
    """Decoding costs by the frame's size, not by the tensor's."""
    spec = InputSpec(width=640, height=480, tensor="x", tensor_width=128, tensor_height=128)

    assert input_work(spec).flops == 640 * 480
    assert input_work(spec).operator == "input"


def test_work_is_defined_for_every_onnx_operator() -> None:
    """No operator that ONNX defines makes work_of fail."""
    for schema in onnx.defs.get_all_schemas():
        node = helper.make_node(schema.name, ["a", "b", "c"], ["y"])
        shapes: Shapes = {"a": (1, 4, 8, 8), "b": (4, 4, 3, 3), "c": (4,), "y": (1, 4, 6, 6)}
        done = work_of(node, TensorLookup(shapes.get, lambda name: 4, lambda name: name == "b"))
        assert done.flops >= 0 and done.bytes_moved >= 0, schema.name
