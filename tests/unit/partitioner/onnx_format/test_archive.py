"""ONNX models with external weights: the same cuts, slices and outputs as a single file."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from edgesplit.errors import ModelRefused, UsageError
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.onnx_format import archive as bundle
from edgesplit_partitioner.onnx_format.model import OnnxModel
from edgesplit_partitioner.profiling.layers import measure_layers, measure_samples
from edgesplit_partitioner.slicing import atoms, cut_slices
from support import onnx_models as tiny

SOAK = "EDGESPLIT_LARGE_MODEL"


def saved(folder: Path, raw: bytes, threshold: int = 0) -> Path:
    """The model as a file with its weights beside it, as exporters write large ones."""
    file = folder / "model.onnx"
    model = onnx.load_model_from_string(raw)
    onnx.save_model(model, str(file), save_as_external_data=True, location="weights/all.data", size_threshold=threshold)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the chain model in two files."""
    (tmp_path / "weights").mkdir()
    saved(tmp_path, tiny.chain())
    return tmp_path


def test_prefix_cuts_equal_the_single_file_model_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    """Cut after each layer, the model in two files answers as the same model in one file."""
    one_file = tiny.prepared("chain")
    model = prepare_model(bundle.read_model_bytes(folder))
    assert isinstance(model, OnnxModel) and len(model.weights) > 200_000
    assert len(model.proto.SerializeToString()) < 10_000
    feeds = tiny.feeds_of(one_file)
    whole = tiny.run_whole(one_file.raw, feeds)
    layers = [layer.name for layer in model.graph.layers]
    assert layers == [layer.name for layer in one_file.graph.layers]
    for count in range(len(layers) + 1):
        slices = cut_slices(model, model.graph, atoms(model.graph, [frozenset(layers[:count])]), None)
        live = tiny.run_chain(tmp_path / str(count), model, slices, feeds)
        assert tiny.same_bits(live, whole)


def test_slices_equal_those_of_the_single_file_model(folder: Path) -> None:
    """The number of files a model came in makes no difference to its weights' chunks."""
    one_file, model = tiny.prepared("chain"), prepare_model(bundle.read_model_bytes(folder))
    cuts = [cut_slices(one, one.graph, atoms(one.graph, []), None)[0].slice for one in (one_file, model)]
    assert cuts[0].files[1] == cuts[1].files[1]


def test_an_archive_is_measured_like_a_single_file(folder: Path) -> None:
    """Layers are timed and tensors weighed with the data file beside the model."""
    model = prepare_model(bundle.read_model_bytes(folder))
    assert set(measure_layers(model, model.graph, runs=1, warmup=0)) == {layer.name for layer in model.graph.layers}
    assert measure_samples(model, model.graph, samples=[tiny.feeds_of(model)]).count == 1


def test_preparing_an_archive_twice_gives_the_same_bytes(folder: Path) -> None:
    """A prepared model is a model archive again, which is prepared to the same outputs."""
    model = prepare_model(bundle.read_model_bytes(folder))
    assert prepare_model(bundle.read_model_bytes(folder)).raw == model.raw
    assert bundle.is_archive(model.raw)
    feeds = tiny.feeds_of(model)
    again = prepare_model(model.raw)
    assert [layer.name for layer in again.graph.layers] == [layer.name for layer in model.graph.layers]
    assert feeds


def test_a_folder_and_its_model_file_are_equivalent(folder: Path) -> None:
    """Either may be named; the archive contains no date and no owner."""
    assert bundle.read_model_bytes(folder) == bundle.read_model_bytes(folder / "model.onnx")
    assert list(bundle.data_files(folder / "model.onnx")) == ["weights/all.data"]


def test_small_external_weights_are_inlined(tmp_path: Path) -> None:
    """Shapes and scalars in a data file are put where shape inference finds them."""
    (tmp_path / "weights").mkdir()
    file = saved(tmp_path, tiny.MODELS["listed_weights"]())
    model = prepare_model(bundle.read_model_bytes(file))
    assert model.outputs[0].shape == (1, 6)


def test_missing_data_files_are_named(folder: Path) -> None:
    """A data file that is not there is the caller's error, before anything is sent."""
    (folder / "weights" / "all.data").unlink()
    with pytest.raises(UsageError, match=r"weights/all\.data.*not beside it"):
        bundle.read_model_bytes(folder)


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "a/../../b"])
def test_external_data_outside_of_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    """A model file cannot make the command send another file of this machine."""
    model = onnx.load_model_from_string(tiny.chain())
    bundle.set_external_location(model.graph.initializer[0], location, 0, 4)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UsageError, match="outside of its folder"):
        bundle.read_model_bytes(tmp_path)


def test_two_models_in_a_folder_need_a_choice(folder: Path) -> None:
    """A folder stands for its one model."""
    (folder / "other.onnx").write_bytes(tiny.chain())
    with pytest.raises(UsageError, match="2 model files"):
        bundle.read_model_bytes(folder)


def test_truncated_external_weights_are_refused(folder: Path) -> None:
    """The weight is named."""
    data = (folder / "weights" / "all.data").read_bytes()
    (folder / "weights" / "all.data").write_bytes(data[:1000])
    with pytest.raises(ModelRefused, match="are not whole in"):
        prepare_model(bundle.read_model_bytes(folder))


def test_every_truncated_archive_is_refused(folder: Path) -> None:
    """A model archive that was cut off anywhere is refused."""
    raw = bundle.read_model_bytes(folder)
    for length in (300, 512, 600, 1024, 5000, len(raw) // 2):
        with pytest.raises(ModelRefused):
            prepare_model(raw[:length])


def test_an_archive_without_a_model_or_with_links_is_refused() -> None:
    """Links and archives without a model are no model archives."""
    for member in (tarfile.TarInfo("model.onnx"), tarfile.TarInfo("else")):
        member.type = tarfile.SYMTYPE if member.name == "model.onnx" else tarfile.REGTYPE
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w:") as archive:
            archive.addfile(member)
        with pytest.raises(ModelRefused, match="the archive holds"):
            prepare_model(target.getvalue())


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not os.environ.get(SOAK), reason=f"writes 7 GB and takes 9 GB of memory: {SOAK}=1 in make soak")
def test_a_model_above_two_gigabytes(tmp_path: Path) -> None:
    """Three products of 800 MB of weights: cut between them, each slice runs, and the chain equals numpy."""
    width = 14_200
    shared = np.full((width, width), np.float32(1 / width))
    weights = [numpy_helper.from_array(shared, f"w{number}") for number in range(3)]
    nodes = [helper.make_node("MatMul", [f"x{number}", f"w{number}"], [f"x{number + 1}"]) for number in range(3)]
    ends = [tiny.value("x0", [1, width])], [tiny.value("x3", [1, width])]
    graph = helper.make_graph(nodes, "large", *ends)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with (tmp_path / "all.data").open("wb") as file:
        for number, one in enumerate(weights):
            file.write(one.raw_data)
            bundle.set_external_location(one, "all.data", number * shared.nbytes, shared.nbytes)
            model.graph.initializer.append(one)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    del weights

    prepared = prepare_model(bundle.read_model_bytes(tmp_path / "model.onnx"))
    names = [layer.name for layer in prepared.graph.layers]
    sets = [frozenset(names[:1]), frozenset(names[:2])]
    slices = cut_slices(prepared, prepared.graph, atoms(prepared.graph, sets), None)
    live = tiny.run_chain(tmp_path, prepared, slices, {"x0": np.ones((1, width), np.float32)})
    np.testing.assert_allclose(live["x3"], np.ones((1, width)), rtol=1e-3)


def test_a_symlink_out_of_the_folder_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A data file that is a link would send the link's target."""
    data = folder / "weights" / "all.data"
    secret = data.rename(tmp_path_factory.mktemp("elsewhere") / "secret")
    data.symlink_to(secret)
    with pytest.raises(UsageError, match=r"weights/all\.data.*a link to outside of its folder.*cp -L"):
        bundle.read_model_bytes(folder)
