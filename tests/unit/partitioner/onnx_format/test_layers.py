"""Operators into layers, and the input layer before them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.input_spec import FRAME, INPUT_LAYER, parse_input_spec
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.ir.pictures import jpeg_bytes
from edgesplit_partitioner.onnx_format.model import prepare_model, with_input_layer
from support import onnx_models as tiny


def operators(name: str) -> dict[str, list[str]]:
    """Operator types by layer."""
    model = tiny.prepared(name)
    return {
        layer.name: [model.proto.graph.node[place].op_type for place in layer.nodes] for layer in model.graph.layers
    }


def test_convolution_keeps_its_activation() -> None:
    """ReLU, LeakyReLU and SiLU's gate belong to the convolution before them; pooling and softmax stand alone."""
    assert list(operators("chain").values()) == [
        ["Conv", "Sigmoid", "Mul"],
        ["Conv", "Relu"],
        ["Conv", "LeakyRelu"],
        ["GlobalAveragePool"],
        ["Flatten"],
        ["Gemm"],
        ["Softmax"],
    ]


def test_tensors_with_several_readers_stay_visible() -> None:
    """A tensor that others read, or that is an output, is written by its layer; each reader sees it once."""
    graph = tiny.prepared("branches").graph
    assert graph.layer("stem").writes == ("shared",)
    assert graph.layer("right").writes == ("seen",)
    assert graph.layer("sum").reads == ("left", "seen")
    assert graph.outputs == ("y", "seen")


def test_output_inside_a_chain_ends_its_layer() -> None:
    """A convolution whose bare result is an output keeps its activation outside."""
    node = helper.make_node
    raw = tiny.build(
        [node("MatMul", ["x", "w"], ["m"], name="product"), node("Relu", ["m"], ["y"], name="relu")],
        [tiny.value("x", [1, 3])],
        [tiny.value("m", [1, 3]), tiny.value("y", [1, 3])],
        [tiny.weight("w", 3, 3)],
    )
    graph = prepare_model(raw).graph
    assert [(layer.name, layer.writes) for layer in graph.layers] == [("product", ("m",)), ("relu", ("y",))]


def test_branches_of_an_if_count_as_reads() -> None:
    """What an If's branches capture is read by its layer, and captured weights are its weights."""
    choice = tiny.prepared("captured").graph.layer("choice")
    assert set(choice.reads) == {"large", "hidden"}
    assert choice.weights == ("w",)


def test_weights_listed_as_inputs_are_weights() -> None:
    """IR 3's listed initializers are neither inputs nor tensors that a cut may send."""
    model = tiny.prepared("listed_weights")
    assert [tensor.name for tensor in model.inputs] == ["x"]
    assert "w" not in model.graph.tensors


def test_quantised_layers_exchange_bytes() -> None:
    """In a QDQ model int8 crosses between layers, and a dequantised weight is part of every layer that uses it."""
    graph = tiny.prepared("quantised").graph
    assert [graph.tensors[name].datatype for name in graph.layer("first").writes] == ["INT8"]
    assert "wq" in graph.layer("first").weights
    assert "wq" in graph.layer("second").weights


def test_untransportable_values_stay_inside_one_layer() -> None:
    """A sequence is never a boundary, and the cycle that this would create is merged into the layer."""
    graph = tiny.prepared("sequences").graph
    assert ["SequenceConstruct", "SequenceInsert", "ConcatFromSequence"] in operators("sequences").values()
    assert all(tensor.datatype for tensor in graph.tensors.values())


@pytest.mark.parametrize("name", tiny.MODELS)
def test_layers_are_topologically_ordered(name: str) -> None:
    """Every layer reads inputs and what earlier layers wrote; names are unique; every tensor is described."""
    graph = tiny.prepared(name).graph
    seen = set(graph.inputs)
    for layer in graph.layers:
        assert seen.issuperset(layer.reads)
        seen.update(layer.writes)
        assert len(layer.work) == len(layer.nodes)
    assert seen.issuperset(graph.outputs)
    assert seen == set(graph.tensors)
    assert len({layer.name for layer in graph.layers}) == len(graph.layers)


def test_data_dependent_lengths_are_open() -> None:
    """A length that only a run decides is -1, and its size is that of a trial run."""
    where = tiny.prepared("counting").graph.tensors["where"]
    assert where.shape == (2, -1)
    assert where.bytes == 2 * 6 * 8


def test_rescaled_picture_is_still_raw() -> None:
    """Transposed, cast, scaled and cropped pictures may not leave where the raw input may not; a convolution's may."""
    node = helper.make_node
    raw = tiny.build(
        [
            node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]),
            node("Sub", ["t", "mean"], ["s"]),
            node("Mul", ["s", "std"], ["scaled"]),
            node("Conv", ["scaled", "w"], ["c"]),
            node("Mul", ["scaled", "scaled"], ["square"]),
            node("Concat", ["c", "square"], ["y"], axis=1),
        ],
        [tiny.value("x", [1, 4, 4, 3])],
        [tiny.value("y", None)],
        [tiny.weight("mean", 3, 1, 1), tiny.weight("std", 3, 1, 1), tiny.weight("w", 2, 3, 1, 1)],
    )
    assert prepare_model(raw).graph.raw_tensors == {"x", "t", "s", "scaled"}


def picture_graph(spec: str) -> LayerGraph:
    """The chain model behind an input spec."""
    return with_input_layer(tiny.prepared("chain"), parse_input_spec(spec))[0]


def test_input_layer_begins_at_the_frame() -> None:
    """With an input spec the first layer reads `frame`, and frame and tensor are both raw."""
    graph, spec = with_input_layer(tiny.prepared("chain"), parse_input_spec("image/jpeg 64x48 rgb nchw scale=1/255"))
    assert (spec.tensor, spec.tensor_width, spec.tensor_height) == ("image", 16, 16)
    assert graph.layers[0].name == INPUT_LAYER
    assert graph.layers[0].reads == (FRAME,)
    assert graph.layers[0].writes == ("image",)
    assert graph.inputs == (FRAME,)
    assert {FRAME, "image"} <= graph.raw_tensors
    assert graph.tensors[FRAME].bytes == jpeg_bytes(spec)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("image/jpeg 64x48 gray", "try rgb or bgr, nchw"),
        ("image/jpeg 64x48 rgb nhwc", "try rgb or bgr, nchw"),
        ("image/jpeg 64x48 rgb uint8", "leave out the word uint8"),
    ],
)
def test_input_spec_that_does_not_fit_is_refused(spec: str, reason: str) -> None:
    """A spec that makes another tensor than the model takes is refused with the words that would fit."""
    with pytest.raises(ModelRefused, match=reason):
        picture_graph(spec)


def test_input_spec_needs_an_input_for_pictures() -> None:
    """A model without a four-dimensional input cannot be fed by a camera."""
    with pytest.raises(ModelRefused, match="takes a picture"):
        with_input_layer(tiny.prepared("state"), parse_input_spec("image/jpeg 64x48"))


def test_a_set_that_is_not_closed_is_refused() -> None:
    """A set that lacks what one of its layers reads is refused, naming both."""
    from edgesplit_partitioner.slicing import atoms

    with pytest.raises(UsageError, match=r"'conv1' .* 'stem/Conv'"):
        atoms(tiny.prepared("chain").graph, [frozenset({"conv1"})])


def test_random_numbers_inside_a_loop_are_drawn_once() -> None:
    """A loop over constants that draws random numbers is a layer: as a constant every layer that reads it would draw
    again."""
    node = helper.make_node
    body = helper.make_graph(
        [
            node("Identity", ["go"], ["on"]),
            node("RandomNormal", [], ["drawn"], shape=[2]),
            node("Add", ["v", "drawn"], ["w"]),
        ],
        "body",
        [tiny.value("i", [], TensorProto.INT64), tiny.value("go", [], TensorProto.BOOL), tiny.value("v", [2])],
        [tiny.value("on", [], TensorProto.BOOL), tiny.value("w", [2])],
    )
    raw = tiny.build(
        [
            node("Loop", ["times", "", "start"], ["n"], body=body),
            node("Add", ["x", "n"], ["a"]),
            node("Sub", ["a", "n"], ["y"]),
        ],
        [tiny.value("x", [2])],
        [tiny.value("y", [2])],
        [tiny.scalar("times", 3, np.int64), tiny.weight("start", 2)],
    )
    graph = prepare_model(raw).graph
    assert graph.layers[0].writes == ("n",)
    assert all(layer.reads[-1] == "n" for layer in graph.layers[1:])
