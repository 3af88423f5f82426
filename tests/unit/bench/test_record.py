"""Targets of the benchmarks: met only by what was measured on all that they name."""

from __future__ import annotations

from pathlib import Path

import pytest
from gain_report import targets_of
from predict import MATERIALISED, MODELS, TFLITE, find_models
from record import Target, models_folder
from trained import Skipped, left_out, load_models

BENCH = Path(__file__).parents[3] / "bench"


def test_a_target_measured_on_one_of_twelve_models_was_reported_as_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prediction bench ran on the project's own model, found none of the others, and said "met"."""
    monkeypatch.setenv("EDGESPLIT_MODELS", str(tmp_path))
    missing: list[str] = []
    found = [name for name, _ in find_models(models_folder(), tmp_path, missing)]
    assert found == ["digits"]
    assert [entry.partition(" ")[0] for entry in missing] == [*MODELS, *TFLITE, *MATERIALISED]

    target = Target("median error", 0.01, 0.1, left_out=tuple(missing))
    assert not target.met and target.text().startswith("MISSED median error: 0.01 (<= 0.1); not measured on mnist_cnn")
    assert target.as_json()["left_out"] == missing
    complete = Target("median error", 0.01, 0.1)
    assert complete.met and complete.text() == "met    median error: 0.01 (<= 0.1)"


def test_models_that_are_not_there_are_named_beside_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model with the reason, and the models that were not asked for; not those whose accelerator is missing."""
    monkeypatch.setenv("EDGESPLIT_MODELS", str(tmp_path))
    skipped = [model for model in load_models(1) if isinstance(model, Skipped)]
    missing = left_out([*skipped, Skipped("tpu", "none is here", needs_hardware=True)])
    assert any(entry.startswith("yolox_nano (yolox_nano.onnx is not in ") for entry in missing)
    assert not any(entry.startswith("tpu") for entry in missing)
    for target in targets_of([], missing):
        assert not target.met and "not measured on " in target.text()
    assert left_out((), ["digits"]) == ("models other than digits (not asked for)",)


def test_every_bench_takes_the_models_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`EDGESPLIT_MODELS`, which the tests honour, was ignored by one bench."""
    monkeypatch.setenv("EDGESPLIT_MODELS", str(tmp_path))
    assert models_folder() == tmp_path
    naming = [path.name for path in BENCH.glob("*.py") if '"shared"' in path.read_text("utf-8")]
    assert naming == ["record.py"]
    assert not [path.name for path in BENCH.glob("*.py") if '"shared/models"' in path.read_text("utf-8")]
