"""The smaller models of the digits example: the same task, less work, and what the committed figures say of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from edgesplit_partitioner.onnx_format.model import prepare_model
from support import REPOSITORY

FOLDER = REPOSITORY / "examples" / "digits"
STUDENTS = ("student", "pruned")
FIGURES: dict[str, Any] = json.loads((FOLDER / "figures.json").read_text())["students"]


@pytest.fixture(autouse=True)
def example() -> Iterator[None]:
    """The example's scripts, which import each other by name."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def test_students_have_the_whole_models_interface() -> None:
    """The same names, types and shapes in and out, so either answers the other's requests."""
    whole = prepare_model((FOLDER / "digits.onnx").read_bytes())
    for name in STUDENTS:
        student = prepare_model((FOLDER / f"{name}.onnx").read_bytes())
        assert (student.inputs, student.outputs) == (whole.inputs, whole.outputs)


def test_committed_figures_are_those_of_the_committed_files() -> None:
    """Size and work exactly; right and equal answers on frames drawn here, up to one in two hundred for another
    decoder or runtime."""
    from students import compare

    found = compare(FOLDER / "digits.onnx", [FOLDER / f"{name}.onnx" for name in STUDENTS])
    for name in ("digits", *STUDENTS):
        stated, now = FIGURES[name], found[name]
        for figure in ("bytes", "parameters", "mflop", "nodes"):
            assert now[figure] == stated[figure], (name, figure)
        for figure in ("accuracy", "agrees"):
            assert now[figure] == pytest.approx(stated[figure], abs=0.005), (name, figure)
    assert found["digits"]["agrees"] == 1


@pytest.mark.parametrize(("name", "work_part"), [("student", 0.03), ("pruned", 0.2)])
def test_students_are_several_times_cheaper_and_not_blind(name: str, work_part: float) -> None:
    """A share of the whole model's work, and far better than the one in ten that guessing has."""
    assert FIGURES[name]["mflop"] <= work_part * FIGURES["digits"]["mflop"]
    assert FIGURES[name]["accuracy_90"][0] > 0.7


def test_samples_are_enough_for_a_gate_of_one_percent(tmp_path: Path) -> None:
    """230 to choose and 230 to confirm, with labels.json; the same bytes for the same seed, others for another."""
    from samples import DEFAULT_COUNT, samples, write

    assert DEFAULT_COUNT >= 460
    write(tmp_path, count=12, seed=8)
    labels = json.loads((tmp_path / "labels.json").read_text())
    drawn = samples(12, 8)
    assert labels == {f"{number:04}.jpg": label for number, (_, label) in enumerate(drawn)}
    assert [(tmp_path / name).read_bytes() for name in labels] == [jpeg for jpeg, _ in drawn]
    assert samples(1, 9)[0][0] != drawn[0][0]


def test_no_student_graph_has_anything_but_the_whole_models_operators() -> None:
    """What runs the whole model runs the students: no operator of training is left."""
    known = {node.op_type for node in onnx.load(FOLDER / "digits.onnx").graph.node}
    for name in STUDENTS:
        assert {node.op_type for node in onnx.load(FOLDER / f"{name}.onnx").graph.node} <= known
