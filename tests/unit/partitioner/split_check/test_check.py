"""`check_model`: every boundary is checked, each verdict is true, and a crash of the runtime is a result too."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from edgesplit.errors import Interrupted, ModelRefused, UsageError
from edgesplit.input_spec import parse_input_spec
from edgesplit.plan import CUT_NAME_SEPARATOR, Row
from edgesplit.release.manifest import FileName
from edgesplit_partitioner.ir.graph import Layer
from edgesplit_partitioner.ir.prepared_model import Boundary
from edgesplit_partitioner.onnx_format.model import OnnxModel, prepare_model, with_input_layer
from edgesplit_partitioner.profiling.layers import synthetic_frame
from edgesplit_partitioner.split_check import check
from edgesplit_partitioner.split_check.check import check_model, cuts_to_check
from edgesplit_partitioner.split_check.child import Difference, difference, relative_error, worse
from support import onnx_models as tiny

CRASHING_CHILD = """
import os, sys
from pathlib import Path
from edgesplit_partitioner.split_check import child
run_job = child.run_job
def run_or_crash(folder, job, samples):
    if {when}:
        os.kill(os.getpid(), {signal})
    return run_job(folder, job, samples)
child.run_job = run_or_crash
child.main(Path(sys.argv[1]))
"""
"""A child process that ends by a signal at some of its jobs."""


@pytest.fixture
def crash_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the child processes end by a signal at the jobs for which an expression holds."""

    def arrange(when: str, signal: int = 9) -> None:
        (tmp_path / "crashing_child.py").write_text(CRASHING_CHILD.format(when=when, signal=signal))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(check, "CHILD", "crashing_child")

    return arrange


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_boundary_of_a_sound_model_is_exact(name: str) -> None:
    """All cuts in layer order, the all-remote one first, answer bit for bit like the whole."""
    model = tiny.prepared(name)
    report = check_model(model, model.graph, jobs=2)
    last_layers = [cut.split_after.split(CUT_NAME_SEPARATOR)[-1] for cut in report.cuts]
    assert last_layers == ["", *(layer.name for layer in model.graph.layers[:-1])]
    assert {cut.verdict for cut in report.cuts} == {"exact"}
    assert report.is_safe and report.steady
    assert report.is_safe_fast == (name != "quantised")  # fused QDQ rounds a step otherwise in fast mode, and is told


REASONS = {
    "chain": ("stem/Conv", "fused group.*Conv, Sigmoid, Mul"),
    "looped": ("rounds", "Loop runs as one"),
    "sequences": ("s", "no tensor of numbers"),
    "quantised": ("first", "QuantizeLinear.*int8"),
}


@pytest.mark.parametrize("name", REASONS)
def test_an_impossible_cut_is_reported_with_its_reason(name: str) -> None:
    """Fused groups, control flow, untransportable values and quantisation each have their own text."""
    model = tiny.prepared(name)
    wanted, why = REASONS[name]
    inside = check_model(model, model.graph, jobs=1).inside
    told = [layer.reason for layer in inside if wanted.lower() in layer.layer.lower() or wanted in layer.operators]
    assert told and any(re.search(why, message) for message in told), inside


def test_a_data_dependent_length_is_reported_and_cut() -> None:
    """NonZero's result crosses exactly, and the report marks its length as open."""
    model = tiny.prepared("counting")
    cuts = check_model(model, model.graph, jobs=1).cuts
    assert [cut.verdict for cut in cuts if cut.open_lengths] == ["exact"] * sum(cut.open_lengths for cut in cuts)
    assert any(cut.open_lengths for cut in cuts)


@dataclass(frozen=True, slots=True)
class WrongSlicesModel(OnnxModel):
    """A model whose slices, where they begin inside, compute something else."""

    def slice_files(
        self, members: Sequence[Layer], boundary: Boundary, shared: Collection[str]
    ) -> dict[FileName, list[bytes]]:
        files = OnnxModel.slice_files(self, members, boundary, shared)
        if members[0].name == self.graph.layers[0].name:
            return files
        proto = onnx.load_model_from_string(b"".join(files["graph.onnx"]))
        for node in list(proto.graph.node):
            for place, name in enumerate(node.output):
                if name == self.outputs[0].name:
                    node.output[place] = f"{name}/right"
                    proto.graph.node.append(helper.make_node("Sqrt", [f"{name}/right"], [name]))
                    break
        return {**files, "graph.onnx": [proto.SerializeToString()]}


def test_a_half_with_wrong_outputs_is_detected() -> None:
    """Off by a constant at every cut but the one whose only slice is the whole model."""
    sound = tiny.prepared("chain")
    assert isinstance(sound, OnnxModel)
    spoilt = WrongSlicesModel(**{field_.name: getattr(sound, field_.name) for field_ in fields(sound) if field_.init})
    report = check_model(spoilt, spoilt.graph, jobs=2)
    assert [cut.verdict for cut in report.cuts] == ["exact"] + ["off"] * (len(report.cuts) - 1)
    assert not report.is_safe
    assert all(cut.error is not None and cut.error > 1e-5 and "probabilities" in cut.reason for cut in report.cuts[1:])


def test_a_nondeterministic_model_is_not_blamed_on_its_cuts() -> None:
    """A model that never answers the same twice is reported as unsteady."""
    raw = tiny.build(
        [
            helper.make_node("RandomNormalLike", ["x"], ["r"]),
            helper.make_node("Tanh", ["r"], ["t"]),
            helper.make_node("Add", ["x", "t"], ["y"]),
        ],
        [tiny.value("x", [4])],
        [tiny.value("y", [4])],
    )
    model = prepare_model(raw)
    report = check_model(model, model.graph, jobs=1)
    assert not report.steady and not report.is_safe


def test_a_cut_that_crashes_the_runtime_is_refused_alone(crash_when: Callable[..., None]) -> None:
    """The child crashes at one cut; it is refused with the signal, and all others are tried."""
    crash_when("job.folder == 'cut-2'")
    model = tiny.prepared("chain")
    report = check_model(model, model.graph, jobs=2)
    verdicts = [cut.verdict for cut in report.cuts]
    assert verdicts[2] == "refused" and "SIGKILL" in report.cuts[2].reason
    assert verdicts[:2] + verdicts[3:] == ["exact"] * (len(verdicts) - 1)
    assert not report.is_safe


def test_an_interrupted_check_blames_no_cut(crash_when: Callable[..., None]) -> None:
    """Ctrl-C reaches the child processes too: that is no crash at a cut."""
    crash_when("job.folder == 'cut-2'", signal=15)
    model = tiny.prepared("chain")
    with pytest.raises(Interrupted, match="SIGTERM"):
        check_model(model, model.graph, jobs=1)


def test_a_model_that_crashes_the_runtime_is_refused(crash_when: Callable[..., None]) -> None:
    """Where the whole model does not run there is nothing to compare with."""
    crash_when("job.folder == 'whole'")
    model = tiny.prepared("chain")
    with pytest.raises(ModelRefused, match="the whole model does not run: the runtime crashed"):
        check_model(model, model.graph)


def test_a_check_stops_after_many_consecutive_crashes(crash_when: Callable[..., None]) -> None:
    """A runtime that crashes at every cut is not started two hundred times."""
    crash_when("job.folder != 'whole'")
    model = tiny.prepared("chain")
    report = check_model(model, model.graph, jobs=1, max_crashes=2)
    assert {cut.verdict for cut in report.cuts} == {"refused"}
    assert sum("SIGKILL" in cut.reason for cut in report.cuts) == 2
    assert sum("not tried" in cut.reason for cut in report.cuts) == len(report.cuts) - 2


@dataclass(frozen=True, slots=True)
class Unsliceable(OnnxModel):
    """A model of which no slice can be made that ends before its last layer and begins at its first."""

    def slice_files(
        self, members: Sequence[Layer], boundary: Boundary, shared: Collection[str]
    ) -> dict[FileName, list[bytes]]:
        if 1 < len(members) < len(self.graph.layers) - 1 and members[0].name == self.graph.layers[0].name:
            raise ModelRefused("this cut cannot be made")
        return OnnxModel.slice_files(self, members, boundary, shared)


def test_cuts_that_could_not_be_made_were_counted_as_crashes(crash_when: Callable[..., None]) -> None:
    """After one crash come cuts whose slices cannot be made: nothing ran, so the cut after them is still tried."""
    crash_when("job.folder == 'cut-1'")
    sound = tiny.prepared("chain")
    assert isinstance(sound, OnnxModel)
    model = Unsliceable(**{field_.name: getattr(sound, field_.name) for field_ in fields(sound) if field_.init})
    report = check_model(model, model.graph, jobs=1, max_crashes=2)
    assert "SIGKILL" in report.cuts[1].reason and report.cuts[-1].verdict == "exact"
    assert {cut.reason for cut in report.cuts[2:-1]} == {"this cut cannot be made"}


def test_cuts_of_a_table_are_checked_too() -> None:
    """A closed set that is no prefix comes from a plan's row, under its name; prefixes are not checked twice."""
    model = tiny.prepared("branches")
    names = [layer.name for layer in model.graph.layers]
    aside = next(
        frozenset(names[:count]) - {names[count - 2]}
        for count in range(3, len(names))
        if not set(model.graph.layer(names[count - 1]).reads) & set(model.graph.layer(names[count - 2]).writes)
    )
    rows = [Row(name="remote"), Row(name="cut-1", layers=tuple(aside)), Row(name="local", layers=tuple(names))]
    assert [cut_.name for cut_ in cuts_to_check(model.graph, rows)] == [""] * len(names) + ["cut-1"]
    report = check_model(model, model.graph, rows=rows, jobs=1)
    assert report.cuts[-1].name == "cut-1" and report.cuts[-1].verdict == "exact"


def test_frame_models_are_checked_from_the_input_layer() -> None:
    """With an input spec the input layer is the first boundary; samples replace the generated frame."""
    model = tiny.prepared("chain")
    graph, spec = with_input_layer(model, parse_input_spec("image/jpeg 64x48 scale=1/255"))
    report = check_model(model, graph, spec, samples=[synthetic_frame(spec, 3), synthetic_frame(spec, 4)], jobs=2)
    assert report.inputs == "2 samples"
    assert [cut.split_after for cut in report.cuts[:2]] == ["", "input"]
    assert {cut.verdict for cut in report.cuts} == {"exact"}
    assert report.cuts[0].sends == ("frame",)


def test_samples_must_match_the_models_input() -> None:
    """Frames for a model without an input spec, tensors for one with it."""
    model = tiny.prepared("chain")
    with pytest.raises(UsageError, match="no input spec"):
        check_model(model, model.graph, samples=[b"jpeg"])
    graph, spec = with_input_layer(model, parse_input_spec("image/jpeg 64x48 scale=1/255"))
    with pytest.raises(UsageError, match="takes frames"):
        check_model(model, graph, spec, samples=[{"image": np.zeros((1, 3, 16, 16), np.float32)}])


@pytest.mark.parametrize(
    ("left", "right", "error"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([0.0], [0.0], 0.0),
        ([-0.0], [0.0], 0.0),
        ([1.0], [0.0], None),
        ([np.nan, 1.0], [np.nan, 1.0], 0.0),
        ([np.nan], [1.0], None),
        ([1.0], [np.nan], None),
        ([np.inf, 1.0], [np.inf, 2.0], 0.5),
        ([-np.inf], [np.inf], None),
        ([], [], 0.0),
    ],
)
def test_relative_error_is_of_the_largest_finite_value(
    left: list[float], right: list[float], error: float | None
) -> None:
    """A NaN on one side alone makes the outputs incomparable."""
    assert relative_error(np.array(left), np.array(right)) == error


def test_differences_name_the_worst_output() -> None:
    """The larger error wins, an incomparable output wins over all, and bits that differ by sign alone are detected."""
    whole = {"a": np.array([1.0, 2.0]), "b": np.array([0.0])}
    assert difference(whole, whole) == Difference(True)
    assert difference({**whole, "b": np.array([-0.0])}, whole) == Difference(False, 0.0, "b")
    assert difference({"a": np.array([1.0, 2.5]), "b": np.array([1.0])}, whole) == Difference(False, None, "b")
    assert difference({"a": np.array([1.0])}, whole).error is None
    assert worse(Difference(True), Difference(False, 0.0, "b")).worst == "b"
