"""An ONNX file becomes a prepared model: checked, bound, optimised once, with its layers and tensors known.

What is prepared is what is stored, measured and cut: onnxruntime's BASIC optimisation is done here and never again,
so that slices of it give the whole's answers bit for bit. Whoever owns the bytes is trusted with nothing: onnxruntime
meets them in a child process (`optimise`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import onnx

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.input_spec import FRAME, INPUT_LAYER, PCM16_BYTES, InputSpec
from edgesplit.release.fingerprint import Anatomy
from edgesplit.release.manifest import FileName, Kernels, SliceFormat, TensorSpec
from edgesplit_partitioner.ir.chunking import Bytes
from edgesplit_partitioner.ir.graph import Layer, LayerGraph, Tensor
from edgesplit_partitioner.ir.prepared_model import Boundary, PreparedModel, refuse_what_cannot_travel
from edgesplit_partitioner.ir.tensor_types import TensorType
from edgesplit_partitioner.onnx_format import archive, layers, optimise, validate
from edgesplit_partitioner.onnx_format.fingerprint import onnx_anatomy
from edgesplit_partitioner.onnx_format.operator_work import input_work
from edgesplit_partitioner.onnx_format.slices import onnx_files

JPEG_BITS_PER_PIXEL = ((1, 0.15), (30, 0.6), (50, 0.8), (75, 1.2), (85, 1.6), (90, 2.0), (95, 3.0), (100, 6.3))
"""By quality: between the medians of 28 photographs at 320x240 (Pillow, 4:2:0; q85: 1.9) and of one at 640x480 (1.2).
Used only where no sample frames are given."""


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """An ONNX model that can be measured, planned and cut: a `PreparedModel`."""

    proto: onnx.ModelProto
    """Optimised. Not to be changed."""
    weights: archive.Data
    """Its data file, where large weights are in one (models above 2 GB must have it so); empty for most models."""
    message: bytes
    """`proto` as bytes; two runs over one file give the same."""
    types: Mapping[str, TensorType]
    """Of every tensor, those inside layers too."""
    graph: LayerGraph
    """Without an input layer."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def raw(self) -> bytes:
        """The whole model: its message, or the bundle of that and its data file, made anew at each call."""
        return archive.joined(*self.parts_of_file) if self.weights else self.message

    @property
    def parts_of_file(self) -> tuple[bytes, dict[str, archive.Data]]:
        """The message, and the data file where there is one."""
        return self.message, {optimise.WEIGHTS: self.weights} if self.weights else {}

    @property
    def format(self) -> SliceFormat:
        """Of its slices."""
        return "onnx"

    @property
    def kernels(self) -> Kernels:
        """onnxruntime has one way of running a slice exactly."""
        return "default"

    def slice_files(
        self, members: Sequence[Layer], boundary: Boundary, shared: Collection[str]
    ) -> dict[FileName, list[Bytes]]:
        """`graph.onnx`, and `weights.bin` where there are weights worth a file."""
        return onnx_files(self.proto, self.weights, members, boundary, shared)

    def anatomy(self, graph: LayerGraph) -> Anatomy | None:
        """By the digests of operators, weights and declarations as slices hold them."""
        return onnx_anatomy(self.proto, self.weights, graph)


def prepare_model(raw: archive.Data, bindings: Mapping[str, int] | None = None) -> OnnxModel:
    """The model in `raw`, ready to be cut; ModelRefused says what is wrong with it and what would do.

    `bindings` gives free dimensions their lengths: by name (`batch`) or by place (`images:0`), and inputs that are one
    whole number (`sr`) their value for good.
    """
    message, data = archive.unpack(raw) if archive.is_bundle(raw) else (raw[:], {})
    model = validate.read_model(message, data)
    validate.drop_initializer_inputs(model)
    lengths = validate.bind_values(model.graph, bindings or {})
    if len(lengths) < len(bindings or {}) and validate.has_branches(model.graph) and not data:
        model = optimise.folded(model)  # before lengths are settled: in the branch not taken they may make no sense
    numbers = [one.name for one in validate.whole_numbers(model.graph)]
    validate.bind_shapes(model.graph, lengths)
    try:
        optimised, types, weights = optimise.optimise(model, data)
    except ModelRefused as refusal:
        advice = ""
        if numbers and validate.has_branches(model.graph):
            advice = f"; an input that decides a branch may be given its value for good: --bind {numbers[0]}=VALUE"
        if not bindings:
            raise ModelRefused(f"{refusal}{advice}") from refusal
        bound = " ".join(f"--bind {name}={length}" for name, length in bindings.items())
        raise ModelRefused(f"with {bound}: {refusal}{advice}") from refusal
    return _prepared(optimised, types, weights)


def _prepared(model: onnx.ModelProto, types: Mapping[str, TensorType], weights: archive.Data) -> OnnxModel:
    for output in model.graph.output:
        if not types[output.name].datatype:
            raise ModelRefused(
                f"the output {output.name[:80]!r} is not a tensor of numbers; only those can be sent back"
            )
    inputs = tuple(_spec(one.name, types) for one in model.graph.input)
    outputs = tuple(_spec(one.name, types) for one in model.graph.output)
    refuse_what_cannot_travel((*inputs, *outputs), types)
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
    """The layer graph that begins at the camera's bytes, and the spec with the tensor that it feeds filled in.

    ModelRefused where what the spec makes is not what the model's input takes.
    """
    fed = _fit_sound(_fed_by_sound(model, spec), spec) if spec.is_sound else _fit(_fed_input(model, spec), spec)
    graph = model.graph
    if FRAME in model.types:
        raise ModelRefused(
            f"the model has a tensor called {FRAME!r}, which is the input spec's name for what arrives; rename it"
        )
    frame = Tensor(FRAME, "UINT8", (-1,), frame_bytes(fed))
    layer = Layer(
        name=INPUT_LAYER,
        nodes=(),
        reads=(FRAME,),
        writes=(fed.tensor,),
        weights=(),
        weight_bytes=0,
        work=(input_work(fed),),
    )
    extended = replace(
        graph,
        layers=(layer, *graph.layers),
        tensors={FRAME: frame, **graph.tensors},
        inputs=tuple(FRAME if name == fed.tensor else name for name in graph.inputs),
        raw=graph.raw | {FRAME},
    )
    return extended, fed


def frame_bytes(spec: InputSpec) -> int:
    """Size of what arrives: exact for sound, typical for pictures."""
    return PCM16_BYTES * spec.samples if spec.is_sound else jpeg_bytes(spec)


def jpeg_bytes(spec: InputSpec) -> int:
    """Typical size of the spec's JPEG frame, for prices before any sample was seen."""
    qualities, bits = zip(*JPEG_BITS_PER_PIXEL, strict=True)
    per_pixel = float(np.interp(spec.quality, qualities, bits))
    return 600 + round(spec.width * spec.height * per_pixel / 8 * (0.8 if spec.colour == "gray" else 1.0))


def _fed_input(model: PreparedModel, spec: InputSpec) -> TensorSpec:
    """The model's input that takes the picture."""
    if spec.tensor:
        return _named_input(model, spec.tensor)
    pictures = [one for one in model.inputs if len(one.shape) == 4]
    if len(pictures) != 1:
        listed = ", ".join(_listed(one) for one in model.inputs)
        raise ModelRefused(
            f"the input spec needs one input that takes a picture (four dimensions); the model has {listed}"
        )
    return pictures[0]


def _fed_by_sound(model: PreparedModel, spec: InputSpec) -> TensorSpec:
    """The model's input that takes the sound: floats in one row, as many as the spec says if it says."""
    if spec.tensor:
        return _named_input(model, spec.tensor)
    rows = [
        one
        for one in model.inputs
        if one.datatype == "FP32" and one.shape and set(one.shape[:-1]) <= {1} and one.shape[-1] > 1
    ]
    fitting = [one for one in rows if spec.samples in (0, one.shape[-1])]
    if len(fitting) != 1:
        listed = ", ".join(_listed(one) for one in model.inputs)
        wanted = f"{spec.samples} samples of sound" if spec.samples else "a row of sound"
        hint = "; say how many samples a frame has, as in 16k 512" if len(fitting) > 1 else ""
        raise ModelRefused(
            f"the input spec needs one input that takes {wanted} (FP32, 1xN); the model has {listed}{hint}"
        )
    return fitting[0]


def _fit_sound(one: TensorSpec, spec: InputSpec) -> InputSpec:
    """The spec with the input's name and length; ModelRefused where they do not agree."""
    samples = one.shape[-1] if one.shape else 0
    if one.datatype != "FP32" or samples < 1 or set(one.shape[:-1]) - {1} or spec.samples not in (0, samples):
        wanted = spec.samples or "N"
        raise ModelRefused(f"the input spec makes FP32 of 1x{wanted}, but the model takes {_listed(one)}")
    return msgspec.structs.replace(spec, tensor=one.name, samples=samples, rank=len(one.shape))


def _named_input(model: PreparedModel, name: str) -> TensorSpec:
    for one in model.inputs:
        if one.name == name:
            return one
    raise UsageError(f"the input spec feeds {name!r}; the model's inputs are {[one.name for one in model.inputs]}")


def _fit(one: TensorSpec, spec: InputSpec) -> InputSpec:
    """The spec with the input's name and size; ModelRefused with the words that would fit."""
    channels_at, height_at, width_at = (1, 2, 3) if spec.layout == "nchw" else (3, 1, 2)
    if len(one.shape) != 4 or one.shape[0] != 1 or one.shape[channels_at] != spec.channels:
        made = "1xCHANNELSxHEIGHTxWIDTH" if spec.layout == "nchw" else "1xHEIGHTxWIDTHxCHANNELS"
        raise ModelRefused(
            f"the input spec ({spec.colour} {spec.layout}) makes {made} of {spec.channels} channels,"
            f" but the model takes {_listed(one)}{_advice(one)}"
        )
    if one.datatype != spec.datatype:
        word = "add" if one.datatype == "UINT8" else "leave out"
        advice = f"; {word} the word uint8" if one.datatype in ("UINT8", "FP32") else ""
        raise ModelRefused(f"the input spec makes {spec.datatype}, but the model takes {_listed(one)}{advice}")
    for name, values in (("mean", spec.mean), ("std", spec.std)):
        if len(values) not in (1, spec.channels):
            raise ModelRefused(f"the input spec gives {len(values)} values of {name} for {spec.channels} channel(s)")
    return msgspec.structs.replace(
        spec, tensor=one.name, tensor_width=one.shape[width_at], tensor_height=one.shape[height_at]
    )


def _advice(one: TensorSpec) -> str:
    """The words of a spec that would fit this input, if some would."""
    if len(one.shape) != 4 or one.shape[0] != 1:
        return ""
    for layout, channels in (("nchw", one.shape[1]), ("nhwc", one.shape[3])):
        if channels in (1, 3):
            return f"; try {'gray' if channels == 1 else 'rgb or bgr'}, {layout}"
    return ""


def _listed(one: TensorSpec) -> str:
    return f"{one.name} ({one.datatype} {'x'.join(str(length) for length in one.shape) or 'scalar'})"
