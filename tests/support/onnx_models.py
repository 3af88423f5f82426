"""Tiny ONNX models with the traits that make cutting hard, and the few lines that run a cut one."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from edgesplit.input_spec import InputSpec
from edgesplit.release.manifest import Manifest, encode_manifest
from edgesplit.runtime import run_slices
from edgesplit.runtime.loader import load_slices
from edgesplit.runtime.onnx import OnnxRuntime
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.onnx_format.model import prepare_model
from edgesplit_partitioner.slicing import CutSlice

Array = npt.NDArray[Any]
Shape = Sequence[int | str]


def weight(name: str, *shape: int, seed: int = 0) -> onnx.TensorProto:
    """Random weights that depend on the name and the seed alone."""
    rng = np.random.default_rng([seed, *name.encode()])
    return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) * np.float32(0.3), name)


def ints(name: str, *values: int) -> onnx.TensorProto:
    """A shape, or the like."""
    return numpy_helper.from_array(np.array(values, np.int64), name)


def scalar(name: str, number: float, kind: type[np.generic]) -> onnx.TensorProto:
    """A constant without dimensions."""
    return numpy_helper.from_array(np.array(number, kind), name)


def value(name: str, shape: Shape | None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """An input or output."""
    return helper.make_tensor_value_info(name, kind, shape)


def build(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
    ir_version: int = 8,
) -> bytes:
    """The model's file."""
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=ir_version)
    return bytes(model.SerializeToString())


CHAIN_WEIGHTS = {
    "w1": (8, 3, 3, 3),
    "b1": (8,),
    "w2": (64, 8, 3, 3),
    "w3": (96, 64, 3, 3),
    "w4": (96, 10),
    "b4": (10,),
}


def chain(seed: int = 0, changed: str = "") -> bytes:
    """A picture through convolutions with SiLU and ReLU to a softmax; `changed` names weights that differ."""

    def own(name: str, *shape: int) -> onnx.TensorProto:
        return weight(name, *shape, seed=seed + (name == changed))

    node = helper.make_node
    return build(
        [
            node("Conv", ["image", "w1", "b1"], ["c1"], name="/stem/Conv", pads=[1, 1, 1, 1]),
            node("Sigmoid", ["c1"], ["g1"]),
            node("Mul", ["c1", "g1"], ["a1"]),
            node("Conv", ["a1", "w2"], ["c2"], strides=[2, 2]),
            node("Relu", ["c2"], ["a2"]),
            node("Conv", ["a2", "w3"], ["c3"], name="wide"),
            node("LeakyRelu", ["c3"], ["a3"]),
            node("GlobalAveragePool", ["a3"], ["p"]),
            node("Flatten", ["p"], ["f"]),
            node("Gemm", ["f", "w4", "b4"], ["logits"]),
            node("Softmax", ["logits"], ["probabilities"]),
        ],
        [value("image", [1, 3, 16, 16])],
        [value("probabilities", [1, 10])],
        [own(name, *shape) for name, shape in CHAIN_WEIGHTS.items()],
    )


def branches() -> bytes:
    """Branches, a tensor with three readers, a residual sum, and an output that is used inside too."""
    node = helper.make_node
    return build(
        [
            node("Conv", ["x", "w1"], ["stem"], name="stem"),
            node("Relu", ["stem"], ["shared"], name="act"),
            node("Conv", ["shared", "w2"], ["left"], name="left"),
            node("Conv", ["shared", "w3"], ["right"], name="right"),
            node("Tanh", ["right"], ["seen"], name="seen"),
            node("Add", ["left", "seen"], ["sum"], name="sum"),
            node("Relu", ["sum"], ["after"], name="after"),
            node("Concat", ["after", "shared"], ["wide"], name="wide", axis=1),
            node("ReduceMean", ["wide"], ["y"], name="mean", axes=[2, 3]),
        ],
        [value("x", [1, 2, 8, 8])],
        [value("y", [1, 8, 1, 1]), value("seen", [1, 4, 8, 8])],
        [weight("w1", 4, 2, 1, 1), weight("w2", 4, 4, 1, 1), weight("w3", 4, 4, 1, 1)],
    )


def listed_weights() -> bytes:
    """IR 3: every initializer is an input too, the unused one as well."""
    node = helper.make_node
    weights = [weight("w", 4, 6), weight("unused", 3), ints("shape", 1, 4)]
    listed = [value("w", [4, 6]), value("unused", [3]), value("shape", [2], TensorProto.INT64)]
    return build(
        [node("Reshape", ["x", "shape"], ["flat"]), node("MatMul", ["flat", "w"], ["m"]), node("Exp", ["m"], ["y"])],
        [*listed, value("x", [2, 2])],
        [value("y", [1, 6])],
        weights,
        ir_version=3,
    )


def captured() -> bytes:
    """An If whose branches use a tensor and a weight of the outer graph that are not among its inputs."""
    node = helper.make_node
    then = helper.make_graph([node("Mul", ["hidden", "w"], ["t"])], "then", [], [value("t", None)])
    other = helper.make_graph([node("Neg", ["hidden"], ["e"])], "else", [], [value("e", None)])
    return build(
        [
            node("Exp", ["x"], ["hidden"], name="hidden"),
            node("ReduceMax", ["x"], ["top"], name="top", keepdims=0),
            node("Greater", ["top", "limit"], ["large"], name="large"),
            node("If", ["large"], ["chosen"], name="choice", then_branch=then, else_branch=other),
            node("Sqrt", ["chosen"], ["y"], name="root"),
        ],
        [value("x", [3, 5])],
        [value("y", [3, 5])],
        [weight("w", 3, 5), scalar("limit", 0.5, np.float32)],
    )


def looped() -> bytes:
    """A Loop that carries a state, with an outer tensor captured in its body."""
    node = helper.make_node
    body = helper.make_graph(
        [node("Add", ["state", "step"], ["next"]), node("Identity", ["go"], ["again"])],
        "body",
        [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("state", [4])],
        [value("again", [], TensorProto.BOOL), value("next", [4])],
    )
    return build(
        [
            node("Tanh", ["x"], ["step"]),
            node("Loop", ["rounds", "", "x"], ["end"], name="rounds", body=body),
            node("Cos", ["end"], ["y"]),
        ],
        [value("x", [4])],
        [value("y", [4])],
        [scalar("rounds", 3, np.int64)],
    )


def state() -> bytes:
    """Several inputs and outputs, a state that goes round, an input that is handed on, a constant output."""
    node = helper.make_node
    return build(
        [
            node("MatMul", ["x", "w"], ["m"], name="in"),
            node("Add", ["m", "state"], ["s"], name="mix"),
            node("Tanh", ["s"], ["new_state"], name="tanh"),
            node("Cast", ["gain"], ["gain32"], name="gain", to=TensorProto.FLOAT),
            node("Mul", ["new_state", "gain32"], ["y"], name="scale"),
            node("Identity", ["x"], ["x_again"], name="again"),
            node("Add", ["c", "c"], ["fixed"], name="fixed"),
        ],
        [value("x", [1, 4]), value("state", [1, 6]), value("gain", [], TensorProto.INT64)],
        [value("y", [1, 6]), value("new_state", [1, 6]), value("x_again", [1, 4]), value("fixed", [2])],
        [weight("w", 4, 6), weight("c", 2)],
    )


def quantised() -> bytes:
    """QDQ: int8 between the layers; weights dequantised by a node and used by two convolutions."""
    node = helper.make_node
    scale, zero = scalar("s", 0.05, np.float32), scalar("z", 0, np.int8)
    stored = numpy_helper.from_array(np.random.default_rng(4).integers(-90, 90, (4, 4, 1, 1)).astype(np.int8), "wq")
    return build(
        [
            node("QuantizeLinear", ["x", "s", "z"], ["q0"]),
            node("DequantizeLinear", ["wq", "s", "z"], ["w"]),
            node("DequantizeLinear", ["q0", "s", "z"], ["d0"]),
            node("Conv", ["d0", "w"], ["c1"], name="first"),
            node("QuantizeLinear", ["c1", "s", "z"], ["q1"]),
            node("DequantizeLinear", ["q1", "s", "z"], ["d1"]),
            node("Conv", ["d1", "w"], ["c2"], name="second"),
            node("Relu", ["c2"], ["r2"]),
            node("QuantizeLinear", ["r2", "s", "z"], ["q2"]),
            node("DequantizeLinear", ["q2", "s", "z"], ["y"]),
        ],
        [value("x", [1, 4, 6, 6])],
        [value("y", [1, 4, 6, 6])],
        [scale, zero, stored],
    )


def sequences() -> bytes:
    """A sequence between operators, which no cut may send, with a path round it."""
    node = helper.make_node
    return build(
        [
            node("Exp", ["x"], ["a"], name="a"),
            node("SequenceConstruct", ["a", "x"], ["s"], name="s"),
            node("Sin", ["a"], ["b"], name="b"),
            node("SequenceInsert", ["s", "b"], ["s2"], name="s2"),
            node("ConcatFromSequence", ["s2"], ["y"], name="y", axis=0),
            node("Neg", ["y"], ["z"], name="z"),
        ],
        [value("x", [2, 3])],
        [value("z", [6, 3])],
    )


def counting() -> bytes:
    """How many rows are positive decides a shape inside."""
    node = helper.make_node
    return build(
        [
            node("NonZero", ["x"], ["where"], name="where"),
            node("Cast", ["where"], ["places"], name="places", to=TensorProto.FLOAT),
            node("ReduceSum", ["places"], ["y"], name="y", keepdims=0),
        ],
        [value("x", [2, 3])],
        [value("y", [])],
    )


def free_batch() -> bytes:
    """A named free dimension and an unnamed one; a shape computed from them inside."""
    node = helper.make_node
    image = value("image", ["batch", 3, 4, 4])
    image.type.tensor_type.shape.dim[3].Clear()
    return build(
        [
            node("Relu", ["image"], ["r"]),
            node("Shape", ["r"], ["shape"]),
            node("Gather", ["shape", "zero"], ["n"]),
            node("Concat", ["n", "rest"], ["to"], axis=0),
            node("Reshape", ["r", "to"], ["y"]),
        ],
        [image],
        [value("y", ["batch", "features"])],
        [ints("zero", 0), ints("rest", -1)],
    )


MODELS: Mapping[str, Callable[[], bytes]] = {
    "chain": chain,
    "branches": branches,
    "listed_weights": listed_weights,
    "captured": captured,
    "looped": looped,
    "state": state,
    "quantised": quantised,
    "sequences": sequences,
    "counting": counting,
}


@functools.cache
def prepared(name: str) -> PreparedModel:
    """The model of that name, prepared once for all tests."""
    return prepare_model(MODELS[name]())


def feeds_of(model: PreparedModel, seed: int = 1) -> dict[str, Array]:
    """Random values for every input."""
    rng = np.random.default_rng(seed)
    kinds = {"FP32": np.float32, "INT64": np.int64}
    return {
        one.name: np.asarray(rng.standard_normal(one.shape) * 2).astype(kinds[one.datatype]) for one in model.inputs
    }


def run_whole(raw: bytes, feeds: Mapping[str, Array], basic: bool = False) -> dict[str, Array]:
    """The unsplit model's outputs by onnxruntime alone: as the graph stands, or with its BASIC optimisation."""
    levels = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = levels.ORT_ENABLE_BASIC if basic else levels.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def manifest_of(model: PreparedModel, slices: Sequence[CutSlice], spec: InputSpec | None = None) -> Manifest:
    """A manifest that holds these slices, without plans."""
    return Manifest(
        model="tiny@1",
        model_sha256="0" * 64,
        created="2026-01-01T00:00:00Z",
        input_spec=spec,
        inputs=model.inputs,
        outputs=model.outputs,
        slices=tuple(one.slice for one in slices),
        plans={},
    )


def write_slices(folder: Path, slices: Sequence[CutSlice]) -> None:
    """Every slice's files in a folder of its name."""
    for one in slices:
        (folder / one.slice.name).mkdir(parents=True)
        for name, data in one.files.items():
            (folder / one.slice.name / name).write_bytes(data)


def run_chain(
    folder: Path,
    model: PreparedModel,
    slices: Sequence[CutSlice],
    feeds: Mapping[str, Array],
    spec: InputSpec | None = None,
) -> dict[str, Array]:
    """The slices, written, loaded and run one after the other: all live tensors at the end."""
    write_slices(folder, slices)
    manifest = manifest_of(model, slices, spec)
    assert encode_manifest(manifest)
    programs = load_slices(manifest, lambda name: folder / name, OnnxRuntime())
    return run_slices(programs, [one.slice.name for one in slices], feeds)


def closed_set(graph: LayerGraph, rng: random.Random) -> frozenset[str]:
    """A random set of layers with all that they depend on."""
    writer = {tensor: layer.name for layer in graph.layers for tensor in layer.writes}
    layers = {layer.name: layer for layer in graph.layers}
    pending = [layer.name for layer in rng.sample(list(graph.layers), rng.randint(0, min(3, len(graph.layers))))]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending.extend(writer[tensor] for tensor in layers[name].reads if tensor in writer)
    return frozenset(found)


def same_bits(got: Mapping[str, Array], want: Mapping[str, Array]) -> bool:
    """Every wanted tensor is there with the same type, shape and bits."""

    def bits(one: Array) -> tuple[object, ...]:
        return one.dtype, one.shape, one.tobytes()

    return all(name in got and bits(got[name]) == bits(one) for name, one in want.items())
