"""An ONNX file becomes a prepared model: checked, bound, optimised once, with its layers and tensors known.

What is prepared is what is stored, measured and cut: onnxruntime's BASIC optimisation is done here and never again,
so that slices of it give the whole's answers bit for bit. Whoever owns the bytes is trusted with nothing: onnxruntime
meets them in a child process (`optimise`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import onnx

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.inputs import FRAME, INPUT_LAYER, InputSpec
from edgesplit.release import TensorSpec
from edgesplit_partitioner import layers, onnx_file, optimise
from edgesplit_partitioner.graph import Layer, LayerGraph, Tensor
from edgesplit_partitioner.onnx_nodes import TensorType
from edgesplit_partitioner.work import input_work

JPEG_BITS_PER_PIXEL = ((1, 0.15), (30, 0.6), (50, 0.8), (75, 1.2), (85, 1.6), (90, 2.0), (95, 3.0), (100, 6.3))
"""By quality: between the medians of 28 photographs at 320x240 (Pillow, 4:2:0; q85: 1.9) and of one at 640x480 (1.2).
Used only where no sample frames are given."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that can be measured, planned and cut."""

    proto: onnx.ModelProto
    """Optimised. Not to be changed."""
    raw: bytes
    """The same as bytes; two runs over one file give the same."""
    types: Mapping[str, TensorType]
    """Of every tensor, those inside layers too."""
    graph: LayerGraph
    """Without an input layer."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def prepare_model(raw: bytes, bindings: Mapping[str, int] | None = None) -> PreparedModel:
    """The model in `raw`, ready to be cut; ModelRefused says what is wrong with it and what would do.

    `bindings` gives free dimensions their lengths: by name (`batch`) or by place (`images:0`).
    """
    model = onnx_file.read_model(raw)
    onnx_file.drop_initializer_inputs(model)
    onnx_file.bind_shapes(model.graph, bindings or {})
    try:
        optimised, types = optimise.optimise(model)
    except ModelRefused as refusal:
        if not bindings:
            raise
        bound = " ".join(f"--bind {name}={length}" for name, length in bindings.items())
        raise ModelRefused(f"with {bound}: {refusal}") from refusal
    return _prepared(optimised, types)


def _prepared(model: onnx.ModelProto, types: Mapping[str, TensorType]) -> PreparedModel:
    for output in model.graph.output:
        if not types[output.name].datatype:
            raise ModelRefused(
                f"the output {output.name[:80]!r} is not a tensor of numbers; only those can be sent back"
            )
    return PreparedModel(
        proto=model,
        raw=model.SerializeToString(deterministic=True),
        types=types,
        graph=layers.layer_graph(model, types),
        inputs=tuple(_spec(one.name, types) for one in model.graph.input),
        outputs=tuple(_spec(one.name, types) for one in model.graph.output),
    )


def _spec(name: str, types: Mapping[str, TensorType]) -> TensorSpec:
    return TensorSpec(name, types[name].datatype, types[name].shape)


def with_input_layer(model: PreparedModel, spec: InputSpec) -> tuple[LayerGraph, InputSpec]:
    """The layer graph that begins at the camera's bytes, and the spec with the tensor that it feeds filled in.

    ModelRefused where what the spec makes is not what the model's input takes.
    """
    fed = _fit(_fed_input(model, spec), spec)
    graph = model.graph
    if FRAME in model.types:
        raise ModelRefused(f"the model has a tensor called {FRAME!r}, which is the encoded picture's name; rename it")
    frame = Tensor(FRAME, "UINT8", (-1,), jpeg_bytes(fed))
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


def jpeg_bytes(spec: InputSpec) -> int:
    """Typical size of the spec's JPEG frame, for prices before any sample was seen."""
    qualities, bits = zip(*JPEG_BITS_PER_PIXEL, strict=True)
    per_pixel = float(np.interp(spec.quality, qualities, bits))
    return 600 + round(spec.width * spec.height * per_pixel / 8 * (0.8 if spec.colour == "gray" else 1.0))


def _fed_input(model: PreparedModel, spec: InputSpec) -> TensorSpec:
    """The model's input that takes the picture."""
    if spec.tensor:
        for one in model.inputs:
            if one.name == spec.tensor:
                return one
        raise UsageError(
            f"the input spec feeds {spec.tensor!r}; the model's inputs are {[one.name for one in model.inputs]}"
        )
    pictures = [one for one in model.inputs if len(one.shape) == 4]
    if len(pictures) != 1:
        listed = ", ".join(_listed(one) for one in model.inputs)
        raise ModelRefused(
            f"the input spec needs one input that takes a picture (four dimensions); the model has {listed}"
        )
    return pictures[0]


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
