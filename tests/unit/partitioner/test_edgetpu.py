"""Device halves for an Edge TPU, with a stand-in on the PATH for a compiler that is not ours.

What is compiled, what the release says of it, what an agent runs with an Edge TPU and without. What the real compiler
makes is not tested here.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.device_profile import load_profile
from edgesplit.errors import InferenceFailed, MalformedMessage, ModelRefused
from edgesplit.plan import Link, Plan, Row
from edgesplit.process.confinement import unavailable
from edgesplit.release.manifest import CompiledSlice, decode_manifest, device_slices, encode_manifest
from edgesplit.runtime import run_slices, tflite
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.loader import load_slices
from edgesplit.runtime.tflite import LiteRtRuntime
from edgesplit_controller.model_registry.registry import LoadedModel
from edgesplit_controller.releases.build import compiled_for
from edgesplit_partitioner import edgetpu
from edgesplit_partitioner.compression.compress import compress
from edgesplit_partitioner.compression.gate import GateTerms
from edgesplit_partitioner.ir.prepared_model import whole_model_slice
from edgesplit_partitioner.slicing import CutSlice, atoms, cut_slices
from edgesplit_partitioner.tflite_format.flatbuffer import EDGE_TPU_OPERATOR
from edgesplit_partitioner.tflite_format.model import prepare_model
from support import onnx_models, tflite_models
from support.agent_engine import CUT, EXPECTED, INPUT, LOCAL, Step, active, programs
from support.classifiers import tflite_classifier

CORAL = "coral-usb-rpi4"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called edgetpu_compiler that answers every model with the same compiled file, and notes what it got:
    not confined, so that it can."""
    monkeypatch.setattr(edgetpu, "confined_command", lambda readable, limits, module, *command: [*map(str, command)])
    return write_compiler(tmp_path, monkeypatch)


def write_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of that program, which is the first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "compiled").write_bytes(tflite_models.custom(EDGE_TPU_OPERATOR))
    program = folder / edgetpu.COMPILER
    program.write_text(
        f'#!/bin/sh\n# -s -o FOLDER FILE\ncp "$4" "{folder}/given"\ncp "{folder}/compiled" "$3/half_edgetpu.tflite"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def halves() -> tuple[list[CutSlice], list[frozenset[str]]]:
    """The quantised model cut for a table of two cuts, and its rows."""
    model = tflite_models.prepared("quantised")
    layers = [layer.name for layer in model.graph.layers]
    sets = [frozenset(layers[:2]), frozenset(layers[:3])]
    slices = cut_slices(model, model.graph, atoms(model.graph, sets), None)
    names = [slice_.slice.name for slice_ in slices]
    return slices, [frozenset(names[:1]), frozenset(names[:2]), frozenset()]


def test_each_row_has_a_compiled_slice_beside_its_cpu_slices(compiler: Path) -> None:
    """One compiled slice per row that runs anything on the device: the row's whole half in one file, with the tensors
    that its twins take and give together."""
    model = tflite_models.prepared("quantised")
    slices, rows = halves()
    made = edgetpu.compiled_cuts(model, model.graph, slices, CORAL, rows)

    assert [item.compiled.covers for item in made] == [
        (slices[0].slice.name,),
        tuple(slice_.slice.name for slice_ in slices[:2]),
    ]
    assert [item.cut.slice.kernels for item in made] == ["edgetpu"] * 2
    assert made[1].cut.slice.inputs == slices[0].slice.inputs
    assert made[1].cut.slice.outputs == slices[1].slice.outputs
    assert [item.cut.files["model.tflite"] for item in made] == [(compiler / "compiled").read_bytes()] * 2
    given = prepare_model((compiler / "given").read_bytes())
    assert [len(layer.nodes) for layer in given.graph.layers] == [1, 1, 1]


def test_a_half_the_compiler_refuses_runs_on_the_cpu(compiler: Path) -> None:
    """A compiler that fails, or that puts nothing on the Edge TPU, leaves the CPU slices alone."""
    model = tflite_models.prepared("quantised")
    slices, rows = halves()
    (compiler / "compiled").write_bytes(tflite_models.quantised())
    assert edgetpu.compiled_cuts(model, model.graph, slices, CORAL, rows) == []
    (compiler / "compiled").unlink()
    assert edgetpu.compiled_cuts(model, model.graph, slices, CORAL, rows) == []


def test_the_plan_states_whether_it_was_compiled(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler, without it, and for a model that no compiler accepts; plans for other devices state
    nothing."""
    coral = load_profile(CORAL)
    model, floats = tflite_models.prepared("quantised"), tflite_models.prepared("chain")
    assert "compiled per cut by edgetpu_compiler" in edgetpu.compilation_note(coral, model.graph, "tflite")
    in_float = edgetpu.compilation_note(coral, floats.graph, "tflite")
    assert "only int8 TFLite models" in in_float and "edgectl model compress NAME --method int8" in in_float
    assert "only int8 TFLite models" in edgetpu.compilation_note(coral, model.graph, "onnx")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "edgetpu_compiler is not on the PATH" in edgetpu.compilation_note(coral, model.graph, "tflite")
    assert edgetpu.compilation_note(load_profile("raspberrypi4"), model.graph, "tflite") == ""
    slices, rows = halves()
    assert edgetpu.compiled_cuts(model, model.graph, slices, CORAL, rows) == []


def test_a_model_that_did_not_compile_was_planned_for_the_edge_tpu(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the compiler, or with a model that it refuses, the host's processor runs and predicts it."""
    coral, host = load_profile(CORAL), load_profile("raspberrypi4")
    model, floats = tflite_models.prepared("quantised"), tflite_models.prepared("chain")

    assert edgetpu.effective_profile(coral, model.graph, "tflite") == coral
    assert edgetpu.effective_profile(coral, floats.graph, "tflite").rates == host.rates
    monkeypatch.setenv("PATH", "/nowhere")
    idle = edgetpu.effective_profile(coral, model.graph, "tflite")
    assert idle.rates == host.rates and idle.name == CORAL
    assert edgetpu.effective_profile(host, model.graph, "tflite") == host


def test_a_compressed_float_model_reaches_the_edge_tpu(compiler: Path, tmp_path: Path) -> None:
    """What int8 makes of a float model is predicted as on the Edge TPU and compiled, whole halves in integers; its CPU
    twins answer as the version itself."""
    classifier, coral = tflite_classifier(), load_profile(CORAL)
    (tmp_path / classifier.file_name).write_bytes(classifier.raw)
    made = compress(
        tmp_path / classifier.file_name, "int8", classifier.samples, AnswerRule("class", ("scores",)),
        GateTerms(least_agreement=0.9), out_folder=tmp_path,
    )  # fmt: skip
    assert made.path is not None, made.verdict.sentence
    base, variant = prepare_model(classifier.raw), prepare_model(made.path.read_bytes())
    assert edgetpu.effective_profile(coral, base.graph, "tflite").rates == load_profile("raspberrypi4").rates
    assert edgetpu.effective_profile(coral, variant.graph, "tflite") == coral
    assert "compiled per cut by edgetpu_compiler" in edgetpu.compilation_note(coral, variant.graph, "tflite")

    layers = [layer.name for layer in variant.graph.layers]
    slices = cut_slices(variant, variant.graph, atoms(variant.graph, [frozenset(layers[:3])]), None)
    names = [cut.slice.name for cut in slices]
    compiled = edgetpu.compiled_cuts(variant, variant.graph, slices, CORAL, [frozenset(names[:1]), frozenset(names)])

    assert [item.compiled.covers for item in compiled] == [tuple(names[:1]), tuple(names)]
    given = prepare_model((compiler / "given").read_bytes())
    products = [work for layer in given.graph.layers for work in layer.work if work.operator in ("conv", "gemm")]
    assert len(products) == 5 and all(work.is_int8 for work in products)
    onnx_models.write_slices(tmp_path / "twins", slices)
    manifest = onnx_models.manifest_of(variant, slices)
    programs = load_slices(manifest, lambda name: tmp_path / "twins" / name, DispatchingRuntime())
    answer = run_slices(programs, names, classifier.samples[0])
    whole = tflite_models.run_whole(made.path.read_bytes(), classifier.samples[0], tmp_path)
    assert np.array_equal(answer["scores"], whole["scores"])


def test_a_release_carries_compiled_slices(compiler: Path) -> None:
    """For a class with an Edge TPU the rows' device halves are compiled; for any other class nothing is."""
    model = tflite_models.prepared("quantised")
    slices, rows = halves()
    table = Plan(
        model="small@1",
        device_class=CORAL,
        rows=tuple(Row(name=f"cut-{place}", device=tuple(sorted(row))) for place, row in enumerate(rows)),
        link=Link(up_bytes_per_s=1.0, down_bytes_per_s=1.0, rtt_s=0.0),
    )
    loaded = LoadedModel(model, model.graph, None)
    assert len(compiled_for(loaded, slices, CORAL, table)) == 2
    assert compiled_for(loaded, slices, "raspberrypi4", table) == []


def with_compiled(covers: tuple[str, ...]) -> CompiledSlice:
    """A compiled slice of the agent's tiny model."""
    first = active(LOCAL).manifest.slices[0]
    one = msgspec.structs.replace(first, name="tpu01", kernels="edgetpu")
    return CompiledSlice(slice=one, device_class="pi4", covers=covers)


def test_an_agent_runs_the_compiled_slice_in_place_of_cpu_slices() -> None:
    """A loaded compiled slice replaces exactly the slices it covers; the rest, or a device without it, runs the CPU
    slices."""
    steps = programs() | {"tpu01": Step("x", "y", lambda x: (x + np.float32(1)) * np.float32(2))}
    release = active(LOCAL, CUT, steps=steps)
    manifest = msgspec.structs.replace(release.manifest, compiled=(with_compiled(("a", "b")),))
    object.__setattr__(release, "manifest", manifest)

    assert release.order(LOCAL.device) == ["tpu01"]
    assert release.order(CUT.device) == ["a"]
    assert np.array_equal(run_slices(steps, release.order(LOCAL.device), {"x": INPUT})["y"], EXPECTED)
    assert device_slices(release.plan, manifest) == {"a", "b", "tpu01"}
    without = active(LOCAL)
    object.__setattr__(without, "manifest", manifest)
    assert without.order(LOCAL.device) == ["a", "b"]


def test_an_unplugged_edge_tpu_falls_back_to_the_cpu_slices() -> None:
    """The request in which it fails is answered all the same, later ones do not try it again, and the failure is
    reported."""
    steps = programs() | {"tpu01": Step("x", "y", lambda x: x)}
    steps["tpu01"].error = InferenceFailed("no device")
    release = active(LOCAL, CUT, steps=steps)
    object.__setattr__(
        release, "manifest", msgspec.structs.replace(release.manifest, compiled=(with_compiled(("a", "b")),))
    )
    assert not release.trouble
    for _ in range(2):
        assert np.array_equal(release.run(release.order(LOCAL.device), {"x": INPUT})["y"], EXPECTED)
    assert steps["tpu01"].runs == 1
    assert "accelerator gone" in release.trouble and "no device" in release.trouble


def test_a_manifest_with_compiled_slices_is_checked() -> None:
    """It travels like any other; one that covers what is not there is malformed."""
    manifest = active(LOCAL).manifest
    sound = msgspec.structs.replace(manifest, compiled=(with_compiled(("a", "b")),))
    assert decode_manifest(encode_manifest(sound)) == sound
    assert sound.slice("tpu01").kernels == "edgetpu"
    for covers in ((), ("c",)):
        with pytest.raises(MalformedMessage, match="covers slices"):
            decode_manifest(encode_manifest(msgspec.structs.replace(manifest, compiled=(with_compiled(covers),))))


def test_a_compiled_slice_is_refused_without_an_edge_tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal gives the reason; the agent uses the CPU slices."""
    model = prepare_model(tflite_models.custom(EDGE_TPU_OPERATOR))
    assert model.kernels == "edgetpu"
    (tmp_path / "model.tflite").write_bytes(model.raw)
    monkeypatch.setattr(tflite, "EDGE_TPU_LIBRARY", "no-such-library.so")
    with pytest.raises(ModelRefused, match="no Edge TPU can run it here"):
        LiteRtRuntime().load(whole_model_slice(model), tmp_path)


@pytest.mark.parametrize(
    "script",
    ["exit 3", "kill -9 $$", "true", 'head -c 100000 /dev/urandom > "$3/half_edgetpu.tflite"', "yes"],
    ids=["fails", "dies", "writes nothing", "writes garbage", "never ends and talks"],
)
def test_a_misbehaving_compiler_falls_back_to_the_cpu(compiler: Path, script: str) -> None:
    """Whatever the compiler does, the plan uses the CPU slices."""
    (compiler / edgetpu.COMPILER).write_text(f"#!/bin/sh\n{script}\n")
    assert edgetpu.compiled_file(tflite_models.quantised(), timeout_s=1.0) is None


@pytest.mark.skipif(any(item.what == "files" for item in unavailable()), reason="this kernel has no Landlock")
def test_the_compiler_ran_with_all_files_of_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles in its own folder, and can write nowhere else."""
    folder = write_compiler(tmp_path, monkeypatch)
    assert edgetpu.compiled_file(tflite_models.quantised()) == (folder / "compiled").read_bytes()
    assert not (folder / "given").exists()


def test_subprocesses_of_a_hanging_compiler_are_killed(compiler: Path, tmp_path: Path) -> None:
    """The compiler is a script that waits for another program: both are gone."""
    note = tmp_path / "started"
    (compiler / edgetpu.COMPILER).write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {note}\nwait\n")
    assert edgetpu.compiled_file(tflite_models.quantised(), timeout_s=1.0) is None
    with suppress(ProcessLookupError):  # else it is gone already
        started = os.pidfd_open(int(note.read_text()))
        assert select.select([started], [], [], 20)[0]
