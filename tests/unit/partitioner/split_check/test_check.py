"""`check_model`: every boundary is tried, each verdict is true, and what kills the runtime is an answer too."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import numpy as np
import onnx
import pytest
from onnx import helper

from edgesplit.errors import Interrupted, ModelRefused, UsageError
from edgesplit.input_spec import parse_input_spec
from edgesplit.plan import Row
from edgesplit.release.manifest import FileName
from edgesplit_partitioner.ir.graph import Layer
from edgesplit_partitioner.ir.prepared_model import Boundary
from edgesplit_partitioner.onnx_format.model import OnnxModel, prepare_model, with_input_layer
from edgesplit_partitioner.profiling.layers import synthetic_frame
from edgesplit_partitioner.split_check import check
from edgesplit_partitioner.split_check.check import check_model, cuts_to_check, noise, tolerance
from edgesplit_partitioner.split_check.child import Difference, difference, relative_error, worse
from support import onnx_models as tiny

KILLED = (
    sys.executable,
    "-c",
    "import os, sys\n"
    "from pathlib import Path\n"
    "from edgesplit_partitioner.split_check import child as run\n"
    "import msgspec\n"
    "folder = Path(sys.argv[1]); samples = run.load_samples(folder)\n"
    "for line in sys.stdin.buffer:\n"
    "    job = msgspec.json.decode(line, type=run.CheckJob)\n"
    "    if job.folder == 'cut-2': os.kill(os.getpid(), 9)\n"
    "    sys.stdout.buffer.write(msgspec.json.encode(run.run_job(folder, job, samples)) + b'\\n')\n"
    "    sys.stdout.buffer.flush()\n",
)
"""A child whose runtime dies of the third cut."""


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_boundary_of_a_sound_model_is_exact(name: str) -> None:
    """All cuts in layer order, the all-remote one first, answer bit for bit like the whole."""
    model = tiny.prepared(name)
    report = check_model(model, model.graph, jobs=2)
    assert [cut.split_after for cut in report.cuts] == ["", *(layer.name for layer in model.graph.layers[:-1])]
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
def test_where_no_cut_goes_the_reason_is_told(name: str) -> None:
    """Fused groups, control flow, what cannot travel and quantisation each by their own words."""
    model = tiny.prepared(name)
    wanted, why = REASONS[name]
    inside = check_model(model, model.graph, jobs=1).inside
    told = [one.reason for one in inside if wanted.lower() in one.layer.lower() or wanted in one.operators]
    assert told and any(re.search(why, one) for one in told), inside


def test_a_length_that_depends_on_the_data_is_told_and_cut_all_the_same() -> None:
    """NonZero's result crosses, exactly, and the report says that its length is open."""
    model = tiny.prepared("counting")
    cuts = check_model(model, model.graph, jobs=1).cuts
    assert [cut.verdict for cut in cuts if cut.open_lengths] == ["exact"] * sum(cut.open_lengths for cut in cuts)
    assert any(cut.open_lengths for cut in cuts)


@dataclass(frozen=True, slots=True)
class Spoilt(OnnxModel):
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


def test_a_half_that_computes_something_else_is_found_out() -> None:
    """Off by a figure at every cut but the one whose only slice is the whole; not fine."""
    sound = tiny.prepared("chain")
    assert isinstance(sound, OnnxModel)
    spoilt = Spoilt(**{one.name: getattr(sound, one.name) for one in fields(sound) if one.init})
    report = check_model(spoilt, spoilt.graph, jobs=2)
    assert [cut.verdict for cut in report.cuts] == ["exact"] + ["off"] * (len(report.cuts) - 1)
    assert not report.is_safe
    assert all(cut.error is not None and cut.error > 1e-5 and "probabilities" in cut.reason for cut in report.cuts[1:])


def test_random_operators_are_told_apart_from_bad_cuts() -> None:
    """A model that never answers the same twice is not blamed on its cuts: the report says that it is unsteady."""
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


def test_a_cut_that_kills_the_runtime_is_that_cuts_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child dies of one cut; it is refused with the signal, and all others are tried."""
    monkeypatch.setattr(check, "CHILD", KILLED)
    model = tiny.prepared("chain")
    report = check_model(model, model.graph, jobs=2)
    verdicts = [cut.verdict for cut in report.cuts]
    assert verdicts[2] == "refused" and "signal 9" in report.cuts[2].reason
    assert verdicts[:2] + verdicts[3:] == ["exact"] * (len(verdicts) - 1)
    assert not report.is_safe


def test_a_check_that_somebody_ended_blames_no_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the children too: that is no runtime that died of a cut."""
    monkeypatch.setattr(check, "CHILD", (*KILLED[:2], KILLED[2].replace("os.getpid(), 9", "os.getpid(), 15")))
    model = tiny.prepared("chain")
    with pytest.raises(Interrupted, match="SIGTERM"):
        check_model(model, model.graph, jobs=1)


def test_a_model_that_kills_the_runtime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the whole does not come through there is nothing to compare with."""
    monkeypatch.setattr(check, "CHILD", (sys.executable, "-c", "import os, sys; sys.stdin.readline(); os.abort()"))
    model = tiny.prepared("chain")
    with pytest.raises(ModelRefused, match="kills the runtime"):
        check_model(model, model.graph)


def test_a_child_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that never ends is killed, and the model refused."""
    monkeypatch.setattr(check, "CHILD", (sys.executable, "-c", "import threading; threading.Event().wait()"))
    monkeypatch.setattr(check, "TIMEOUT_S", 0.2)
    model = tiny.prepared("chain")
    with pytest.raises(ModelRefused, match="not done after"):
        check_model(model, model.graph)


def test_after_many_crashes_the_rest_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that dies of every cut is not started two hundred times."""
    monkeypatch.setattr(check, "CHILD", (*KILLED[:2], KILLED[2].replace("== 'cut-2'", "!= 'whole'")))
    monkeypatch.setattr(check, "MAX_CRASHES_IN_A_ROW", 2)
    model = tiny.prepared("chain")
    report = check_model(model, model.graph, jobs=1)
    assert {cut.verdict for cut in report.cuts} == {"refused"}
    assert sum("signal 9" in cut.reason for cut in report.cuts) == 2
    assert sum("not tried" in cut.reason for cut in report.cuts) == len(report.cuts) - 2


def test_cuts_of_a_table_are_tried_too() -> None:
    """A closed set that is no prefix comes from a plan's row, under its name; prefixes are not tried twice."""
    model = tiny.prepared("branches")
    names = [layer.name for layer in model.graph.layers]
    aside = next(
        frozenset(names[:count]) - {names[count - 2]}
        for count in range(3, len(names))
        if not set(model.graph.layer(names[count - 1]).reads) & set(model.graph.layer(names[count - 2]).writes)
    )
    rows = [Row(name="remote"), Row(name="cut-1", layers=tuple(aside)), Row(name="local", layers=tuple(names))]
    assert [one.name for one in cuts_to_check(model.graph, rows)] == [""] * len(names) + ["cut-1"]
    report = check_model(model, model.graph, rows=rows, jobs=1)
    assert report.cuts[-1].name == "cut-1" and report.cuts[-1].verdict == "exact"


def test_frames_are_checked_from_the_camera_on() -> None:
    """With an input spec the input layer is the first boundary; samples replace the stand-in."""
    model = tiny.prepared("chain")
    graph, spec = with_input_layer(model, parse_input_spec("image/jpeg 64x48 scale=1/255"))
    report = check_model(model, graph, spec, samples=[synthetic_frame(spec, 3), synthetic_frame(spec, 4)], jobs=2)
    assert report.inputs == "2 samples"
    assert [cut.split_after for cut in report.cuts[:2]] == ["", "input"]
    assert {cut.verdict for cut in report.cuts} == {"exact"}
    assert report.cuts[0].sends == ("frame",)


def test_samples_must_be_what_the_model_takes() -> None:
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
def test_relative_error(left: list[float], right: list[float], error: float | None) -> None:
    """Of the largest finite value; what is no number on one side alone cannot be compared."""
    assert relative_error(np.array(left), np.array(right)) == error


def test_differences_say_which_output_is_worst() -> None:
    """The larger error wins, one that cannot be compared wins over all, and bits that differ by sign alone are seen."""
    whole = {"a": np.array([1.0, 2.0]), "b": np.array([0.0])}
    assert difference(whole, whole) == Difference(True)
    assert difference({**whole, "b": np.array([-0.0])}, whole) == Difference(False, 0.0, "b")
    assert difference({"a": np.array([1.0, 2.5]), "b": np.array([1.0])}, whole) == Difference(False, None, "b")
    assert difference({"a": np.array([1.0])}, whole).error is None
    assert worse(Difference(True), Difference(False, 0.0, "b")).worst == "b"


def test_noise_is_the_same_each_time_and_fits_every_type() -> None:
    """By seed; bytes take all values, whole numbers that may be lengths are 1, open lengths are 1."""
    model = prepare_model(
        tiny.build(
            [helper.make_node("Cast", ["q"], ["f"], to=1), helper.make_node("Identity", ["n"], ["m"])],
            [tiny.value("q", [64], onnx.TensorProto.INT8), tiny.value("n", [2], onnx.TensorProto.INT64)],
            [tiny.value("f", [64]), tiny.value("m", [2], onnx.TensorProto.INT64)],
        )
    )
    made = noise(model.inputs, 5)
    assert made["q"].min() < 0 < made["q"].max()
    assert made["n"].tolist() == [1, 1]
    assert np.array_equal(made["q"], noise(model.inputs, 5)["q"])
    assert not np.array_equal(made["q"], noise(model.inputs, 6)["q"])
    assert tolerance(model.outputs) == 1e-5
