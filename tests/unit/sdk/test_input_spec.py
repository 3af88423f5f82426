"""The input spec `audio/pcm16`: its syntax, its decoding, its cost, and the same tensor on both tiers."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from onnx import helper
from PIL import Image

from edgesplit.device_profile import load_profile
from edgesplit.errors import ModelRefused, UsageError
from edgesplit.input_spec import FRAME, INPUT_LAYER, InputSpec, parse_input_spec, prepare, range_warning
from edgesplit_partitioner.costs.build import build_costs
from edgesplit_partitioner.onnx_format.model import OnnxModel, prepare_model, with_input_layer
from edgesplit_partitioner.profiling.layers import measure_input, measure_samples, synthetic_frame
from edgesplit_partitioner.slicing import atoms, cut_slices
from edgesplit_partitioner.split_check.check import check_model
from support import onnx_models as tiny


def listener(*shape: int) -> bytes:
    """Sound and a state in, a score and the state out."""
    node = helper.make_node
    return tiny.build(
        [
            node("Flatten", ["sound"], ["flat"], axis=len(shape) - 1),
            node("MatMul", ["flat", "w"], ["heard"], name="hear"),
            node("Add", ["heard", "state"], ["sum"], name="mix"),
            node("Tanh", ["sum"], ["new_state"], name="squash"),
            node("ReduceMean", ["new_state"], ["score"], name="mean", keepdims=0),
        ],
        [tiny.value("sound", shape), tiny.value("state", [1, 6])],
        [tiny.value("score", []), tiny.value("new_state", [1, 6])],
        [tiny.weight("w", shape[-1], 6)],
    )


def model_of(*shape: int) -> OnnxModel:
    """The same, prepared."""
    return prepare_model(listener(*shape))


@pytest.mark.parametrize(
    ("text", "rate", "samples", "scale"),
    [
        ("audio/pcm16 16k", 16_000, 0, 1 / 32768),
        ("audio/pcm16 44100 512", 44_100, 512, 1 / 32768),
        ("audio/pcm16 22.05k 512 scale=1", 22_050, 512, 1.0),
        ("audio/pcm16 8000Hz scale=1/256", 8_000, 0, 1 / 256),
    ],
)
def test_audio_spec_spellings(text: str, rate: int, samples: int, scale: float) -> None:
    """Rate, then the number of samples of a frame, and a scale other than full scale to 1."""
    spec = parse_input_spec(text)
    assert (spec.is_sound, spec.rate_hz, spec.samples, spec.scale) == (True, rate, samples, scale)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("audio/pcm16", "rate is missing"),
        ("audio/pcm16 fast", "rate is missing"),
        ("audio/pcm16 3", "out of range"),
        ("audio/pcm16 16k 0", "cannot read '0'"),
        ("audio/pcm16 16k 512 q85", "cannot read 'q85'"),
        ("audio/pcm16 16k scale=loud", "not a number"),
        ("audio/mp3 16k", "begins with image/jpeg, .* or audio/pcm16"),
    ],
)
def test_malformed_spec_is_refused_by_name(text: str, why: str) -> None:
    """The error contains the wrong word."""
    with pytest.raises(UsageError, match=why):
        parse_input_spec(text)


def test_samples_are_little_endian_and_scaled() -> None:
    """Full scale becomes 1, in float32, in the model's shape."""
    spec = InputSpec(media="audio/pcm16", rate_hz=16_000, samples=3, scale=1 / 32768, tensor="sound", rank=3)
    made = prepare(spec, bytes([0, 0, 0, 0x80, 0xFF, 0x7F]))
    assert made.dtype == np.float32 and made.shape == (1, 1, 3)
    assert made.ravel().tolist() == [0.0, -1.0, 32767 / 32768]
    with pytest.raises(UsageError, match="3 samples of 16 bits are 6"):
        prepare(spec, b"12345")


@pytest.mark.parametrize("shape", [(1, 32), (1, 1, 32)])
def test_both_tiers_decode_alike(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Wherever the cut lies, the input layer on the device or beyond the link, the answers are bit-identical to the
    whole model's."""
    model = model_of(*shape)
    graph, spec = with_input_layer(model, parse_input_spec("audio/pcm16 16k 32"))
    frame = synthetic_frame(spec)
    state = np.linspace(-1, 1, 6, dtype=np.float32).reshape(1, 6)
    whole = tiny.run_whole(model.raw, {"sound": prepare(spec, frame), "state": state})
    names = [layer.name for layer in graph.layers]
    assert names[0] == INPUT_LAYER
    for count in range(len(names) + 1):
        slices = cut_slices(model, graph, atoms(graph, [frozenset(names[:count])]), spec)
        feeds = {FRAME: np.frombuffer(frame, np.uint8), "state": state}
        assert tiny.same_bits(tiny.run_chain(tmp_path / str(count), model, slices, feeds, spec), whole)


def test_check_covers_every_boundary_of_an_audio_model() -> None:
    """`check` feeds frames of sound."""
    model = model_of(1, 32)
    graph, spec = with_input_layer(model, parse_input_spec("audio/pcm16 16k 32"))
    report = check_model(model, graph, spec, jobs=1)
    assert {cut.verdict for cut in report.cuts} == {"exact"}
    assert report.cuts[0].up_bytes == 64 + 24  # 32 samples of two bytes, and the state


def test_input_cut_costs_the_samples_bytes() -> None:
    """The cut at the input costs two bytes a sample, not four, and decoding is a layer of its own."""
    model = model_of(1, 32)
    graph, spec = with_input_layer(model, parse_input_spec("audio/pcm16 16k 32"))
    assert spec.samples == 32 and graph.tensors[FRAME].bytes == 64 and graph.tensors["sound"].bytes == 128
    measured = measure_samples(model, graph, spec=spec, samples=[synthetic_frame(spec)])
    assert measured.frame_bytes == 64
    times = {layer.name: 1e-4 for layer in graph.layers} | {INPUT_LAYER: measure_input(spec, runs=2).median_s}
    costs = build_costs(
        "sound@1",
        graph,
        profile=load_profile("raspberrypi4"),
        cloud_s=times,
        tensors=measured.tensors,
        frame_bytes=measured.frame_bytes,
    )
    assert costs.inputs[FRAME].bytes == 64
    assert costs.layers[0].name == INPUT_LAYER and costs.layers[0].seconds["device"] > 0


@pytest.mark.parametrize(
    ("text", "shape", "why"),
    [
        ("audio/pcm16 16k 33", (1, 32), "33 samples of sound"),
        ("audio/pcm16 16k 32", (2, 32), "32 samples of sound"),
    ],
)
def test_model_without_an_audio_input_is_refused(text: str, shape: tuple[int, ...], why: str) -> None:
    """The error lists the inputs that it has."""
    with pytest.raises(ModelRefused, match=f"{why}.*sound"):
        with_input_layer(model_of(*shape), parse_input_spec(text))


def test_ambiguous_audio_input_needs_a_length() -> None:
    """Where two inputs might be the sound, the number of samples decides; without it, the spec is refused."""
    node = helper.make_node
    raw = tiny.build(
        [node("Concat", ["a", "b"], ["y"], axis=1)],
        [tiny.value("a", [1, 8]), tiny.value("b", [1, 16])],
        [tiny.value("y", [1, 24])],
    )
    model = prepare_model(raw)
    assert with_input_layer(model, parse_input_spec("audio/pcm16 16k 16"))[1].tensor == "b"
    with pytest.raises(ModelRefused, match=r"one input.*how many samples"):
        with_input_layer(model, parse_input_spec("audio/pcm16 16k"))


def test_spec_round_trips_through_a_manifest() -> None:
    """The input spec of a release is encoded and decoded without loss."""
    _, spec = with_input_layer(model_of(1, 32), parse_input_spec("audio/pcm16 16k 32"))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=InputSpec) == spec
    assert spec.shape == (1, 32)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("image/jpeg 64x48 scale=nan", "not a finite number"),
        ("image/jpeg 64x48 mean=1,inf,2", "not a finite number"),
        ("image/jpeg 64x48 std=1e400", "not a finite number"),
        ("image/jpeg 64x48 scale=0", "a scale of 0"),
        ("image/jpeg 64x48 scale=0/255", "a scale of 0"),
        ("audio/pcm16 16k scale=0", "a scale of 0"),
        ("image/jpeg 64x48 q85 32x24", "'32x24' repeats the height"),
        ("image/jpeg 64x48 rgb bgr", "'bgr' repeats the colour"),
    ],
)
def test_degenerate_spec_is_refused(text: str, said: str) -> None:
    """A scale that is zero or not finite, or a word given twice, was accepted: it is refused before a push."""
    with pytest.raises(UsageError, match=said):
        parse_input_spec(text)


@pytest.mark.parametrize(
    ("spec", "is_usual"),
    [("scale=1/255", True), ("scale=1/255 mean=0.485,0.456,0.406 std=0.229,0.224,0.225", True), ("uint8", True),
     ("mean=127.5 std=127.5", True), ("gray scale=1/127.5 mean=1", True), ("scale=255", False), ("", False),
     ("mean=0.485,0.456,0.406 std=0.229,0.224,0.225", False)],
)  # fmt: skip
def test_values_that_no_model_was_trained_on_are_warned_of(spec: str, is_usual: bool) -> None:
    """By the range that the whole specification gives, not by its words: mean and std may stand in for a scale."""
    assert (range_warning(parse_input_spec(f"image/jpeg 8x8 {spec}")) == "") == is_usual
    assert range_warning(parse_input_spec("audio/pcm16 16k")) == ""


@pytest.mark.parametrize("format_", ["PNG", "BMP", "GIF", "WEBP"])
def test_a_png_was_said_to_be_a_torn_jpeg(format_: str) -> None:
    """Its format is named, and what to do."""
    spec = msgspec.structs.replace(parse_input_spec("image/jpeg 8x8"), tensor="x", tensor_width=8, tensor_height=8)
    Image.new("RGB", (8, 8)).save(content := io.BytesIO(), format_)
    with pytest.raises(UsageError, match=rf"(?i)the frame is a {format_}.* file, and the model was pushed for JPEG"):
        prepare(spec, content.getvalue())
