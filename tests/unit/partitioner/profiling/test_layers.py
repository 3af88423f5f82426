"""Measuring: the right layers get the time, the right tensors get their sizes, and bad models are refused. How long
anything took is asserted nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.input_spec import InputSpec, prepare
from edgesplit_partitioner.ir.graph import Layer, LayerGraph, Tensor
from edgesplit_partitioner.profiling.layers import (
    measure_input,
    measure_layers,
    measure_samples,
    synthetic_frame,
)
from edgesplit_partitioner.profiling.ort_profile import LayerTime, layer_times

SPEC = InputSpec(width=32, height=24, scale=1 / 255, tensor="x", tensor_width=8, tensor_height=8)


def model(names: tuple[str, ...] = ("double", "rectify", "sum"), operator: str = "Relu") -> bytes:
    """x (1, 3, 8, 8) -> Add -> Relu -> ReduceMean."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["twice"], name=names[0]),
        helper.make_node(operator, ["twice"], ["positive"], name=names[1]),
        helper.make_node("ReduceMean", ["positive"], ["y"], name=names[2], keepdims=1),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 1, 1])]
    made = helper.make_graph(nodes, "three", inputs, outputs)
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(proto.SerializeToString())


def layer(name: str, nodes: tuple[int, ...], reads: str, writes: str) -> Layer:
    return Layer(name, nodes, (reads,), (writes,), (), 0, ())


def graph(*, frames: bool = False) -> LayerGraph:
    """Two layers (the first has two operators), with an input layer before them if `frames`."""
    layers = (layer("first", (0, 1), "x", "positive"), layer("last", (2,), "positive", "y"))
    tensors = {name: Tensor(name, "FP32", (1, 3, 8, 8), 768) for name in ("x", "positive")}
    tensors["y"] = Tensor("y", "FP32", (1, 1, 1, 1), 4)
    if not frames:
        return LayerGraph(layers, tensors, ("x",), ("y",))
    tensors["frame"] = Tensor("frame", "UINT8", (-1,), 1234)
    return LayerGraph((layer("input", (), "frame", "x"), *layers), tensors, ("frame",), ("y",))


@pytest.mark.parametrize("names", [("double", "rectify", "sum"), ("", "", ""), ("same", "same", "same")])
def test_every_onnx_layer_gets_its_time(names: tuple[str, ...]) -> None:
    """Each layer that has nodes is timed, also where the model's nodes have no names or share one."""
    times = measure_layers(model(names), graph(frames=True), runs=3, warmup=1)

    assert list(times) == ["first", "last"]
    assert all(0 <= time.median_s <= time.p95_s for time in times.values())


def test_progress_counts_every_run() -> None:
    """The progress callback receives each run, warm-up included."""
    heard: list[tuple[int, int]] = []
    measure_layers(model(), graph(), runs=3, warmup=2, progress=lambda done, all_: heard.append((done, all_)))

    assert heard == [(step, 5) for step in range(1, 6)]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"not a model", "not an ONNX file"),
        (model(operator="NoSuchOperator"), "cannot run this model.*NoSuchOperator"),
    ],
)
def test_a_model_that_cannot_run_is_refused(raw: bytes, said: str) -> None:
    """An invalid model, and one that the runtime refuses, is ModelRefused with the runtime's reason."""
    with pytest.raises(ModelRefused, match=said):
        measure_layers(raw, graph(), runs=1)


def test_a_graph_of_another_model_is_refused() -> None:
    """A layer graph with more nodes than the model is a caller's error."""
    with pytest.raises(UsageError, match="more nodes"):
        measure_layers(model(), LayerGraph((layer("a", (7,), "x", "y"),), {}, ("x",), ("y",)), runs=1)


def test_a_rectified_tensor_compresses_well() -> None:
    """Given tensors, each tensor has its raw size and a compressed one: a rectified tensor of zeros shrinks a lot."""
    negative = {"x": np.full((1, 3, 8, 8), -1, np.float32)}
    samples = measure_samples(model(), graph(), samples=[negative, negative])

    assert samples.count == 2 and samples.basis == "measured on 2 samples" and samples.frame_bytes == 0
    assert set(samples.tensors) == {"x", "positive", "y"}
    assert samples.tensors["positive"].bytes == 768
    codec = samples.tensors["positive"].codecs["raw+zstd"]
    assert codec.bytes < 50 and codec.loss == 0.0
    assert set(codec.encode_s) == set(codec.decode_s) == {"cloud"}


def test_a_frames_size_is_its_jpeg_bytes() -> None:
    """Given frames, the frame's tensor is its JPEG bytes, which do not compress, and the first tensor is decoded."""
    frames = [synthetic_frame(SPEC, seed) for seed in range(3)]
    samples = measure_samples(model(), graph(frames=True), spec=SPEC, samples=frames)

    assert set(samples.tensors) == {"frame", "x", "positive", "y"}
    assert samples.frame_bytes == samples.tensors["frame"].bytes == sorted(map(len, frames))[1]
    assert samples.tensors["frame"].codecs["raw+zstd"].bytes > 0.5 * samples.frame_bytes
    assert samples.tensors["x"].bytes == 768


def test_without_samples_nothing_is_measured_compressed() -> None:
    """Noise is no evidence about compression, so nothing is claimed, and the basis records it."""
    samples = measure_samples(model(), graph(frames=True), spec=SPEC)

    assert samples.count == 0 and "without samples" in samples.basis
    assert samples.frame_bytes == 1234 and samples.tensors["positive"].bytes == 768
    assert not any(tensor.codecs for tensor in samples.tensors.values())


def test_samples_that_do_not_fit_are_refused() -> None:
    """A frame without an input spec, bytes that are no picture, and tensors of another shape each have their error."""
    with pytest.raises(UsageError, match="no input spec"):
        measure_samples(model(), graph(), samples=[b"\xff\xd8"])
    with pytest.raises(UsageError, match="not a whole JPEG"):
        measure_samples(model(), graph(frames=True), spec=SPEC, samples=[b"\xff\xd8"])
    with pytest.raises(ModelRefused, match="cannot run"):
        measure_samples(model(), graph(), samples=[{"x": np.zeros((2, 2), np.float32)}])


@pytest.mark.parametrize("colour", ["rgb", "gray"])
def test_the_stand_in_frame_is_a_picture_of_the_spec(colour: Any) -> None:
    """It has the spec's size and decodes to the spec's tensor; better quality weighs more."""
    spec = InputSpec(width=64, height=48, colour=colour, tensor="x", tensor_width=64, tensor_height=48)
    finer = InputSpec(width=64, height=48, colour=colour, quality=98)

    assert prepare(spec, synthetic_frame(spec)).shape == spec.shape
    assert len(synthetic_frame(spec)) < len(synthetic_frame(finer))
    assert measure_input(spec, runs=2).median_s > 0


def event(category: str, name: str, start: int, duration: int) -> dict[str, Any]:
    """As onnxruntime writes it."""
    return {"cat": category, "name": name, "ts": start, "dur": duration, "args": {}}


def node(name: str, start: int, duration: int) -> dict[str, Any]:
    return event("Node", f"{name}_kernel_time", start, duration)


def test_subgraph_nodes_are_not_counted_twice() -> None:
    """The time of an If already contains that of the branch inside it, even where a name inside repeats one outside."""
    trace = [
        node("a", 30, 5),
        node("inner", 12, 3),
        node("b", 16, 4),  # inside: another one called b
        node("if", 10, 12),
        node("b", 40, 7),
        event("Session", "model_run", 0, 100),
    ]
    times = layer_times(trace, {"a": "A", "if": "IF", "b": "B"}, warmup=0)

    assert {name: round(time.median_s * 1e6) for name, time in times.items()} == {"A": 5, "IF": 12, "B": 7}


def test_nodes_inserted_by_the_runtime_count_for_their_neighbour() -> None:
    """A cast that the runtime added counts for the layer before it, or for the first one."""
    trace = [
        event("Session", "model_run", 0, 100),
        node("cast1", 0, 1),
        node("a", 2, 10),
        node("cast2", 13, 2),
        node("b", 16, 20),
    ]
    times = layer_times(trace, {"a": "A", "b": "B"}, warmup=0)

    assert (times["A"].median_s, times["B"].median_s) == pytest.approx((13e-6, 20e-6))


def test_warm_up_runs_do_not_count() -> None:
    """The first runs are left out, and a layer that has no events took no time."""
    trace = [event("Session", "model_run", 100 * run, 90) for run in range(4)]
    trace += [node("a", 100 * run + 1, duration) for run, duration in enumerate((80, 10, 30, 20))]

    assert layer_times(trace, {"a": "A", "b": "B"}, warmup=1) == {
        "A": LayerTime(20e-6, 30e-6),
        "B": LayerTime(0.0, 0.0),
    }


def test_percentiles_are_those_of_the_measurements() -> None:
    """The 95th percentile of 100 measurements is the 95th; of one, itself."""
    assert LayerTime.from_seconds([float(value) for value in range(1, 101)]) == LayerTime(50.5, 95.0)
    assert LayerTime.from_seconds([3.0]) == LayerTime(3.0, 3.0)


def test_a_models_if_is_measured_as_one_layer() -> None:
    """onnxruntime's real profile of an If: its layer has the time, and its inside is no layer."""
    out = [helper.make_tensor_value_info("z", TensorProto.FLOAT, [4])]
    then = helper.make_graph([helper.make_node("Relu", ["x"], ["z"], name="inside")], "then", [], out)
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["z"], name="last")], "else", [], out)
    nodes = [
        helper.make_node("If", ["c"], ["z1"], name="choose", then_branch=then, else_branch=other),
        helper.make_node("Neg", ["z1"], ["y"], name="last"),
    ]
    inputs = [
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [4]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])]
    made = helper.make_graph(nodes, "if", inputs, outputs)
    proto: onnx.ModelProto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    layers = (layer("choice", (0,), "x", "z1"), layer("negative", (1,), "z1", "y"))

    times = measure_layers(proto.SerializeToString(), LayerGraph(layers, {}, ("c", "x"), ("y",)), runs=2, warmup=0)

    assert list(times) == ["choice", "negative"]
