"""Slices of a TFLite model give the whole model's bits, whatever the cut, and their bytes depend on nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from edgesplit.limits import LIMITS
from edgesplit.runtime import run_slices
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.loader import load_slices
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.slicing import CutSlice, atoms, cut_slices
from edgesplit_partitioner.tflite_format.flatbuffer import read_model
from edgesplit_partitioner.tflite_format.model import prepare_model
from support import onnx_models, tflite_models
from support.onnx_models import Array, closed_set, same_bits
from support.slice_chunks import chunk_bytes

SEED = 7


def cut(model: PreparedModel, *sets: frozenset[str]) -> list[CutSlice]:
    """The model cut for a table of these device sets."""
    return cut_slices(model, model.graph, atoms(model.graph, sets), None)


def run_chain(folder: Path, model: PreparedModel, slices: list[CutSlice], feeds: dict[str, Array]) -> dict[str, Array]:
    """The slices, written, loaded and run one after the other: all live tensors at the end."""
    onnx_models.write_slices(folder, slices)
    programs = load_slices(onnx_models.manifest_of(model, slices), lambda name: folder / name, DispatchingRuntime())
    return run_slices(programs, [slice_.slice.name for slice_ in slices], feeds)


@pytest.mark.parametrize("name", tflite_models.MODELS)
def test_every_prefix_cut_equals_the_whole_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Cut after each layer in turn, and after all of them at once, the chain's outputs are the whole's, bit for bit:
    those of the file that was pushed, not only of what we made of it."""
    model = tflite_models.prepared(name)
    layers = [layer.name for layer in model.graph.layers]
    feeds = tflite_models.feeds_of(model)
    whole = tflite_models.run_whole(tflite_models.MODELS[name](), feeds, tmp_path)
    prefixes = [frozenset(layers[:count]) for count in range(len(layers) + 1)]
    for number, sets in enumerate([[prefix] for prefix in prefixes] + [prefixes]):
        live = run_chain(tmp_path / str(number), model, cut(model, *sets), feeds)
        assert same_bits(live, whole), f"{name}: cut {sorted(sets[0])}"


@pytest.mark.parametrize("name", tflite_models.MODELS)
def test_random_closed_sets_equal_the_whole_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Tables of random cuts, not nested in each other, too."""
    model = tflite_models.prepared(name)
    feeds = tflite_models.feeds_of(model, seed=2)
    whole = tflite_models.run_whole(model.raw, feeds, tmp_path)
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for number in range(6):
        sets = [closed_set(model.graph, rng) for _ in range(3)]
        live = run_chain(tmp_path / str(number), model, cut(model, *sets), feeds)
        assert same_bits(live, whole), f"{name}: {sets}"


def test_operators_that_run_together_are_one_layer() -> None:
    """Padding stays with its convolution, a loop with its subgraphs, a state with its operator; a computed weight is in
    every layer that uses it."""

    def operators(name: str) -> list[int]:
        return [len(layer.nodes) for layer in tflite_models.prepared(name).graph.layers]

    assert operators("chain") == [2, 1, 1, 1, 1, 1]
    assert operators("quantised") == [1, 1, 1, 1]
    assert operators("computed_weights") == [2, 2]
    assert operators("looped") == [1, 1, 1]
    assert operators("remembering") == [1, 1, 1]


def test_int8_crosses_with_its_scale() -> None:
    """Between quantised layers int8 travels, and the slice that reads it knows scale and zero point."""
    model = tflite_models.prepared("quantised")
    first = model.graph.layers[0].name
    tail = cut(model, frozenset({first}))[1]
    assert [(tensor.name, tensor.datatype) for tensor in tail.slice.inputs] == [("q0", "INT8")]
    main = read_model(tail.files["model.tflite"]).subgraphs[0]
    tensor = main.tensors[main.inputs[0]]
    assert tensor.quantization.scale.tolist() == pytest.approx([0.05])
    assert tensor.quantization.zeroPoint.tolist() == [3]


def test_a_data_dependent_length_is_open() -> None:
    """A length that depends on the data is open, and the slice behind such a tensor accepts any."""
    model = tflite_models.prepared("counting")
    where = model.types["where"]
    assert where.shape == (-1, -1) and where.concrete_shape == (6, 2)


def test_different_lengths_cross_one_loaded_chain(tmp_path: Path) -> None:
    """One loaded chain answers inputs for which different lengths cross its cut."""
    model = tflite_models.prepared("counting")
    names = [layer.name for layer in model.graph.layers]
    slices = cut(model, frozenset(names[:2]))
    onnx_models.write_slices(tmp_path, slices)
    programs = load_slices(onnx_models.manifest_of(model, slices), lambda name: tmp_path / name, DispatchingRuntime())
    for seed in range(4):
        feeds = tflite_models.feeds_of(model, seed)
        whole = tflite_models.run_whole(model.raw, feeds, tmp_path)
        assert same_bits(run_slices(programs, [slice_.slice.name for slice_ in slices], feeds), whole)


def test_state_is_reset_for_each_inference(tmp_path: Path) -> None:
    """A variable inside a file is zeroed before each run, so an output depends on its own input alone."""
    model = tflite_models.prepared("remembering")
    slices = cut(model)
    onnx_models.write_slices(tmp_path, slices)
    programs = load_slices(onnx_models.manifest_of(model, slices), lambda name: tmp_path / name, DispatchingRuntime())
    feeds = tflite_models.feeds_of(model)
    answers = [run_slices(programs, [slice_.slice.name for slice_ in slices], feeds) for _ in range(2)]
    assert same_bits(answers[0], answers[1])


def test_preparing_and_cutting_twice_gives_the_same_bytes() -> None:
    """A model prepared and cut anew has the same digests."""
    model, again = tflite_models.prepared("chain"), prepare_model(tflite_models.chain())
    assert again.raw == model.raw
    assert [slice_.slice for slice_ in cut(again)] == [slice_.slice for slice_ in cut(model)]


def test_preparing_is_idempotent() -> None:
    """A prepared model can be prepared again, and stays as it is."""
    model = tflite_models.prepared("branches")
    assert prepare_model(model.raw).raw == model.raw


def weights_of(slices: list[CutSlice]) -> set[str]:
    """Chunks that hold weights: those that do not begin the file."""
    return {chunk.sha256 for slice_ in slices for file in slice_.slice.files for chunk in file.chunks[1:]}


def test_new_table_resends_only_graphs() -> None:
    """Weights keep their chunks when the same model is cut elsewhere: each file's graph comes first, in one chunk."""
    model = tflite_models.prepared("chain")
    layers = [layer.name for layer in model.graph.layers]
    stored = [weights_of(cut(model, frozenset(layers[:count]))) for count in range(len(layers) + 1)]
    assert len(stored[0]) > 4
    assert all(digests == stored[0] for digests in stored)


def test_new_weights_change_only_their_chunks() -> None:
    """Training one layer on changes the chunks that hold that layer's weights, and no graph."""
    before, after = cut(tflite_models.prepared("chain")), cut(prepare_model(tflite_models.chain(changed="w3")))
    old = [chunk.sha256 for chunk in before[0].slice.files[0].chunks]
    new = [chunk.sha256 for chunk in after[0].slice.files[0].chunks]
    differing = [place for place, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]]
    assert differing and differing[0] > 0
    assert len(differing) == 2  # 221,184 bytes are two chunks of at most 131,072


@pytest.mark.parametrize("name", tflite_models.MODELS)
def test_chunks_are_the_file(name: str) -> None:
    """Chunks joined are the file, none too large."""
    slices = cut(tflite_models.prepared(name))
    chunks = chunk_bytes(slices)
    for slice_ in slices:
        (file,) = slice_.slice.files
        assert file.name == "model.tflite"
        assert b"".join(chunks[chunk.sha256] for chunk in file.chunks) == slice_.files["model.tflite"]
        assert all(0 < chunk.bytes <= LIMITS.chunk_bytes for chunk in file.chunks)


def test_weights_are_aligned() -> None:
    """Each weight begins at a multiple of 64 bytes in the file, where kernels may read it in place."""
    raw = tflite_models.prepared("chain").raw
    stored = [buffer.data for buffer in read_model(raw).buffers if buffer.data is not None]
    assert len(stored) == 10
    assert all(raw.index(data.tobytes()) % 64 == 0 for data in stored if data.size > 32 and data.any())


def test_a_value_dependent_length_crosses_with_its_real_length(tmp_path: Path) -> None:
    """Both trial runs show three elements; with four, a slice behind the cut accepts four, and its manifest allows
    it."""
    model = prepare_model(tflite_models.sized_by_value())
    assert model.graph.tensors["part"].shape == (-1,)
    names = [layer.name for layer in model.graph.layers]
    slices = cut_slices(model, model.graph, atoms(model.graph, [frozenset(names[:-1])]), None)
    assert slices[1].slice.inputs[0].shape == (-1,)
    live = run_chain(tmp_path, model, slices, {"x": np.full(8, 200, np.float32)})
    assert live["y"].shape == (4,)


def test_random_numbers_inside_a_loop_are_drawn_once() -> None:
    """A loop over constants that draws random numbers is a layer of its own, not part of each that reads it."""
    graph = prepare_model(tflite_models.drawing_in_a_loop()).graph
    assert graph.layers[0].writes == ("n",)
    assert all("n" in layer.reads for layer in graph.layers[1:])
