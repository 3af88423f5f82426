"""The digits model as a TFLite file: the weights of digits.onnx in TFLite's layouts, written without TensorFlow.

python to_tflite.py              digits.tflite beside digits.onnx, and how often it is right on the held-out frames

Twice the same bytes. Needs edgesplit with its controller's packages (onnx, ai-edge-litert), numpy and pillow.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from ai_edge_litert import schema_py_generated as schema
from evaluate import accuracy
from numpy.typing import NDArray
from onnx import numpy_helper

from edgesplit_partitioner.tflite_format.flatbuffer import pack

SIDE_PX = 128
Array = NDArray[Any]


class Writer:
    """A TFLite graph in the making: tensors by name, operators in order."""

    def __init__(self) -> None:
        self.graph = schema.SubGraphT()
        self.graph.name, self.graph.tensors, self.graph.operators = b"digits", [], []
        self.buffers = [schema.BufferT()]
        self.codes: dict[str, int] = {}
        self.index: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def tensor(self, name: str, shape: tuple[int, ...], values: Array | None = None) -> int:
        """A tensor of float32, or a weight with its values."""
        made = schema.TensorT()
        made.name, made.shape = name.encode(), np.array(shape, np.int32)
        made.type = schema.TensorType.FLOAT32
        if values is not None:
            made.type = schema.TensorType.INT32 if values.dtype == np.int32 else schema.TensorType.FLOAT32
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
            made.buffer = len(self.buffers)
            self.buffers.append(buffer)
        self.index[name], self.shapes[name] = len(self.graph.tensors), shape
        self.graph.tensors.append(made)
        return self.index[name]

    def weight(self, name: str, values: Array) -> str:
        """A weight, by its name again."""
        self.tensor(name, values.shape, values)
        return name

    def operator(self, kind: str, reads: list[str], writes: str, shape: tuple[int, ...], options: Any) -> None:
        """One operator with one result."""
        self.tensor(writes, shape)
        made = schema.OperatorT()
        made.opcodeIndex = self.codes.setdefault(kind, len(self.codes))
        made.inputs = np.array([self.index[name] for name in reads], np.int32)
        made.outputs = np.array([self.index[writes]], np.int32)
        made.builtinOptions = options
        made.builtinOptionsType = getattr(schema.BuiltinOptions, type(options).__name__.removesuffix("T"))
        self.graph.operators.append(made)

    def file(self, reads: str, writes: str) -> bytes:
        """The whole file."""
        self.graph.inputs = np.array([self.index[reads]], np.int32)
        self.graph.outputs = np.array([self.index[writes]], np.int32)
        model = schema.ModelT()
        model.operatorCodes = [_code(kind) for kind in self.codes]
        model.subgraphs, model.buffers = [self.graph], self.buffers
        return b"".join(pack(model))


def _code(kind: str) -> Any:
    code = schema.OperatorCodeT()
    code.builtinCode = getattr(schema.BuiltinOperator, kind)
    code.deprecatedBuiltinCode = min(code.builtinCode, 127)
    code.version = 1
    return code


def to_tflite(model: onnx.ModelProto) -> bytes:
    """`image` (1, 128, 128, 3) RGB in 0..1 to `probabilities` (1, 10): the file."""
    weights = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    made = Writer()
    made.tensor("image", (1, SIDE_PX, SIDE_PX, 3))
    nodes = list(model.graph.node)
    merged: dict[str, str] = {}
    for place, node in enumerate(nodes):
        reads = [merged.get(name, name) for name in node.input]
        if node.op_type == "Conv":
            after = nodes[place + 1]
            fused = after.op_type == "Relu" and after.input[0] == node.output[0]
            writes = after.output[0] if fused else node.output[0]
            merged[node.output[0]] = writes
            _convolution(made, node, reads[0], writes, fused, weights)
        elif node.op_type == "Add":
            made.operator("ADD", reads, node.output[0], made.shapes[reads[0]], schema.AddOptionsT())
        elif node.op_type != "Relu":
            _head(made, node, reads, merged, weights)
    return made.file("image", "probabilities")


def _convolution(
    made: Writer, node: onnx.NodeProto, read: str, writes: str, fused: bool, weights: Mapping[str, Array]
) -> None:
    """A convolution with its ReLU. ONNX pads both sides alike; TFLite's SAME does only where nothing is skipped."""
    facts = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    stride, groups, size = facts["strides"][0], facts["group"], facts["kernel_shape"][0]
    given = weights[node.input[1]]
    _, height, width, channels = made.shapes[read]
    shape = (1, height // stride, width // stride, given.shape[0])
    if stride > 1 and size > 1:
        pads = made.weight(f"{node.name}.pads", np.array([[0, 0], [1, 1], [1, 1], [0, 0]], np.int32))
        padded = (1, height + 2, width + 2, channels)
        made.operator("PAD", [read, pads], f"{node.name}.padded", padded, schema.PadOptionsT())
        read = f"{node.name}.padded"
    depthwise = groups > 1
    options = schema.DepthwiseConv2DOptionsT() if depthwise else schema.Conv2DOptionsT()
    if isinstance(options, schema.DepthwiseConv2DOptionsT):
        options.depthMultiplier = 1
    options.padding = schema.Padding.VALID if stride > 1 and size > 1 else schema.Padding.SAME
    options.strideH = options.strideW = stride
    options.dilationHFactor = options.dilationWFactor = 1
    relu = schema.ActivationFunctionType.RELU
    options.fusedActivationFunction = relu if fused else schema.ActivationFunctionType.NONE
    # (out, in, height, width) becomes (out, height, width, in), or (1, height, width, channels)
    filters = made.weight(node.input[1], given.transpose(1, 2, 3, 0) if depthwise else given.transpose(0, 2, 3, 1))
    bias = made.weight(node.input[2], weights[node.input[2]])
    made.operator("DEPTHWISE_CONV_2D" if depthwise else "CONV_2D", [read, filters, bias], writes, shape, options)


def _head(
    made: Writer, node: onnx.NodeProto, reads: list[str], merged: dict[str, str], weights: Mapping[str, Array]
) -> None:
    """Mean over the picture, classifier, softmax; the mean gives a row already, so that nothing is flattened."""
    writes, channels = node.output[0], made.shapes[reads[0]][-1]
    if node.op_type == "GlobalAveragePool":
        axes = made.weight("pool.axes", np.array([1, 2], np.int32))
        made.operator("MEAN", [reads[0], axes], writes, (1, channels), schema.ReducerOptionsT())
    elif node.op_type == "Flatten":
        merged[writes] = reads[0]
    elif node.op_type == "Gemm":
        matrix = weights[node.input[1]]
        read = [reads[0], made.weight(node.input[1], matrix), made.weight(node.input[2], weights[node.input[2]])]
        made.operator("FULLY_CONNECTED", read, writes, (1, matrix.shape[0]), schema.FullyConnectedOptionsT())
    else:
        options = schema.SoftmaxOptionsT()
        options.beta = 1.0
        made.operator("SOFTMAX", [reads[0]], writes, (1, channels), options)


def main() -> None:
    """Write the file and print its accuracy."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=here / "digits.onnx")
    parser.add_argument("--into", type=Path, default=here / "digits.tflite")
    chosen = parser.parse_args()
    chosen.into.write_bytes(to_tflite(onnx.load(chosen.model)))
    print(f"{chosen.into}: {chosen.into.stat().st_size} bytes; right on {accuracy(chosen.into, here / 'frames'):.1%}")


if __name__ == "__main__":
    main()
