"""Makes compressed TFLite files with litert-quantizer; runs in `maker`'s child process.

Inputs and outputs stay float32, so that the input spec of the model holds for its variants; quantising and dequantising
are the first and the last operator of the file. Operators that the quantiser has no integer form for stay in float.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import flatbuffers
import numpy as np

from edgesplit.runtime import Tensors
from edgesplit.runtime.tflite import import_litert
from edgesplit_partitioner.compression.bias_correction import Array, output_shift
from edgesplit_partitioner.compression.layer_groups import Operator, layer_groups
from edgesplit_partitioner.compression.maker_job import CannotCompress, MakeJob, MakeResult
from edgesplit_partitioner.compression.ranges import RangeCollector
from edgesplit_partitioner.tflite_format.flatbuffer import ints, operator_name, read_model, schema

INSTALL: Final = "compressing TFLite models needs litert-quantizer: pip install 'edgesplit[compress]'"
IDENTIFIER: Final = b"TFL3"
BITS: Final = 8
QUANTISE: Final = frozenset({"QUANTIZE", "DEQUANTIZE"})
CORRECTED: Final = frozenset({"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"})
"""Operators whose bias is corrected; the last axis of their input counts its channels."""
DATA_MOVEMENT: Final = frozenset(
    {"RESHAPE", "TRANSPOSE", "SQUEEZE", "EXPAND_DIMS", "CAST", "SHAPE", "GATHER", "SLICE", "STRIDED_SLICE", "PACK"}
    | {"UNPACK", "SPLIT", "SPLIT_V", "CONCATENATION", "PAD", "TILE", "RANGE", "FILL"}
)
"""Operators that compute nothing: they run on int8 as on float."""


class TfliteMaker:
    """Makes variants of one model; ranges are measured once, at the first variant that needs them."""

    def __init__(self, given: Path, samples: Sequence[Tensors]) -> None:
        try:
            import litert_quantizer
        except ImportError as error:
            raise CannotCompress(INSTALL) from error
        del litert_quantizer
        self._model = read_model(given.read_bytes())
        self._graph = self._model.subgraphs[0]
        self._names = [tensor.name.decode() for tensor in self._graph.tensors]
        self._constants = {
            name
            for name, tensor in zip(self._names, self._graph.tensors, strict=True)
            if (data := self._model.buffers[tensor.buffer].data) is not None and len(data)
        }
        self._raw = _packed(self._model)
        self._samples = samples
        self._collector: RangeCollector | None = None

    def make(self, job: MakeJob, target: Path) -> MakeResult:
        """Write the variant to `target`; CannotCompress says why there is none."""
        from litert_quantizer import quantizer

        groups = self._groups()
        ranges: Any = self._ranges(job) if job.method == "int8" else None  # of the quantiser's own types
        raw = self._corrected(job, groups) if job.method == "int8" else self._raw
        engine = quantizer.Quantizer(raw, _recipe(job, groups))
        try:
            made = engine.quantize(ranges, enable_progress_bar=False, enable_progress_report=False)
        except (ValueError, RuntimeError, KeyError, NotImplementedError) as error:
            reason = " ".join(str(error).split())[:300]
            raise CannotCompress(f"litert-quantizer cannot apply {job.method}: {reason}") from error
        if made.quantized_model is None:
            raise CannotCompress(f"litert-quantizer made no model by {job.method}")
        model = read_model(bytes(made.quantized_model))
        _restore_names(model, self._graph, self._names)
        target.write_bytes(_packed(model))
        left = float_operators(model) if job.method == "int8" and not job.float_layers and not job.only else ()
        tools = {name: version(name) for name in ("litert-quantizer", "ai-edge-litert")}
        return MakeResult(layers=tuple(groups), without_kernel=left, tools=tools)

    def _groups(self) -> Mapping[str, tuple[str, ...]]:
        """The layers, each with the first output of each of its operators, by which the quantiser knows operators."""
        operators = []
        for operator in self._graph.operators:
            reads = [self._names[index] for index in ints(operator.inputs) if index >= 0]
            writes = tuple(self._names[index] for index in ints(operator.outputs))
            own = tuple(name for name in reads if name not in self._constants)
            has_weights = operator_name(self._model, operator) not in DATA_MOVEMENT and len(own) < len(reads)
            operators.append(Operator(writes[0], has_weights, own, writes))
        return layer_groups(operators)

    def _ranges(self, job: MakeJob) -> dict[str, dict[str, Any]]:
        if self._collector is None:
            self._collector = self._collect()
        found = self._collector.percentiles() if job.calibration == "percentile" else self._collector.extremes()
        rank = {name: len(ints(tensor.shape)) for name, tensor in zip(self._names, self._graph.tensors, strict=True)}
        return {
            name: {"min": np.full((1,) * rank[name], low), "max": np.full((1,) * rank[name], high)}
            for name, (low, high) in found.items()
        }

    def _corrected(self, job: MakeJob, groups: Mapping[str, tuple[str, ...]]) -> bytes:
        """The file with the biases of all operators that the job quantises corrected."""
        assert self._collector is not None
        means = self._collector.channel_means()
        layers = job.only or tuple(layer for layer in groups if layer not in job.float_layers)
        quantised = {name for layer in layers for name in groups[layer]}
        model = read_model(self._raw)
        tensors = model.subgraphs[0].tensors
        for operator in model.subgraphs[0].operators:
            places = ints(operator.inputs)
            kind = operator_name(model, operator)
            if kind not in CORRECTED or self._names[operator.outputs[0]] not in quantised or len(places) < 3:
                continue
            read, weights, bias = (self._names[place] if place >= 0 else "" for place in places[:3])
            if read not in means or not {weights, bias} <= self._constants:
                continue
            shift = _shift(kind, _values(model, tensors[places[1]]), means[read])
            old = _values(model, tensors[places[2]])
            if shift is None or old.size != len(shift):
                continue
            buffer = schema.BufferT()
            buffer.data = np.frombuffer((old.reshape(-1) - shift).astype(np.float32).tobytes(), np.uint8)
            tensors[places[2]] = copy.copy(tensors[places[2]])
            tensors[places[2]].buffer = len(model.buffers)
            model.buffers.append(buffer)
        used = {tensor.buffer for graph in model.subgraphs for tensor in graph.tensors}
        for number in set(range(1, len(model.buffers))) - used:
            model.buffers[number].data = None
        return _packed(model)

    def _collect(self) -> RangeCollector:
        """The ranges of every tensor that is no weight."""
        litert = import_litert()
        interpreter = litert.Interpreter(
            model_content=self._raw, num_threads=1, experimental_preserve_all_tensors=True,
            experimental_op_resolver_type=litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        )  # fmt: skip
        interpreter.allocate_tensors()
        details = [
            detail
            for detail in interpreter.get_tensor_details()
            if detail["dtype"] == np.float32 and detail["name"] in self._names and detail["name"] not in self._constants
        ]
        collector = RangeCollector(
            {
                self._names[operator.inputs[0]]: -1
                for operator in self._graph.operators
                if operator_name(self._model, operator) in CORRECTED
            }
        )
        for sample in self._samples:
            for detail in interpreter.get_input_details():
                interpreter.set_tensor(detail["index"], sample[detail["name"]])
            interpreter.reset_all_variables()
            interpreter.invoke()
            for detail in details:
                collector.add(detail["name"], interpreter.get_tensor(detail["index"]))
        return collector


def float_operators(model: Any) -> tuple[str, ...]:
    """Types of the operators of a quantised model that compute in float."""
    graph = model.subgraphs[0]
    found = set()
    for operator in graph.operators:
        kind = operator_name(model, operator)
        written = [graph.tensors[index].type for index in ints(operator.outputs)]
        if kind not in QUANTISE | DATA_MOVEMENT and schema.TensorType.FLOAT32 in written:
            found.add(kind)
    return tuple(sorted(found))


def _values(model: Any, tensor: Any) -> Array:
    """A float weight."""
    data: Array = np.frombuffer(bytes(model.buffers[tensor.buffer].data), np.float32)
    return data.reshape(ints(tensor.shape))


def _shift(kind: str, weights: Array, means: Array) -> Array | None:
    """`output_shift` for weights as TFLite has them: [out, height, width, in], [1, height, width, out], [out, in]."""
    if kind == "CONV_2D":
        return output_shift(weights.transpose(0, 3, 1, 2), means)
    if kind == "DEPTHWISE_CONV_2D":
        return output_shift(weights.transpose(3, 0, 1, 2), means, len(means))
    return output_shift(weights, means)


def _recipe(job: MakeJob, groups: Mapping[str, tuple[str, ...]]) -> Any:
    """The quantiser's own recipe for the job."""
    from litert_quantizer import qtyping, recipe_manager
    from litert_quantizer.algorithm_manager import AlgorithmName

    every = qtyping.TFLOperationName.ALL_SUPPORTED
    recipe = recipe_manager.RecipeManager()
    for scope in [_scope(groups, job.only)] if job.only else [".*"]:
        if job.method == "int8":
            recipe.add_static_config(scope, every, BITS, BITS)
        elif job.method == "int8-dynamic":
            recipe.add_dynamic_config(scope, every, BITS)
        else:
            half = qtyping.TensorQuantizationConfig(num_bits=16, dtype=qtyping.TensorDataType.FLOAT)
            config = qtyping.OpQuantizationConfig(
                weight_tensor_config=half, compute_precision=qtyping.ComputePrecision.FLOAT, explicit_dequantize=True
            )
            recipe.add_quantization_config(scope, every, config, AlgorithmName.FLOAT_CASTING)
    for border in (qtyping.TFLOperationName.INPUT, qtyping.TFLOperationName.OUTPUT):
        recipe.add_quantization_config(".*", border, algorithm_key=AlgorithmName.NO_QUANTIZE)
    if job.float_layers:
        recipe.add_quantization_config(_scope(groups, job.float_layers), every, algorithm_key=AlgorithmName.NO_QUANTIZE)
    return recipe.get_quantization_recipe()


def _scope(groups: Mapping[str, tuple[str, ...]], layers: Sequence[str]) -> str:
    """The pattern of the operators of these layers: the quantiser searches it in each operator's output names, each
    followed by a semicolon."""
    names = (re.escape(name) for layer in layers for name in groups[layer])
    return rf"^(?:{'|'.join(names)})(?:;|$)"


def _restore_names(model: Any, base: Any, names: Sequence[str]) -> None:
    """Give the variant's outputs the names of the base's, in place: the quantiser renames an output when it puts a
    dequantising operator before it."""
    graph = model.subgraphs[0]
    wanted = [names[index] for index in ints(base.outputs)]
    for index, name in zip(ints(graph.outputs), wanted, strict=True):
        if graph.tensors[index].name.decode() == name:
            continue
        for tensor in graph.tensors:
            if tensor.name.decode() == name:
                tensor.name = f"{name}_quantized".encode()
        graph.tensors[index].name = name.encode()


def _packed(model: Any) -> bytes:
    """The model as a file as the quantiser takes it: with an empty list of signatures, and each operator's code where
    newer readers look for it."""
    model.signatureDefs = []
    for code in model.operatorCodes:
        code.builtinCode = max(code.builtinCode, code.deprecatedBuiltinCode)
    builder = _SharingBuilder(1 << 16)
    builder.Finish(model.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


class _SharingBuilder(flatbuffers.Builder):  # type: ignore[misc]
    """Writes equal vectors once: each channel has a zero point of eight bytes, and all of them are zero."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._vectors: dict[tuple[str, bytes], int] = {}

    def CreateNumpyVector(self, x: Array) -> int:
        """The offset of a vector with these values."""
        key = (x.dtype.str, x.tobytes())
        if key not in self._vectors:
            self._vectors[key] = int(super().CreateNumpyVector(x))
        return self._vectors[key]
