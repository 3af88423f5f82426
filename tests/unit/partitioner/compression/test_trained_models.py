"""Trained models of both formats pass the gate in int8, at about a quarter of their size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgesplit.answers.answer_rule import infer_answer_rule
from edgesplit_partitioner.compression.compress import compress
from edgesplit_partitioner.compression.gate import GateTerms
from edgesplit_partitioner.model_loader import prepare_model
from support.onnx_models import Array
from support.reference_models import reference_file

# 50 samples are stored for each: 25 confirm, which is enough for 80 %.
TERMS = GateTerms(least_agreement=0.8)


def mnist() -> list[Array]:
    """Digits, as the model takes them."""
    with np.load(reference_file("inputs", "mnist_50.npz"), allow_pickle=False) as stored:
        return [image.astype(np.float32)[None, None] for image in stored["images"]]


def cifar() -> list[Array]:
    """Pictures, as the model takes them."""
    with np.load(reference_file("inputs", "cifar10_50.npz"), allow_pickle=False) as stored:
        return [image.astype(np.float32)[None] for image in stored["images"]]


@pytest.mark.parametrize(
    ("name", "samples", "most"),
    [("mnist_cnn.onnx", mnist, 0.45), ("resnet8_cifar10_float.tflite", cifar, 0.30)],
)
def test_a_trained_model_passes_in_int8(name: str, samples: object, most: float, tmp_path: Path) -> None:
    """The ONNX one is of an operator set without scales per channel, the TFLite one has residual branches. Of the
    6,000 weights of the ONNX one a good part of the file is not made."""
    path = reference_file("models", name)
    model = prepare_model(path.read_bytes())
    rule = infer_answer_rule(model.outputs)
    assert rule is not None and callable(samples)
    given = [{model.inputs[0].name: sample} for sample in samples()]
    result = compress(path, "int8", given, rule, TERMS, out_folder=tmp_path)
    assert result.verdict.passed, result.verdict.sentence
    assert result.variant_bytes <= most * result.base_bytes
    assert result.path is not None
    variant = prepare_model(result.path.read_bytes())
    assert variant.inputs == model.inputs
    assert len(variant.graph.layers) > 5
