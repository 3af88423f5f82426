"""`edgectl check` over trained models from outside: every boundary exact or within 1e-5, hostile files survived."""

from __future__ import annotations

import pytest

from edgesplit.errors import ModelRefused
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.split_check.check import check_model
from support.reference_models import FOLDER, reference_file

BINDINGS = {
    "silero_vad_16k.onnx": {"batch": 1, "sequence": 576},
    "gesture_mlp.onnx": {"batch": 1},
    "gesture_mlp.tflite": {"input_1:0": 1},
    "silero_vad_if.onnx": {"input:0": 1, "input:1": 576, "state:1": 1},
}
COMPILED = "_edgetpu.tflite"
"""Runs on an Edge TPU alone: refused where there is none."""


def files(kind: str) -> list[str]:
    """Model files of one folder, or one name that says why there are none."""
    found = sorted(path.name for path in (FOLDER / kind).glob("*") if path.suffix in (".onnx", ".tflite"))
    return found or ["none"]


def bytes_of(kind: str, name: str) -> bytes:
    """The file's content, or a skip with the reason."""
    return reference_file(kind, name).read_bytes()


@pytest.mark.parametrize("name", files("models"))
def test_every_boundary_of_a_trained_model_is_exact(name: str) -> None:
    """Each cut in layer order, both halves run as slices run, against the whole; what is not cut has its reason."""
    raw = bytes_of("models", name)
    if name.endswith(COMPILED):
        with pytest.raises(ModelRefused, match="edgetpu"):
            model = prepare_model(raw)
            check_model(model, model.graph)
        return
    model = prepare_model(raw, BINDINGS.get(name, {}))
    report = check_model(model, model.graph)
    assert len(report.cuts) == len(model.graph.layers)
    assert [cut for cut in report.cuts if cut.verdict != "exact"] == []
    assert [cut for cut in report.cuts if cut.fast == "within" and (cut.fast_error or 1.0) > 1e-5] == []
    assert report.is_safe and report.is_safe_fast and report.steady
    assert all(one.reason for one in report.inside)


@pytest.mark.parametrize("name", files("hostile"))
def test_hostile_files_are_refused_or_survived(name: str) -> None:
    """Custom operators, bad quantisation, delegates that refuse: a reason, or every cut exact; no crash of ours."""
    raw = bytes_of("hostile", name)
    try:
        model = prepare_model(raw, BINDINGS.get(name, {}))
        report = check_model(model, model.graph)
    except ModelRefused as refusal:
        assert str(refusal)
        return
    assert report.is_safe
