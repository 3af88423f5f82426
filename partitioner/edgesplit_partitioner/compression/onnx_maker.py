"""Makes compressed ONNX files with onnxruntime's quantiser; runs in `maker`'s child process.

int8: QDQ nodes are put into the graph as it was before any optimisation (one that was optimised loses fusions), then
onnxruntime fuses them into integer operators, and that graph is the file. A file with the QDQ nodes themselves would
compute other values once a device fuses it (3 % of the largest output on SqueezeNet), and so fail the device's check.
Activations are uint8 and weights int8, which x86-64 and Arm both have kernels for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper, shape_inference, version_converter
from onnxruntime.quantization import CalibrationMethod, QDQQuantizer, QuantType, TensorData, TensorsData
from onnxruntime.quantization import quantize_dynamic as quantise_dynamic
from onnxruntime.quantization.registry import QDQRegistry
from onnxruntime.transformers.float16 import convert_float_to_float16

from edgesplit.runtime import Tensors
from edgesplit_partitioner.compression.bias_correction import Array
from edgesplit_partitioner.compression.maker_job import CannotCompress, MakeJob, MakeResult
from edgesplit_partitioner.compression.onnx_biases import output_shifts, with_corrected_biases
from edgesplit_partitioner.compression.onnx_operators import float_operators, layers_of, unfused_types
from edgesplit_partitioner.compression.onnx_sessions import collect_ranges, fused, optimised
from edgesplit_partitioner.compression.ranges import RangeCollector

OPSET: Final = 13
"""The first operator set with a scale for each channel (DequantizeLinear's `axis`)."""
DYNAMIC_OPERATORS: Final = ("MatMul", "Gemm", "LSTM", "Attention", "Gather")
"""Operators that `int8-dynamic` quantises: those whose time goes to fetching weights."""


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
        groups = layers_of(model, DYNAMIC_OPERATORS)
        if not any(node.op_type in DYNAMIC_OPERATORS[:-1] for node in model.graph.node):
            raise CannotCompress("int8-dynamic quantises products and recurrences, and the model has none: use int8")
        raw = target.with_suffix(".qdq")
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        quantise_dynamic(
            copy, raw, op_types_to_quantize=list(DYNAMIC_OPERATORS), per_channel=True, weight_type=QuantType.QInt8,
            nodes_to_quantize=_members(groups, job.only), nodes_to_exclude=_members(groups, job.float_layers),
        )  # fmt: skip
        made = fused(raw, target)
        return self._result(made, tuple(groups), float_operators(made))

    def _static(self, job: MakeJob, target: Path) -> MakeResult:
        """Weights and activations in int8."""
        model = self._ready()
        groups = layers_of(model, tuple(QDQRegistry))
        if self._without_kernel is None:
            first = self._quantised(model, job, (), (), target)
            self._without_kernel = unfused_types(first)
        made = self._quantised(model, job, _members(groups, job.only), _members(groups, job.float_layers), target)
        left = float_operators(made) if not job.float_layers and not job.only else ()
        return self._result(made, tuple(groups), left)

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
        corrected = with_corrected_biases(model, self._shifts(), quantised)
        quantiser = QDQQuantizer(
            shape_inference.infer_shapes(corrected), True, False, QuantType.QInt8, QuantType.QUInt8,
            TensorsData(CalibrationMethod.MinMax, data), list(only), list(excluded), kinds, {},
        )  # fmt: skip
        quantiser.quantize_model()
        raw = target.with_suffix(".qdq")
        raw.write_bytes(quantiser.model.model.SerializeToString(deterministic=True))
        return fused(raw, target)

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
                model = optimised(model.SerializeToString(), onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC)
            copy = onnx.ModelProto()
            copy.CopyFrom(model)
            _lift_constants(copy.graph)
            for position, node in enumerate(copy.graph.node):
                node.name = node.name or f"{node.op_type.lower()}-{position}"
            self._prepared = copy
        return self._prepared

    def _ranges(self, job: MakeJob) -> dict[str, tuple[float, float]]:
        if self._collector is None:
            self._collector = collect_ranges(self._ready(), self._samples)
        return self._collector.percentiles() if job.calibration == "percentile" else self._collector.extremes()

    def _shifts(self) -> Mapping[str, Array]:
        """Shift of the mean of each output channel by rounding the weights, by node."""
        assert self._collector is not None
        if self._shift_of is None:
            self._shift_of = output_shifts(self._ready(), self._collector.channel_means())
        return self._shift_of

    def _result(
        self, model: onnx.ModelProto, layers: tuple[str, ...], without_kernel: tuple[str, ...] = ()
    ) -> MakeResult:
        tools = {name: version(name) for name in ("onnx", "onnxruntime")}
        return MakeResult(layers=layers, without_kernel=without_kernel, opset=_opset(model), tools=tools)


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


def _opset(model: onnx.ModelProto) -> int:
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
