"""Turns an ONNX file into a prepared model: checked, free dimensions bound, optimised once, with its layers and tensors
known.

The prepared model is what is stored, measured and cut: onnxruntime's BASIC optimisation is done here and never again,
so that its slices give the whole model's results bit for bit. The file is untrusted: onnxruntime loads it in a child
process only (`optimise`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import onnx

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.input_spec import FRAME, INPUT_LAYER, PCM16_BYTES, InputSpec
from edgesplit.release.fingerprint import Fingerprint
from edgesplit.release.manifest import FileName, Kernels, SliceFormat, TensorSpec
from edgesplit_partitioner.ir.chunking import Bytes, Data
from edgesplit_partitioner.ir.graph import Layer, LayerGraph, Tensor
from edgesplit_partitioner.ir.hints import NO_HINTS, Hints
from edgesplit_partitioner.ir.pictures import picture_bytes
from edgesplit_partitioner.ir.prepared_model import Boundary, PreparedModel, check_tensor_sizes
from edgesplit_partitioner.ir.tensor_types import TensorType
from edgesplit_partitioner.onnx_format import archive, layers, optimise, validate
from edgesplit_partitioner.onnx_format.fingerprint import onnx_fingerprint
from edgesplit_partitioner.onnx_format.hints import hints_of
from edgesplit_partitioner.onnx_format.operator_work import input_work
from edgesplit_partitioner.onnx_format.slices import onnx_slice_files


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """An ONNX model that can be measured, planned and cut: a `PreparedModel`."""

    proto: onnx.ModelProto
    """The optimised model. Read-only."""
    weights: Data
    """The data file with the large weights, which models above 2 GB must have; empty for most models."""
    message: bytes
    """`proto` serialised; preparing the same file twice gives the same bytes."""
    types: Mapping[str, TensorType]
    """Type of every tensor by name, including those inside layers."""
    graph: LayerGraph
    """The layer graph, without an input layer."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    hints: Hints = NO_HINTS

    @property
    def raw(self) -> bytes:
        """The whole model: its message, or the archive of that and its data file. An archive is built anew at each
        call."""
        return archive.to_bytes(*self.message_and_data) if self.weights else self.message

    @property
    def message_and_data(self) -> tuple[bytes, dict[str, Data]]:
        """The message, and the data file by its name where there is one."""
        return self.message, {optimise.WEIGHTS_FILE: self.weights} if self.weights else {}

    @property
    def format(self) -> SliceFormat:
        """Format of the model's slices."""
        return "onnx"

    @property
    def kernels(self) -> Kernels:
        """Always `default`: onnxruntime runs a slice exactly as it runs the whole."""
        return "default"

    def slice_files(
        self, members: Sequence[Layer], boundary: Boundary, shared: Collection[str]
    ) -> dict[FileName, list[Bytes]]:
        """The chunks of `graph.onnx`, and of `weights.bin` where the slice has weights large enough for a file of their
        own."""
        return onnx_slice_files(self.proto, self.weights, members, boundary, shared)

    def fingerprint(self, graph: LayerGraph) -> Fingerprint | None:
        """The model's fingerprint with the layers of `graph`: digests of operators, weights and declarations as slices
        hold them."""
        return onnx_fingerprint(self.proto, self.weights, graph)


def prepare_model(raw: Data, bindings: Mapping[str, int] | None = None) -> OnnxModel:
    """The model in `raw`, ready to be cut; ModelRefused says what is wrong with it and what to do instead.

    `bindings` gives free dimensions their lengths, by name (`batch`) or by input and axis (`images:0`), and gives
    inputs that are a single integer (`sr`) a constant value.
    """
    model, data, batches = settled_model(raw, bindings)
    hints = hints_of(model, batches)
    integer_inputs = [value.name for value in validate.integer_inputs(model.graph)]
    try:
        optimised, types, weights = optimise.optimise(model, data)
    except ModelRefused as refusal:
        advice = ""
        if integer_inputs and validate.has_branches(model.graph):
            advice = (
                f"; an input that decides a branch may be given its value for good: --bind {integer_inputs[0]}=VALUE"
            )
        if not bindings:
            raise ModelRefused(f"{refusal}{advice}") from refusal
        options = " ".join(f"--bind {name}={length}" for name, length in bindings.items())
        raise ModelRefused(f"with {options}: {refusal}{advice}") from refusal
    return replace(_prepared(optimised, types, weights), hints=hints)


def settled_model(
    raw: Data, bindings: Mapping[str, int] | None = None
) -> tuple[onnx.ModelProto, Mapping[str, memoryview], Mapping[str, int]]:
    """The checked model with the length of every dimension settled, not optimised; its data files by name; and the
    batches of one that nobody asked for. ModelRefused says what is wrong with it."""
    message, data = archive.unpack(raw) if archive.is_archive(raw) else (raw[:], {})
    model = validate.read_model(message, data)
    validate.drop_initializer_inputs(model)
    if validate.has_foreign_operators(model) or validate.may_be_too_new(model):
        # Before lengths are asked for: no length makes an operator known, or a file older.
        optimise.check_runtime(model, data)
    lengths = validate.bind_values(model.graph, bindings or {})
    if len(lengths) < len(bindings or {}) and validate.has_branches(model.graph) and not data:
        model = optimise.fold_constants(
            model
        )  # before lengths are settled: in the branch not taken they may make no sense
    batches = validate.bind_shapes(model.graph, lengths)
    return model, data, batches


def _prepared(model: onnx.ModelProto, types: Mapping[str, TensorType], weights: Data) -> OnnxModel:
    """The prepared model of an optimised one; ModelRefused where an output is no tensor of numbers, or is too large for
    a request."""
    for output in model.graph.output:
        if not types[output.name].datatype:
            raise ModelRefused(
                f"the output {output.name[:80]!r} is not a tensor of numbers; only those can be sent back"
            )
    inputs = tuple(_spec(value.name, types) for value in model.graph.input)
    outputs = tuple(_spec(value.name, types) for value in model.graph.output)
    check_tensor_sizes((*inputs, *outputs), types)
    return OnnxModel(
        proto=model,
        weights=weights,
        message=model.SerializeToString(deterministic=True),
        types=types,
        graph=layers.layer_graph(model, types),
        inputs=inputs,
        outputs=outputs,
    )


def _spec(name: str, types: Mapping[str, TensorType]) -> TensorSpec:
    return TensorSpec(name, types[name].datatype, types[name].shape)


def with_input_layer(model: PreparedModel, spec: InputSpec) -> tuple[LayerGraph, InputSpec]:
    """The layer graph extended by an input layer that decodes the camera's or microphone's bytes, and the spec with the
    tensor that it feeds filled in.

    ModelRefused where the decoded tensor is not what the model's input takes; UsageError where the spec names an input
    that the model does not have.
    """
    fitted = (
        _fit_sound(_sound_input(model, spec), spec)
        if spec.is_sound
        else _fit_picture(_picture_input(model, spec), spec)
    )
    graph = model.graph
    if FRAME in model.types:
        raise ModelRefused(
            f"the model has a tensor called {FRAME!r}, which is the input spec's name for what arrives; rename it"
        )
    frame = Tensor(FRAME, "UINT8", (-1,), frame_bytes(fitted))
    layer = Layer(
        name=INPUT_LAYER,
        nodes=(),
        reads=(FRAME,),
        writes=(fitted.tensor,),
        weights=(),
        weight_bytes=0,
        work=(input_work(fitted),),
    )
    extended = replace(
        graph,
        layers=(layer, *graph.layers),
        tensors={FRAME: frame, **graph.tensors},
        inputs=tuple(FRAME if name == fitted.tensor else name for name in graph.inputs),
        raw_tensors=graph.raw_tensors | {FRAME},
    )
    return extended, fitted


def frame_bytes(spec: InputSpec) -> int:
    """Size of one frame in bytes: exact for sound and raw frames, typical for encoded pictures."""
    return PCM16_BYTES * spec.samples if spec.is_sound else picture_bytes(spec)


def _picture_input(model: PreparedModel, spec: InputSpec) -> TensorSpec:
    """The model's input that takes the picture: the one that the spec names, else the only one with four dimensions."""
    if spec.tensor:
        return _named_input(model, spec.tensor)
    pictures = [spec for spec in model.inputs if len(spec.shape) == 4]
    if len(pictures) != 1:
        listed = ", ".join(_describe(spec) for spec in model.inputs)
        raise ModelRefused(
            f"the input spec needs one input that takes a picture (four dimensions); the model has {listed}"
        )
    return pictures[0]


def _sound_input(model: PreparedModel, spec: InputSpec) -> TensorSpec:
    """The model's input that takes the sound: the one that the spec names, else the only FP32 input of 1xN, where N is
    the spec's number of samples if it gives one."""
    if spec.tensor:
        return _named_input(model, spec.tensor)
    candidates = [
        spec
        for spec in model.inputs
        if spec.datatype == "FP32" and spec.shape and set(spec.shape[:-1]) <= {1} and spec.shape[-1] > 1
    ]
    matching = [row for row in candidates if spec.samples in (0, row.shape[-1])]
    if len(matching) != 1:
        listed = ", ".join(_describe(spec) for spec in model.inputs)
        wanted = f"{spec.samples} samples of sound" if spec.samples else "a row of sound"
        hint = "; say how many samples a frame has, as in 16k 512" if len(matching) > 1 else ""
        raise ModelRefused(
            f"the input spec needs one input that takes {wanted} (FP32, 1xN); the model has {listed}{hint}"
        )
    return matching[0]


def _fit_sound(input_: TensorSpec, spec: InputSpec) -> InputSpec:
    """The spec with the input's name, length and rank; ModelRefused where they do not agree."""
    samples = input_.shape[-1] if input_.shape else 0
    if input_.datatype != "FP32" or samples < 1 or set(input_.shape[:-1]) - {1} or spec.samples not in (0, samples):
        wanted = spec.samples or "N"
        raise ModelRefused(f"the input spec makes FP32 of 1x{wanted}, but the model takes {_describe(input_)}")
    return msgspec.structs.replace(spec, tensor=input_.name, samples=samples, rank=len(input_.shape))


def _named_input(model: PreparedModel, name: str) -> TensorSpec:
    for input_ in model.inputs:
        if input_.name == name:
            return input_
    raise UsageError(f"the input spec feeds {name!r}; the model's inputs are {[spec.name for spec in model.inputs]}")


def _fit_picture(input_: TensorSpec, spec: InputSpec) -> InputSpec:
    """The spec with the input's name and size; ModelRefused, with the words of a spec that would fit, where they do not
    agree."""
    channels_at, height_at, width_at = (1, 2, 3) if spec.layout == "nchw" else (3, 1, 2)
    if len(input_.shape) != 4 or input_.shape[0] != 1 or input_.shape[channels_at] != spec.channels:
        made = "1xCHANNELSxHEIGHTxWIDTH" if spec.layout == "nchw" else "1xHEIGHTxWIDTHxCHANNELS"
        raise ModelRefused(
            f"the input spec ({spec.colour} {spec.layout}) makes {made} of {spec.channels} channels,"
            f" but the model takes {_describe(input_)}{_advice(input_)}"
        )
    if input_.datatype != spec.datatype:
        advice = {
            "FP32": f"; leave out the word {spec.datatype.lower()}",
            **{datatype: f"; add the word {datatype.lower()}" for datatype in ("UINT8", "INT8", "FP16")},
        }.get(input_.datatype, "")
        raise ModelRefused(f"the input spec makes {spec.datatype}, but the model takes {_describe(input_)}{advice}")
    for name, values in (("mean", spec.mean), ("std", spec.std)):
        if len(values) not in (1, spec.channels):
            raise ModelRefused(f"the input spec gives {len(values)} values of {name} for {spec.channels} channel(s)")
    return msgspec.structs.replace(
        spec, tensor=input_.name, tensor_width=input_.shape[width_at], tensor_height=input_.shape[height_at]
    )


def _advice(input_: TensorSpec) -> str:
    """The words of an input spec that would fit this input; empty where none would."""
    if len(input_.shape) != 4 or input_.shape[0] != 1:
        return ""
    for layout, channels in (("nchw", input_.shape[1]), ("nhwc", input_.shape[3])):
        if channels in (1, 3):
            return f"; try {'gray' if channels == 1 else 'rgb or bgr'}, {layout}"
    return ""


def _describe(input_: TensorSpec) -> str:
    return f"{input_.name} ({input_.datatype} {'x'.join(str(length) for length in input_.shape) or 'scalar'})"
