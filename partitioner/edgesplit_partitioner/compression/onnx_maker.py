"""Makes compressed ONNX files with onnxruntime's quantiser; runs in `maker`'s child process.

int8: QDQ nodes are put into the graph as it was before any optimisation (one that was optimised loses fusions), then
onnxruntime fuses them into integer operators, and that graph is the file. A file with the QDQ nodes themselves would
compute other values once a device fuses it (3 % of the largest output on SqueezeNet), and so fail the device's check.
Activations are uint8 and weights int8, which x86-64 and Arm both have kernels for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, numpy_helper, shape_inference, version_converter
from onnxruntime.quantization import CalibrationMethod, QDQQuantizer, QuantType, TensorData, TensorsData
from onnxruntime.quantization import quantize_dynamic as quantise_dynamic
from onnxruntime.quantization.registry import QDQRegistry
from onnxruntime.transformers.float16 import convert_float_to_float16

from edgesplit.runtime import Tensors
from edgesplit_partitioner.compression.bias_correction import Array, output_shift
from edgesplit_partitioner.compression.layer_groups import Operator, layer_groups
from edgesplit_partitioner.compression.maker_job import CannotCompress, MakeJob, MakeResult
from edgesplit_partitioner.compression.ranges import RangeCollector
from edgesplit_partitioner.onnx_format import nodes

OPSET: Final = 13
"""The first operator set with a scale for each channel (DequantizeLinear's `axis`)."""
MATRIX_OPERATORS: Final = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN"})
"""Operators with weights, which begin a layer."""
CORRECTED: Final = frozenset({"Conv", "Gemm"})
"""Operators with a bias, which is corrected; the axis of their input's channels is 1."""
DYNAMIC_OPERATORS: Final = ("MatMul", "Gemm", "LSTM", "Attention", "Gather")
"""Operators that `int8-dynamic` quantises: those whose time goes to fetching weights."""
DATA_MOVEMENT: Final = frozenset(
    {"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Cast", "Shape", "Gather"}
    | {"Slice", "Concat", "Split", "Expand", "Pad", "Tile", "Range", "Constant", "ConstantOfShape", "MaxPool"}
)
"""Operators that compute nothing: they run on int8 as on float."""
INTEGER_OPERATORS: Final = frozenset(
    {"QGemm", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "MatMulIntegerToFloat"}
    | {"DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "ConvInteger"}
)
"""Operators of a quantised graph, beside those whose names begin with QLinear."""


class OnnxMaker:
    """Makes variants of one model; ranges are measured once, at the first variant that needs them."""

    def __init__(self, given: Path, samples: Sequence[Tensors]) -> None:
        self._given = onnx.load_model(str(given))
        self._samples = samples
        self._collector: RangeCollector | None = None
        self._prepared: onnx.ModelProto | None = None
        self._without_kernel: tuple[str, ...] | None = None
        self._shift_of: Mapping[str, Array] | None = None

    def make(self, job: MakeJob, target: Path) -> MakeResult:
        """Write the variant to `target`; CannotCompress says why there is none."""
        if job.method == "fp16":
            model = self._half_precision()
            target.write_bytes(model.SerializeToString(deterministic=True))
            return self._result(model, ())
        if job.method == "int8-dynamic":
            return self._dynamic(job, target)
        return self._static(job, target)

    def _half_precision(self) -> onnx.ModelProto:
        """Weights and arithmetic in half precision; inputs and outputs stay float32."""
        model = onnx.ModelProto()
        model.CopyFrom(self._given)
        half: onnx.ModelProto = convert_float_to_float16(model, keep_io_types=True)
        return half

    def _dynamic(self, job: MakeJob, target: Path) -> MakeResult:
        """Weights of products and recurrences in int8; activations are quantised in each request."""
        model = self._ready()
        groups = _groups(model, DYNAMIC_OPERATORS)
        if not any(node.op_type in DYNAMIC_OPERATORS[:-1] for node in model.graph.node):
            raise CannotCompress("int8-dynamic quantises products and recurrences, and the model has none: use int8")
        raw = target.with_suffix(".qdq")
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        quantise_dynamic(
            copy, raw, op_types_to_quantize=list(DYNAMIC_OPERATORS), per_channel=True, weight_type=QuantType.QInt8,
            nodes_to_quantize=_members(groups, job.only), nodes_to_exclude=_members(groups, job.float_layers),
        )  # fmt: skip
        fused = _fused(raw, target)
        return self._result(fused, tuple(groups), float_operators(fused))

    def _static(self, job: MakeJob, target: Path) -> MakeResult:
        """Weights and activations in int8."""
        model = self._ready()
        groups = _groups(model, tuple(QDQRegistry))
        if self._without_kernel is None:
            first = self._quantised(model, job, (), (), target)
            self._without_kernel = _unfused_types(first)
        fused = self._quantised(model, job, _members(groups, job.only), _members(groups, job.float_layers), target)
        left = float_operators(fused) if not job.float_layers and not job.only else ()
        return self._result(fused, tuple(groups), left)

    def _quantised(
        self, model: onnx.ModelProto, job: MakeJob, only: Sequence[str], excluded: Sequence[str], target: Path
    ) -> onnx.ModelProto:
        """The model with these nodes quantised and fused, which is also written to `target`."""
        ranges = self._ranges(job)
        data: dict[str, Any] = {  # of the quantiser's own types
            name: TensorData(lowest=np.float32(low), highest=np.float32(high)) for name, (low, high) in ranges.items()
        }
        kinds = [kind for kind in QDQRegistry if kind not in (self._without_kernel or ())]
        quantised = set(only) or {node.name for node in model.graph.node} - set(excluded)
        corrected = _with_corrected_biases(model, self._shifts(), quantised)
        quantiser = QDQQuantizer(
            shape_inference.infer_shapes(corrected), True, False, QuantType.QInt8, QuantType.QUInt8,
            TensorsData(CalibrationMethod.MinMax, data), list(only), list(excluded), kinds, {},
        )  # fmt: skip
        quantiser.quantize_model()
        raw = target.with_suffix(".qdq")
        raw.write_bytes(quantiser.model.model.SerializeToString(deterministic=True))
        return _fused(raw, target)

    def _ready(self) -> onnx.ModelProto:
        """The model as the quantiser takes it: nodes named, weights as initializers, an operator set with scales per
        channel, and normalisation folded into convolutions where it is not yet."""
        if self._prepared is None:
            model = self._given
            opset = _opset(model)
            if opset < OPSET:
                try:
                    model = version_converter.convert_version(model, OPSET)
                except Exception as error:  # the converter's C++ exceptions share no base class
                    reason = " ".join(str(error).split())[:200]
                    advice = f"export it again with opset {OPSET} or later"
                    raise CannotCompress(
                        f"its operator set {opset} cannot be brought to {OPSET}: {advice} ({reason})"
                    ) from error
            if any(node.op_type == "BatchNormalization" for node in model.graph.node):
                model = _optimised(model.SerializeToString(), onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC)
            copy = onnx.ModelProto()
            copy.CopyFrom(model)
            _lift_constants(copy.graph)
            for position, node in enumerate(copy.graph.node):
                node.name = node.name or f"{node.op_type.lower()}-{position}"
            self._prepared = copy
        return self._prepared

    def _ranges(self, job: MakeJob) -> dict[str, tuple[float, float]]:
        if self._collector is None:
            self._collector = _collect(self._ready(), self._samples)
        return self._collector.percentiles() if job.calibration == "percentile" else self._collector.extremes()

    def _shifts(self) -> Mapping[str, Array]:
        """Shift of the mean of each output channel by rounding the weights, by node."""
        assert self._collector is not None
        if self._shift_of is None:
            self._shift_of = _shifts(self._ready(), self._collector.channel_means())
        return self._shift_of

    def _result(
        self, model: onnx.ModelProto, layers: tuple[str, ...], without_kernel: tuple[str, ...] = ()
    ) -> MakeResult:
        tools = {name: version(name) for name in ("onnx", "onnxruntime")}
        return MakeResult(layers=layers, without_kernel=without_kernel, opset=_opset(model), tools=tools)


def float_operators(model: onnx.ModelProto) -> tuple[str, ...]:
    """Types of the operators of a quantised graph that compute in float."""
    integer: set[str] = set()
    found: set[str] = set()
    for node in model.graph.node:
        if node.op_type in INTEGER_OPERATORS or node.op_type.startswith("QLinear"):
            integer.update(() if node.op_type == "DequantizeLinear" else node.output)
        elif node.op_type in DATA_MOVEMENT:
            integer.update(node.output if node.input and node.input[0] in integer else ())
        else:
            found.add(node.op_type)
    return tuple(sorted(found))


def _unfused_types(model: onnx.ModelProto) -> tuple[str, ...]:
    """Types of the operators that read dequantised and write values that are quantised again: none of them has an
    integer kernel, so that quantising them costs time and accuracy. Operators with weights are left out: that one of
    them was not fused says nothing about the others."""
    dequantised = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    quantised = {node.input[0] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    return tuple(
        sorted(
            {
                node.op_type
                for node in model.graph.node
                if node.op_type not in INTEGER_OPERATORS | MATRIX_OPERATORS
                and not dequantised.isdisjoint(node.input)
                and quantised.issuperset(node.output)
            }
        )
    )


def _groups(model: onnx.ModelProto, kinds: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """The layers that have an operator of these kinds, with their nodes' names."""
    constants = nodes.constant_names(model.graph)
    kind_of = {node.name: node.op_type for node in model.graph.node}
    operators = (
        Operator(
            node.name,
            node.op_type in MATRIX_OPERATORS,
            tuple(name for name in nodes.inputs_of(node) if name not in constants),
            tuple(nodes.outputs_of(node)),
        )
        for node in model.graph.node
    )
    groups = layer_groups(operators)
    return {layer: names for layer, names in groups.items() if any(kind_of[name] in kinds for name in names)}


def _members(groups: Mapping[str, tuple[str, ...]], layers: Sequence[str]) -> list[str]:
    return [name for layer in layers for name in groups[layer]]


def _lift_constants(graph: onnx.GraphProto) -> None:
    """Turn Constant nodes with a tensor into initializers, in place: the quantiser takes weights from there only."""
    kept = []
    for node in graph.node:
        value = next((field.t for field in node.attribute if field.name == "value"), None)
        if node.op_type == "Constant" and value is not None:
            graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(value), node.output[0]))
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def _collect(model: onnx.ModelProto, samples: Sequence[Tensors]) -> RangeCollector:
    """The ranges of the inputs and of every float tensor between nodes."""
    exposed = shape_inference.infer_shapes(model)
    outputs = {value.name for value in exposed.graph.output}
    floats = [value for value in exposed.graph.value_info if value.type.tensor_type.elem_type == TensorProto.FLOAT]
    constants = nodes.constant_names(exposed.graph)
    exposed.graph.output.extend(
        onnx.ValueInfoProto(name=value.name)
        for value in floats
        if value.name not in outputs and value.name not in constants
    )
    # Not optimised: fusing would remove the tensors whose ranges are wanted.
    session = _session(exposed.SerializeToString(), onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)
    names = [output.name for output in session.get_outputs()]
    collector = RangeCollector({node.input[0]: 1 for node in model.graph.node if node.op_type in CORRECTED})
    for sample in samples:
        for name, tensor in (*sample.items(), *zip(names, session.run(names, dict(sample)), strict=True)):
            collector.add(name, np.asarray(tensor))
    return collector


def _shifts(model: onnx.ModelProto, means: Mapping[str, Array]) -> dict[str, Array]:
    """`output_shift` of each convolution and product with constant weights, by node."""
    weights = nodes.initializers(model.graph)
    shifts = {}
    for node in model.graph.node:
        if node.op_type not in CORRECTED or node.input[1] not in weights or node.input[0] not in means:
            continue
        values = numpy_helper.to_array(weights[node.input[1]])
        fields = {field.name: onnx.helper.get_attribute_value(field) for field in node.attribute}
        if node.op_type == "Gemm":
            if fields.get("alpha", 1.0) != 1.0 or fields.get("beta", 1.0) != 1.0 or fields.get("transA", 0):
                continue
            values = values if fields.get("transB", 0) else values.T
        shift = output_shift(values, means[node.input[0]], fields.get("group", 1))
        if shift is not None:
            shifts[node.name] = shift
    return shifts


def _with_corrected_biases(
    model: onnx.ModelProto, shifts: Mapping[str, Array], quantised: Collection[str]
) -> onnx.ModelProto:
    """A copy of the model in which these nodes' biases take the shifts back; nodes without a bias get one."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    weights = nodes.initializers(copy.graph)
    for node in copy.graph.node:
        if node.name not in quantised or node.name not in shifts:
            continue
        shift = shifts[node.name]
        bias = np.zeros(len(shift), np.float32)
        if len(node.input) > 2 and node.input[2]:
            if node.input[2] not in weights:
                continue
            bias = numpy_helper.to_array(weights[node.input[2]])
            if bias.size != len(shift):
                continue
        name = f"{node.name}/corrected_bias"
        corrected = (bias.reshape(-1).astype(np.float64) - shift).astype(np.float32)
        copy.graph.initializer.append(numpy_helper.from_array(corrected, name))
        del node.input[2:]
        node.input.append(name)
    return copy


def _fused(raw: Path, target: Path) -> onnx.ModelProto:
    """The quantised graph with integer operators in the place of QDQ nodes, also written to `target`. Fusions of this
    level do not depend on the machine."""
    model = _optimised(raw.read_bytes(), onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED, target)
    raw.unlink()
    target.write_bytes(model.SerializeToString(deterministic=True))
    return model


def _optimised(raw: bytes, level: Any, target: Path | None = None) -> onnx.ModelProto:
    file = target or Path("optimised.onnx")
    _session(raw, level, file)
    return onnx.load_model(str(file))


def _session(raw: bytes, level: Any, file: Path | None = None) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = level
    if file is not None:
        options.optimized_model_filepath = str(file)
    return onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])


def _opset(model: onnx.ModelProto) -> int:
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
