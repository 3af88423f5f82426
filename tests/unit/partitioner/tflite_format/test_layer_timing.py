"""Measuring TFLite models: every layer is timed alone, every tensor weighed. No time that was taken is asserted."""

from __future__ import annotations

import pytest

from edgesplit.errors import ModelRefused, UsageError
from edgesplit_partitioner.ir.graph import Layer, LayerGraph
from edgesplit_partitioner.profiling.layers import measure_layers, measure_samples
from edgesplit_partitioner.tflite_format.flatbuffer import EDGE_TPU_OPERATOR
from edgesplit_partitioner.tflite_format.model import prepare_model
from support import tflite_models


@pytest.mark.parametrize("name", ["chain", "looped", "quantised", "counting"])
def test_every_layer_gets_its_time(name: str) -> None:
    """Each layer is timed on what it really reads, and progress counts them."""
    model = tflite_models.prepared(name)
    heard: list[tuple[int, int]] = []
    times = measure_layers(model, model.graph, runs=3, warmup=1, progress=lambda done, all_: heard.append((done, all_)))

    assert list(times) == [layer.name for layer in model.graph.layers]
    assert all(0 <= time.median_s <= time.p95_s for time in times.values())
    assert heard == [(step, len(times)) for step in range(1, len(times) + 1)]


def test_tensors_are_weighed_on_samples() -> None:
    """Every tensor between layers has its raw size and a compressed one; int8 is a byte each."""
    model = tflite_models.prepared("quantised")
    samples = measure_samples(model, model.graph, samples=[tflite_models.feeds_of(model)])

    assert set(samples.tensors) == {"x", "q0", "q1", "q2", "y"}
    assert samples.tensors["q1"].bytes == 144 and samples.tensors["y"].bytes == 576
    assert samples.tensors["q1"].codecs["raw+zstd"].bytes > 0


def test_a_graph_of_another_model_is_refused() -> None:
    """A layer graph with more operators than the model is a caller's error."""
    model = tflite_models.prepared("branches")
    strange = LayerGraph((Layer("a", (70,), ("x",), ("y",), (), 0, ()),), {}, ("x",), ("y",))
    with pytest.raises(UsageError, match="more operators"):
        measure_layers(model, strange, runs=1)


def test_a_compiled_model_cannot_be_timed_here() -> None:
    """A model compiled for an Edge TPU cannot be timed without one."""
    model = prepare_model(tflite_models.custom(EDGE_TPU_OPERATOR))
    with pytest.raises(ModelRefused, match="compiled for an Edge TPU, and none is here"):
        measure_layers(model, model.graph, runs=1)
