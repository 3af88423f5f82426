"""Measuring codecs: every float tensor by every codec, with exactly the remote side's outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgesplit.answers.answer_rule import infer_answer_rule, parse_answer_rule
from edgesplit.errors import UsageError
from edgesplit.release import boundary_codecs
from edgesplit_partitioner.costs.model import TensorCost
from edgesplit_partitioner.onnx_format.model import prepare_model
from edgesplit_partitioner.profiling.codec_loss import sample_loss, split_halves
from edgesplit_partitioner.profiling.codecs import (
    CodecMeasurements,
    count_changes,
    measure_codecs,
    with_changes,
    with_codecs,
)

RNG = np.random.default_rng(11)


def diamond(*, ends: str = "y", huge: bool = False) -> bytes:
    """x -> conv -> t, which two branches read; they meet in a sum, a mean and a softmax."""

    def weights(name: str, shape: tuple[int, ...], scale: float = 1.0) -> onnx.TensorProto:
        return numpy_helper.from_array((scale * RNG.standard_normal(shape)).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["t"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["t", "w1"], ["left"]),
        helper.make_node("Conv", ["t", "w2"], ["right"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["left", "right"], ["sum"]),
        helper.make_node("ReduceMean", ["sum"], ["mean"], axes=[2, 3], keepdims=0),
        helper.make_node("Softmax", ["mean"], [ends], axis=1),
    ]
    initializers = [
        weights("w0", (4, 3, 3, 3), 1e6 if huge else 1.0),
        weights("w1", (5, 4, 1, 1), 1e-6 if huge else 1.0),
        weights("w2", (5, 4, 3, 3), 1e-6 if huge else 1.0),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])]
    outputs = [helper.make_tensor_value_info(ends, TensorProto.FLOAT, [1, 5])]
    graph = helper.make_graph(nodes, "diamond", inputs, outputs, initializers)
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )


def samples(count: int) -> list[dict[str, Any]]:
    return [{"x": RNG.standard_normal((1, 3, 16, 16)).astype(np.float32)} for _ in range(count)]


def test_losses_are_those_of_the_model_run_from_the_decoded_tensor() -> None:
    """For the input, whose suffix is the whole model: the very figures that running the whole from it gives."""
    model, given = prepare_model(diamond()), samples(5)

    measured = measure_codecs(model, model.graph, samples=given)

    assert measured.count == 5 and "t" in measured.tensors and "x" in measured.tensors
    session = onnxruntime.InferenceSession(model.raw, providers=["CPUExecutionProvider"])
    for codec, one in measured.tensors["x"].items():
        errors = []
        for sample in given:
            sent = boundary_codecs.encode("x", sample["x"], codec, one.cost.clip)
            back = boundary_codecs.decode_like("x", sent, sample["x"], codec)
            wanted, got = ({"y": session.run(None, {"x": x})[0]} for x in (sample["x"], back))
            errors.append(sample_loss(got, wanted).error)
        for half, figures in zip(split_halves(5), (one.chosen, one.confirmed), strict=True):
            assert figures.error == pytest.approx(np.mean([errors[n] for n in half]), rel=0.05, abs=1e-6)
        assert one.cost.loss == one.chosen.loss and one.cost.confirmed_loss == one.confirmed.loss


def test_codec_sizes_are_the_encoded_bytes() -> None:
    """fp16 halves; int8 and int6 quarter; int4 makes an eighth, companions counted; every codec has its seconds."""
    model = prepare_model(diamond())
    found = measure_codecs(model, model.graph, samples=samples(2)).tensors["t"]

    raw = model.types["t"].bytes
    assert found["fp16"].cost.bytes == raw / 2
    assert raw / 4 < found["int8"].cost.bytes < raw / 4 + 250
    assert found["int6"].cost.bytes == found["int8"].cost.bytes
    assert raw / 8 < found["int4"].cost.bytes < raw / 8 + 250
    for codec, value in found.items():
        for cost in (value.cost, value.packed):
            assert set(cost.encode_s) == set(cost.decode_s) == {"cloud"}
        assert 0 <= value.chosen.error < (0.5 if codec == "int4" else 0.1) and value.chosen.accuracy is None
        assert value.cost.changes is not None and value.cost.changes.choosing_samples == 2
        assert 0 < value.cost.clip <= 1 and (codec == "int4" or value.cost.clip == 1)


def test_a_codec_is_not_offered_for_tensors_out_of_its_range() -> None:
    """Values beyond fp16's largest: those with a scale are offered, fp16 is not."""
    model = prepare_model(diamond(huge=True))

    assert set(measure_codecs(model, model.graph, samples=samples(3)).tensors["t"]) == {"int8", "int6", "int4"}


def test_labels_give_the_accuracy_of_each_half() -> None:
    """With every output as its label the raw model is always right, and int8's accuracy stands beside it."""
    model, given = prepare_model(diamond()), samples(4)
    session = onnxruntime.InferenceSession(model.raw, providers=["CPUExecutionProvider"])
    labels = [int(session.run(None, sample)[0].argmax()) for sample in given]

    one = measure_codecs(model, model.graph, samples=given, labels=labels).tensors["t"]["int8"]

    assert one.chosen.accuracy_raw == one.confirmed.accuracy_raw == 1.0 and one.chosen.accuracy is not None
    with pytest.raises(UsageError, match="3 labels"):
        measure_codecs(model, model.graph, samples=given, labels=[1, 2, 3])


def test_one_sample_offers_no_lossy_codec() -> None:
    """Nor do none, nor a codec name that is taken."""
    model = prepare_model(diamond())
    assert measure_codecs(model, model.graph, samples=samples(1)) == CodecMeasurements()
    assert measure_codecs(model, model.graph) == CodecMeasurements()
    taken = prepare_model(diamond(ends="t:scale"))
    assert "t" not in measure_codecs(taken, taken.graph, samples=samples(2)).tensors


def test_lossy_codecs_are_added_to_the_lossless_ones() -> None:
    """Costs get both, compressed and not; a tensor that has none stays as it was."""
    model = prepare_model(diamond())
    measured = measure_codecs(model, model.graph, samples=samples(2))
    known = {"t": TensorCost(bytes=4096), "other": TensorCost(bytes=4)}

    priced = with_codecs(known, measured)

    assert set(priced["t"].codecs) == {
        codec + packed for codec in boundary_codecs.LOSSY for packed in ("", boundary_codecs.ZSTD_SUFFIX)
    }
    assert priced["other"] == known["other"] and set(priced) == set(known)


def test_changed_answers_are_counted_on_samples_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By codec, the samples whose class differs when the rest runs on what was decoded; in several batches of samples
    where their tensors do not fit on disk at once. The counts that chose stay beside them."""
    model, given = prepare_model(diamond()), samples(7)
    rule = infer_answer_rule(model.outputs)
    assert rule is not None
    costs = with_codecs({"x": TensorCost(bytes=3072)}, measure_codecs(model, model.graph, samples=samples(4)))
    monkeypatch.setattr("edgesplit_partitioner.profiling.codecs.LIVE_BYTES", 1)  # two samples at a time

    counted = count_changes(model, model.graph, costs, rule, samples=given)

    session = onnxruntime.InferenceSession(model.raw, providers=["CPUExecutionProvider"])
    for codec in boundary_codecs.LOSSY:
        clip, changed = costs["x"].codecs[codec].clip, 0
        for sample in given:
            sent = boundary_codecs.encode("x", sample["x"], codec, clip)
            back = boundary_codecs.decode_like("x", sent, sample["x"], codec)
            wanted, got = (session.run(None, {"x": x})[0].argmax() for x in (sample["x"], back))
            changed += int(wanted != got)
        assert counted.tensors["x"][codec] == changed
    assert counted.count == 7 and set(counted.tensors) == {"x"}
    strict = count_changes(model, model.graph, costs, parse_answer_rule("close:0", model.outputs), samples=given)
    assert strict.tensors["x"]["int4"] == 7

    merged = with_changes(costs, counted)["x"].codecs
    for name in ("int4", "int4+zstd"):
        changes = merged[name].changes
        assert changes is not None and (changes.confirmed, changes.confirming_samples) == (
            counted.tensors["x"]["int4"], 7,
        )  # fmt: skip
        assert changes.choosing_samples == 4
