"""Invalid or indivisible TFLite files are refused with the true reason, and none harms the process."""

from __future__ import annotations

import random
from pathlib import Path

import flatbuffers
import pytest

from edgesplit.errors import EdgeError, ModelRefused, UsageError
from edgesplit.input_spec import parse_input_spec
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.onnx_format.model import with_input_layer
from edgesplit_partitioner.tflite_format import trial_run
from edgesplit_partitioner.tflite_format.flatbuffer import EDGE_TPU_OPERATOR, read_model
from edgesplit_partitioner.tflite_format.graph import TfliteGraph
from support import tflite_models

SEED = 5


def test_the_model_format_is_detected_by_content() -> None:
    """A file with the mark TFL3 is prepared as TFLite, whatever its name is."""
    assert prepare_model(tflite_models.chain()).format == "tflite"


def test_every_truncated_file_is_refused() -> None:
    """A file that was cut off is refused while it is read, before LiteRT meets it."""
    raw = tflite_models.chain()
    for length in range(8, len(raw), max(1, len(raw) // 60)):
        try:
            model = read_model(raw[:length])
        except ModelRefused:
            continue
        pytest.fail(f"{length} of {len(raw)} bytes were read as {len(model.buffers)} buffers")


def test_corrupt_bytes_are_parsed_consistently_or_refused() -> None:
    """Whatever bytes are corrupt in the graph, parsing gives a model whose indices are all valid, or a refusal."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for name in ("branches", "looped", "quantised"):
        whole = tflite_models.MODELS[name]()
        for _ in range(200):
            raw = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                raw[rng.randrange(8, len(raw))] = rng.randrange(256)
            try:
                graph = TfliteGraph(read_model(bytes(raw)))
            except ModelRefused:
                continue
            assert len(set(graph.names)) == len(graph.main.tensors)


def test_corrupt_files_never_crash_the_process() -> None:
    """A few corrupt files go all the way to LiteRT: the result is a model or a refusal."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    whole = tflite_models.branches()
    for _ in range(6):
        raw = bytearray(whole)
        for _ in range(3):
            raw[rng.randrange(8, len(raw))] = rng.randrange(256)
        try:
            assert prepare_model(bytes(raw)).graph.layers
        except EdgeError as error:
            print(error)


def test_unknown_custom_operator_is_named() -> None:
    """A custom operator that LiteRT does not have is refused with its name."""
    with pytest.raises(ModelRefused, match="unknown operator 'TakeOver'"):
        prepare_model(tflite_models.custom("TakeOver"))


def test_state_in_the_runtime_is_refused() -> None:
    """A variable that lives in the interpreter cannot be cut: the refusal says what to do."""
    with pytest.raises(ModelRefused, match=r"VAR_HANDLE keeps state inside the runtime.*state as inputs and outputs"):
        prepare_model(tflite_models.state_outside())


def test_compiled_model_is_one_layer() -> None:
    """What was compiled for an Edge TPU is one layer, and LiteRT, which cannot run it here, is not asked."""
    model = prepare_model(tflite_models.custom(EDGE_TPU_OPERATOR))
    assert len(model.graph.layers) == 1
    assert model.graph.layers[0].nodes == (0, 1)


def test_a_model_that_crashes_the_runtime_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the child process does, the model is refused and this process goes on."""
    (tmp_path / "crashing_child.py").write_text("import os; os.kill(os.getpid(), 11)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trial_run, "CHILD", "crashing_child")
    with pytest.raises(ModelRefused, match=r"LiteRT crashed on this model \(SIGSEGV\)"):
        prepare_model(tflite_models.chain())


def test_free_lengths_default_to_the_files_own() -> None:
    """An open dimension has the length that the file runs with; a binding changes it, everywhere inside too."""
    assert tflite_models.prepared("free_batch").inputs[0].shape == (1, 4)
    bound = prepare_model(tflite_models.free_batch(), {"x:0": 3})
    assert [bound.types[name].shape for name in ("x", "h", "y")] == [(3, 4)] * 3


@pytest.mark.parametrize("bindings", [{"y:0": 3}, {"x:1": 3}, {"x:0": 0}])
def test_unknown_or_empty_bindings_are_refused(bindings: dict[str, int]) -> None:
    """A binding of no free dimension is a usage error, and so is a length of 0."""
    with pytest.raises(UsageError, match="--bind"):
        prepare_model(tflite_models.free_batch(), bindings)


def test_input_spec_feeds_an_nhwc_model() -> None:
    """A camera's frame feeds a TFLite model's picture, in its layout."""
    graph, spec = with_input_layer(
        tflite_models.prepared("chain"), parse_input_spec("image/jpeg 64x48 rgb nhwc scale=1/255")
    )
    assert graph.layers[0].writes == ("image",)
    assert (spec.tensor, spec.tensor_width, spec.tensor_height) == ("image", 16, 16)


def test_padded_raw_input_is_still_raw() -> None:
    """Padding only moves the picture; the output of a convolution is no longer raw."""
    assert tflite_models.prepared("chain").graph.raw_tensors == {"image"}


@pytest.mark.parametrize(
    ("operators", "outputs", "reason"),
    [
        ([("COS", "a", "y"), ("TANH", "x", "a")], ["y"], "'a' is read before it is computed"),
        ([("COS", "a", "b"), ("TANH", "b", "a"), ("TANH", "a", "y")], ["y"], "'a' is read before it is computed"),
        ([("COS", "x", "a"), ("TANH", "x", "a"), ("TANH", "a", "y")], ["y"], "'a' is written twice"),
        ([("COS", "x", "a"), ("TANH", "a", "x"), ("TANH", "x", "y")], ["y"], "'x' is written twice"),
        ([("COS", "x", "a")], ["y"], "'y' is computed by no operator"),
    ],
    ids=["later", "circle", "twice", "input", "never"],
)
def test_operators_out_of_order_are_refused(
    operators: list[tuple[str, str, str]], outputs: list[str], reason: str
) -> None:
    """LiteRT would read whatever lies in memory, and a cut would read something else."""
    with pytest.raises(ModelRefused, match=reason):
        prepare_model(tflite_models.ordered(operators, outputs))


def test_state_as_an_output_is_refused() -> None:
    """A variable tensor that the file lists among its outputs belongs to no slice."""
    raw = tflite_models.ordered([("COS", "x", "y")], ["y", "b"], variable="b")
    with pytest.raises(ModelRefused, match="'b' is state that LiteRT keeps"):
        prepare_model(raw)


def test_a_graph_without_tensors_is_refused() -> None:
    """An operator that names tensors of a list that is missing."""
    model = read_model(tflite_models.chain())
    model.subgraphs[0].tensors = None
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    with pytest.raises(ModelRefused, match="uses a tensor that is not there"):
        prepare_model(bytes(builder.Output()))


def test_tensors_larger_than_memory_are_refused() -> None:
    """A shape of 2^60 elements, which LiteRT refuses without a word."""
    model = read_model(tflite_models.free_batch())
    for tensor in model.subgraphs[0].tensors:
        tensor.shape, tensor.shapeSignature = [2**30, 2**30], None
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    with pytest.raises(ModelRefused, match="larger than memory"):
        prepare_model(bytes(builder.Output()))
