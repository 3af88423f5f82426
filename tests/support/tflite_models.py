"""Tiny TFLite models written by hand, with the traits that make cutting hard, and the few lines that run a cut one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

from edgesplit.runtime.tflite import invoke, open_interpreter
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.tflite_format.model import prepare_model
from support.onnx_models import Array

FLOAT, INT8, INT32, BOOL = (
    schema.TensorType.FLOAT32,
    schema.TensorType.INT8,
    schema.TensorType.INT32,
    schema.TensorType.BOOL,
)
KINDS = {np.dtype(np.float32): FLOAT, np.dtype(np.int8): INT8, np.dtype(np.int32): INT32}


class Graph:
    """A subgraph in the making; tensors are known by name."""

    def __init__(self, model: Model) -> None:
        self.model, self.made = model, schema.SubGraphT()
        self.made.tensors, self.made.operators, self.index = [], [], {}
        model.made.subgraphs.append(self.made)

    def tensor(
        self,
        name: str,
        *shape: int,
        kind: int = FLOAT,
        values: Array | None = None,
        scale: tuple[float, int] | None = None,
        variable: bool = False,
        free: Sequence[int] = (),
    ) -> Graph:
        """A tensor, or a weight with its values; `free` are its dimensions as the signature has them."""
        one = schema.TensorT()
        one.name, one.shape, one.type, one.isVariable = name.encode(), np.array(shape, np.int32), kind, variable
        if values is not None:
            one.shape, one.type = np.array(values.shape, np.int32), KINDS[values.dtype]
            one.buffer = self.model.buffer(values)
        if scale is not None:
            one.quantization = schema.QuantizationParametersT()
            one.quantization.scale = np.array([scale[0]], np.float32)
            one.quantization.zeroPoint = np.array([scale[1]], np.int64)
        if free:
            one.shapeSignature = np.array(free, np.int32)
        self.index[name] = len(self.made.tensors)
        self.made.tensors.append(one)
        return self

    def operator(
        self, kind: str, reads: Sequence[str], writes: Sequence[str], options: Any = None, custom: str = ""
    ) -> Graph:
        """An operator; an input named with nothing is left out."""
        one = schema.OperatorT()
        one.opcodeIndex = self.model.code(kind, custom)
        one.inputs = np.array([self.index[name] if name else -1 for name in reads], np.int32)
        one.outputs = np.array([self.index[name] for name in writes], np.int32)
        if options is not None:
            one.builtinOptions = options
            one.builtinOptionsType = getattr(schema.BuiltinOptions, type(options).__name__.removesuffix("T"))
        self.made.operators.append(one)
        return self

    def ends(self, inputs: Sequence[str], outputs: Sequence[str]) -> Graph:
        """What goes in and comes out."""
        self.made.inputs = np.array([self.index[name] for name in inputs], np.int32)
        self.made.outputs = np.array([self.index[name] for name in outputs], np.int32)
        return self


class Model:
    """A file in the making, packed by the schema's own code, not by ours."""

    def __init__(self) -> None:
        self.made = schema.ModelT()
        self.made.version, self.made.subgraphs, self.made.operatorCodes = 3, [], []
        self.made.buffers = [schema.BufferT()]
        self.codes: dict[tuple[str, str], int] = {}

    def buffer(self, values: Array) -> int:
        one = schema.BufferT()
        one.data = np.frombuffer(values.tobytes(), np.uint8)
        self.made.buffers.append(one)
        return len(self.made.buffers) - 1

    def code(self, kind: str, custom: str) -> int:
        if (kind, custom) not in self.codes:
            one = schema.OperatorCodeT()
            one.builtinCode = getattr(schema.BuiltinOperator, kind)
            one.deprecatedBuiltinCode = min(one.builtinCode, 127)
            one.customCode = custom.encode() or None
            one.version = 1
            self.codes[kind, custom] = len(self.made.operatorCodes)
            self.made.operatorCodes.append(one)
        return self.codes[kind, custom]

    def file(self) -> bytes:
        builder = flatbuffers.Builder(1024)
        builder.Finish(self.made.Pack(builder), b"TFL3")
        return bytes(builder.Output())


def weight(name: str, *shape: int, seed: int = 0) -> Array:
    """Random weights that depend on the name and the seed alone."""
    rng = np.random.default_rng([seed, *name.encode()])
    return rng.standard_normal(shape).astype(np.float32) * np.float32(0.3)


def _convolution(*, stride: int = 1, relu: bool = False) -> Any:
    options = schema.Conv2DOptionsT()
    options.strideH = options.strideW = stride
    options.dilationHFactor = options.dilationWFactor = 1
    options.fusedActivationFunction = int(relu)
    return options


WEIGHTS = {"w1": (8, 3, 3, 3), "b1": (8,), "w2": (64, 3, 3, 8), "w3": (96, 3, 3, 64), "w4": (10, 96), "b4": (10,)}


def chain(changed: str = "") -> bytes:
    """A picture through padding and convolutions to a softmax; `changed` names weights that differ."""
    model = Model()
    graph = Graph(model)
    graph.tensor("image", 1, 16, 16, 3).tensor("padded", 1, 18, 18, 3).tensor("c1", 1, 16, 16, 8)
    graph.tensor("c2", 1, 8, 8, 64).tensor("c3", 1, 8, 8, 96).tensor("pool", 1, 96)
    graph.tensor("logits", 1, 10).tensor("probabilities", 1, 10)
    for name, shape in WEIGHTS.items():
        graph.tensor(name, values=weight(name, *shape, seed=int(name == changed)))
    graph.tensor("zeros", values=np.zeros(96, np.float32))
    graph.tensor("zeros2", values=np.zeros(64, np.float32))
    graph.tensor("pads", values=np.array([[0, 0], [1, 1], [1, 1], [0, 0]], np.int32))
    graph.tensor("axes", values=np.array([1, 2], np.int32))
    graph.operator("PAD", ["image", "pads"], ["padded"], schema.PadOptionsT())
    valid = _convolution(relu=True)
    valid.padding = schema.Padding.VALID
    graph.operator("CONV_2D", ["padded", "w1", "b1"], ["c1"], valid)
    graph.operator("CONV_2D", ["c1", "w2", "zeros2"], ["c2"], _convolution(stride=2, relu=True))
    graph.operator("CONV_2D", ["c2", "w3", "zeros"], ["c3"], _convolution())
    graph.operator("MEAN", ["c3", "axes"], ["pool"], schema.ReducerOptionsT())
    graph.operator("FULLY_CONNECTED", ["pool", "w4", "b4"], ["logits"], schema.FullyConnectedOptionsT())
    softmax = schema.SoftmaxOptionsT()
    softmax.beta = 1.0
    graph.operator("SOFTMAX", ["logits"], ["probabilities"], softmax)
    graph.ends(["image"], ["probabilities"])
    return model.file()


def branches() -> bytes:
    """Branches, a residual sum, an output that is used inside too, several inputs, and tensors without names."""
    model = Model()
    graph = Graph(model)
    for name in ("x", "state", "a", "b", "sum", "y"):
        graph.tensor(name, 1, 6)
    graph.tensor("c", values=weight("c", 1, 6))
    graph.operator("TANH", ["x"], ["a"])
    graph.operator("MUL", ["a", "c"], ["b"], schema.MulOptionsT())
    graph.operator("ADD", ["b", "state"], ["sum"], schema.AddOptionsT())
    graph.operator("MUL", ["sum", "a"], ["y"], schema.MulOptionsT())
    graph.ends(["x", "state"], ["y", "sum"])
    for name in ("a", "b"):
        graph.made.tensors[graph.index[name]].name = b""
    return model.file()


def quantised() -> bytes:
    """int8 in the middle: quantised, convolved with a scale of its own for each tensor, dequantised."""
    model = Model()
    graph = Graph(model)
    rng = np.random.default_rng(4)
    graph.tensor("x", 1, 6, 6, 4).tensor("q0", 1, 6, 6, 4, kind=INT8, scale=(0.05, 3))
    graph.tensor("w", values=rng.integers(-90, 90, (4, 1, 1, 4)).astype(np.int8), scale=(0.02, 0))
    graph.tensor("b", values=np.zeros(4, np.int32), scale=(0.001, 0))
    graph.tensor("q1", 1, 6, 6, 4, kind=INT8, scale=(0.06, -5)).tensor("q2", 1, 6, 6, 4, kind=INT8, scale=(0.07, 7))
    graph.tensor("b2", values=np.zeros(4, np.int32), scale=(0.0012, 0)).tensor("y", 1, 6, 6, 4)
    graph.operator("QUANTIZE", ["x"], ["q0"], schema.QuantizeOptionsT())
    graph.operator("CONV_2D", ["q0", "w", "b"], ["q1"], _convolution())
    graph.operator("CONV_2D", ["q1", "w", "b2"], ["q2"], _convolution())
    graph.operator("DEQUANTIZE", ["q2"], ["y"], schema.DequantizeOptionsT())
    graph.ends(["x"], ["y"])
    return model.file()


def computed_weights() -> bytes:
    """A weight that an operator makes of another one, used by two layers."""
    model = Model()
    graph = Graph(model)
    graph.tensor("x", 1, 4).tensor("half", values=weight("half", 4, 4)).tensor("w", 4, 4)
    graph.tensor("b", values=np.zeros(4, np.float32)).tensor("h", 1, 4).tensor("y", 1, 4)
    graph.operator("NEG", ["half"], ["w"])
    graph.operator("FULLY_CONNECTED", ["x", "w", "b"], ["h"], schema.FullyConnectedOptionsT())
    graph.operator("FULLY_CONNECTED", ["h", "w", "b"], ["y"], schema.FullyConnectedOptionsT())
    graph.ends(["x"], ["y"])
    return model.file()


def looped() -> bytes:
    """A While of three rounds over two subgraphs, with a layer before and one after it."""
    model = Model()
    main = Graph(model)
    main.tensor("x", 4).tensor("h", 4).tensor("i", values=np.array([0], np.int32)).tensor("n", 1, kind=INT32)
    main.tensor("end", 4).tensor("y", 4)
    loop = schema.WhileOptionsT()
    loop.condSubgraphIndex, loop.bodySubgraphIndex = 1, 2
    main.operator("TANH", ["x"], ["h"]).operator("WHILE", ["i", "h"], ["n", "end"], loop)
    main.operator("COS", ["end"], ["y"]).ends(["x"], ["y"])
    condition = Graph(model)
    condition.tensor("i", 1, kind=INT32).tensor("v", 4).tensor("limit", values=np.array([3], np.int32))
    condition.tensor("go", 1, kind=BOOL)
    condition.operator("LESS", ["i", "limit"], ["go"], schema.LessOptionsT()).ends(["i", "v"], ["go"])
    body = Graph(model)
    body.tensor("i", 1, kind=INT32).tensor("v", 4).tensor("one", values=np.array([1], np.int32))
    body.tensor("i2", 1, kind=INT32).tensor("v2", 4).tensor("step", values=weight("step", 4))
    body.operator("ADD", ["i", "one"], ["i2"], schema.AddOptionsT())
    body.operator("ADD", ["v", "step"], ["v2"], schema.AddOptionsT()).ends(["i", "v"], ["i2", "v2"])
    return model.file()


def remembering() -> bytes:
    """A recurrent operator that keeps its state in a variable, between two plain layers."""
    model = Model()
    graph = Graph(model)
    graph.tensor("x", 1, 3, 4).tensor("h", 1, 3, 4).tensor("state", 1, 5, variable=True)
    graph.tensor("w", values=weight("w", 5, 4)).tensor("r", values=weight("r", 5, 5))
    graph.tensor("b", values=weight("b", 5)).tensor("s", 1, 3, 5).tensor("y", 1, 3, 5)
    options = schema.SequenceRNNOptionsT()
    options.fusedActivationFunction = schema.ActivationFunctionType.TANH
    graph.operator("TANH", ["x"], ["h"])
    graph.operator("UNIDIRECTIONAL_SEQUENCE_RNN", ["h", "w", "r", "b", "state"], ["s"], options)
    graph.operator("COS", ["s"], ["y"]).ends(["x"], ["y"])
    return model.file()


def counting() -> bytes:
    """How many rows are positive decides a shape inside."""
    model = Model()
    graph = Graph(model)
    graph.tensor("x", 2, 3).tensor("limit", values=np.zeros(1, np.float32)).tensor("positive", 2, 3, kind=BOOL)
    graph.tensor("where", 1, 2, kind=schema.TensorType.INT64).tensor("places", 1, 2)
    graph.tensor("axes", values=np.array([0, 1], np.int32)).tensor("y")
    cast = schema.CastOptionsT()
    cast.inDataType, cast.outDataType = schema.TensorType.INT64, FLOAT
    graph.operator("GREATER", ["x", "limit"], ["positive"], schema.GreaterOptionsT())
    graph.operator("WHERE", ["positive"], ["where"], schema.WhereOptionsT())
    graph.operator("CAST", ["where"], ["places"], cast)
    graph.operator("SUM", ["places", "axes"], ["y"], schema.ReducerOptionsT())
    graph.ends(["x"], ["y"])
    return model.file()


def free_batch() -> bytes:
    """A dimension that the file leaves open, 1 unless someone says otherwise."""
    model = Model()
    graph = Graph(model)
    graph.tensor("x", 1, 4, free=(-1, 4)).tensor("h", 1, 4, free=(-1, 4)).tensor("y", 1, 4, free=(-1, 4))
    graph.operator("TANH", ["x"], ["h"]).operator("COS", ["h"], ["y"]).ends(["x"], ["y"])
    return model.file()


def custom(name: str) -> bytes:
    """A custom operator after a plain one."""
    model = Model()
    graph = Graph(model)
    graph.tensor("x", 1, 4).tensor("h", 1, 4).tensor("y", 1, 4)
    graph.operator("TANH", ["x"], ["h"]).operator("CUSTOM", ["h"], ["y"], custom=name).ends(["x"], ["y"])
    return model.file()


def state_outside() -> bytes:
    """A variable that lives in the runtime."""
    model = Model()
    graph = Graph(model)
    graph.tensor("x", 1).tensor("handle", 1, kind=schema.TensorType.RESOURCE).tensor("y", 1)
    graph.operator("VAR_HANDLE", [], ["handle"], schema.VarHandleOptionsT())
    graph.operator("ASSIGN_VARIABLE", ["handle", "x"], []).operator("READ_VARIABLE", ["handle"], ["y"])
    graph.ends(["x"], ["y"])
    return model.file()


MODELS: Mapping[str, Callable[[], bytes]] = {
    "chain": chain,
    "branches": branches,
    "quantised": quantised,
    "computed_weights": computed_weights,
    "looped": looped,
    "remembering": remembering,
    "counting": counting,
    "free_batch": free_batch,
}


@functools.cache
def prepared(name: str) -> PreparedModel:
    """The model of that name, prepared once for all tests."""
    return prepare_model(MODELS[name]())


def feeds_of(model: PreparedModel, seed: int = 1) -> dict[str, Array]:
    """Random values for every input."""
    rng = np.random.default_rng(seed)
    made: dict[str, Array] = {}
    for one in model.inputs:
        values = np.asarray(rng.standard_normal(one.shape) * 2)
        made[one.name] = (
            values.astype(np.float32) if one.datatype == "FP32" else (values * 50).astype(one.datatype.lower())
        )
    return made


def run_whole(raw: bytes, feeds: Mapping[str, Array], folder: Path) -> dict[str, Array]:
    """The unsplit model's outputs by LiteRT alone; `folder` is for its file."""
    path = folder / "whole.tflite"
    path.write_bytes(raw)
    interpreter, _ = open_interpreter(path)
    return invoke(interpreter, feeds)


def ordered(operators: Sequence[tuple[str, str, str]], outputs: Sequence[str], variable: str = "") -> bytes:
    """Elementwise operators as they are listed, each from one of the tensors x, a, b, y to another."""
    model = Model()
    graph = Graph(model)
    for name in ("x", "a", "b", "y"):
        graph.tensor(name, 2, 3, variable=name == variable)
    for kind, reads, writes in operators:
        graph.operator(kind, [reads], [writes])
    graph.ends(["x"], outputs)
    return model.file()


def sized_by_value() -> bytes:
    """Three elements, or four where the input is large, which no trial run shows."""
    model = Model()
    graph = Graph(model)
    graph.tensor("x", 8).tensor("axis", values=np.array([0], np.int32)).tensor("sum").tensor("large", kind=BOOL)
    graph.tensor("limit", values=np.array(1000, np.float32)).tensor("more", kind=INT32).tensor("count", 1, kind=INT32)
    graph.tensor("three", values=np.array([3], np.int32)).tensor("zero", values=np.array([0], np.int32))
    graph.tensor("part", 3, free=(-1,)).tensor("y", 3, free=(-1,))
    cast = schema.CastOptionsT()
    cast.inDataType, cast.outDataType = BOOL, INT32
    graph.operator("SUM", ["x", "axis"], ["sum"], schema.ReducerOptionsT())
    graph.operator("GREATER", ["sum", "limit"], ["large"], schema.GreaterOptionsT())
    graph.operator("CAST", ["large"], ["more"], cast)
    graph.operator("ADD", ["more", "three"], ["count"], schema.AddOptionsT())
    graph.operator("SLICE", ["x", "zero", "count"], ["part"], schema.SliceOptionsT())
    graph.operator("COS", ["part"], ["y"]).ends(["x"], ["y"])
    return model.file()


def drawing_in_a_loop() -> bytes:
    """A loop over constants that adds a random tensor in each turn; two layers read what it makes."""
    model = Model()
    graph = Graph(model)
    nought, one = (np.array(number, np.int32) for number in (0, 1))
    graph.tensor("i0", values=nought).tensor("v0", values=weight("v", 2, 3)).tensor("i", kind=INT32)
    graph.tensor("n", 2, 3).tensor("x", 2, 3).tensor("a", 2, 3).tensor("y", 2, 3)
    turns = schema.WhileOptionsT()
    turns.condSubgraphIndex, turns.bodySubgraphIndex = 1, 2
    graph.operator("WHILE", ["i0", "v0"], ["i", "n"], turns)
    graph.operator("ADD", ["x", "n"], ["a"], schema.AddOptionsT())
    graph.operator("SUB", ["a", "n"], ["y"], schema.SubOptionsT()).ends(["x"], ["y"])
    condition = Graph(model).tensor("i", kind=INT32).tensor("v", 2, 3).tensor("once", values=one)
    condition.tensor("more", kind=BOOL).operator("LESS", ["i", "once"], ["more"], schema.LessOptionsT())
    condition.ends(["i", "v"], ["more"])
    body = Graph(model).tensor("i", kind=INT32).tensor("v", 2, 3).tensor("one", values=one).tensor("i2", kind=INT32)
    body.tensor("shape", values=np.array([2, 3], np.int32)).tensor("drawn", 2, 3).tensor("v2", 2, 3)
    body.operator("ADD", ["i", "one"], ["i2"], schema.AddOptionsT())
    body.operator("RANDOM_UNIFORM", ["shape"], ["drawn"], schema.RandomOptionsT())
    body.operator("ADD", ["v", "drawn"], ["v2"], schema.AddOptionsT()).ends(["i", "v"], ["i2", "v2"])
    return model.file()
