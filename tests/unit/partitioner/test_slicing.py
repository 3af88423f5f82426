"""Slices of a model give the whole model's bits, whatever the cut, and their bytes depend on nothing else."""

from __future__ import annotations

import hashlib
import io
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from onnx import TensorProto, helper
from PIL import Image

from edgesplit.errors import UsageError
from edgesplit.input_spec import FRAME, INPUT_LAYER, parse_input_spec, prepare
from edgesplit.limits import LIMITS
from edgesplit.plan import Link, Plan, Row
from edgesplit.release.manifest import decode_manifest, encode_manifest
from edgesplit_partitioner.ir.chunking import WeightData, weight_chunks
from edgesplit_partitioner.onnx_format.model import prepare_model, with_input_layer
from edgesplit_partitioner.slicing import CutSlice, atoms, cut_slices, to_release_plan
from support import onnx_models as tiny
from support.slice_chunks import chunk_bytes

SEED = 7


def cut(name: str, *sets: frozenset[str]) -> list[CutSlice]:
    """The named model cut for a table of these device sets."""
    model = tiny.prepared(name)
    return cut_slices(model, model.graph, atoms(model.graph, sets), None)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_prefix_cut_equals_the_whole_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Cut after each layer in turn, and after all of them at once, the chain's outputs equal those of the whole
    model."""
    model = tiny.prepared(name)
    layers = [layer.name for layer in model.graph.layers]
    feeds = tiny.feeds_of(model)
    whole = tiny.run_whole(model.raw, feeds)
    prefixes = [frozenset(layers[:count]) for count in range(len(layers) + 1)]
    tables = [[prefix] for prefix in prefixes] + [prefixes]
    for number, sets in enumerate(tables):
        slices = cut(name, *sets)
        live = tiny.run_chain(tmp_path / str(number), model, slices, feeds)
        assert tiny.same_bits(live, whole), f"{name}: cut {sorted(sets[0])}"


@pytest.mark.parametrize("name", tiny.MODELS)
def test_random_closed_sets_equal_the_whole_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Tables of random cuts, not nested in each other, too."""
    model = tiny.prepared(name)
    feeds = tiny.feeds_of(model, seed=2)
    whole = tiny.run_whole(model.raw, feeds)
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for number in range(6):
        sets = [tiny.closed_set(model.graph, rng) for _ in range(3)]
        live = tiny.run_chain(tmp_path / str(number), model, cut(name, *sets), feeds)
        assert tiny.same_bits(live, whole), f"{name}: {sets}"


@pytest.mark.parametrize("name", tiny.MODELS)
def test_preparing_changes_no_output(name: str) -> None:
    """The prepared model gives the outputs of the file that was pushed, optimised in the same degree."""
    model = tiny.prepared(name)
    feeds = tiny.feeds_of(model)
    ours, theirs = tiny.run_whole(model.raw, feeds), tiny.run_whole(tiny.MODELS[name](), feeds, basic=True)
    assert set(ours) == set(theirs)
    for output, values in theirs.items():
        np.testing.assert_allclose(ours[output], values, rtol=1e-5, atol=1e-6)


def test_slices_are_numbered_in_the_order_they_run() -> None:
    """Names say where a slice stands and where it begins."""
    names = [slice_.slice.name for slice_ in cut("chain", frozenset({"stem/Conv", "conv1"}))]
    assert names == ["s01-stem-conv", "s02-wide"]


def test_each_row_is_a_union_of_slices_that_can_run() -> None:
    """For every cut of a table, its slices in global order find their inputs, device half first."""
    model = tiny.prepared("branches")
    rng = random.Random(3)
    for _ in range(20):
        sets = [tiny.closed_set(model.graph, rng) for _ in range(4)]
        slices = [slice_.slice for slice_ in cut("branches", *sets)]
        for device in sets:
            here = [slice_ for slice_ in slices if device.issuperset(slice_.layers)]
            there = [slice_ for slice_ in slices if device.isdisjoint(slice_.layers)]
            assert len(here) + len(there) == len(slices)
            live = set(model.graph.inputs)
            for slice_ in here + there:
                assert live.issuperset(tensor.name for tensor in slice_.inputs)
                live.update(tensor.name for tensor in slice_.outputs)


def jpeg(width: int, height: int) -> bytes:
    """A picture as a camera sends it."""
    pixels = np.random.default_rng(5).integers(0, 255, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return file.getvalue()


def test_a_camera_frame_cut_equals_the_whole_bit_for_bit(tmp_path: Path) -> None:
    """With an input spec the first slice decodes the JPEG, alone in its slice, and the rest follows."""
    model = tiny.prepared("chain")
    graph, spec = with_input_layer(model, parse_input_spec("image/jpeg 64x48 rgb nchw scale=1/255 mean=0.4 std=0.2"))
    frame = jpeg(64, 48)
    whole = tiny.run_whole(model.raw, {"image": prepare(spec, frame)})
    names = [layer.name for layer in graph.layers]
    for count in range(len(names) + 1):
        slices = cut_slices(model, graph, atoms(graph, [frozenset(names[:count])]), spec)
        assert slices[0].slice.name == INPUT_LAYER
        assert slices[0].slice.format == "input"
        assert slices[0].slice.layers == (INPUT_LAYER,)
        feeds = {FRAME: np.frombuffer(frame, np.uint8)}
        live = tiny.run_chain(tmp_path / str(count), model, slices, feeds, spec)
        assert tiny.same_bits(live, whole)


def test_cutting_twice_gives_the_same_bytes() -> None:
    """A model prepared and cut anew has the same digests."""
    again = prepare_model(tiny.chain())
    half = frozenset({"stem/Conv", "conv1"})
    twice = cut_slices(again, again.graph, atoms(again.graph, [half]), None)
    assert [slice_.slice for slice_ in twice] == [slice_.slice for slice_ in cut("chain", half)]


def test_new_table_resends_only_graphs() -> None:
    """Weights keep their chunks when the same model is cut elsewhere."""
    layers = [layer.name for layer in tiny.prepared("chain").graph.layers]
    tables = [[frozenset(layers[:count])] for count in range(len(layers) + 1)]
    stored = [
        {chunk.sha256 for slice_ in cut("chain", *sets) for file in slice_.slice.files[1:] for chunk in file.chunks}
        for sets in tables
    ]
    assert stored[0]
    assert all(digests == stored[0] for digests in stored)


def test_new_weights_change_only_their_chunks() -> None:
    """Training one layer on changes the chunks that hold that layer's weights, and no graph."""
    changed = prepare_model(tiny.chain(changed="w3"))
    before, after = cut("chain"), cut_slices(changed, changed.graph, atoms(changed.graph, []), None)
    old = [chunk.sha256 for file in before[0].slice.files for chunk in file.chunks]
    new = [chunk.sha256 for file in after[0].slice.files for chunk in file.chunks]
    differing = [place for place, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]]
    assert before[0].slice.files[0] == after[0].slice.files[0]
    assert len(differing) == 2  # 221,184 bytes are two chunks of at most 131,072


@pytest.mark.parametrize("name", tiny.MODELS)
def test_chunks_are_the_files(name: str) -> None:
    """Chunks joined are the files, named by their digests, none too large, and the manifest takes them."""
    slices = cut(name)
    chunks = chunk_bytes(slices)
    for slice_ in slices:
        for file in slice_.slice.files:
            data = b"".join(chunks[chunk.sha256] for chunk in file.chunks)
            assert data == slice_.files[file.name]
            assert hashlib.sha256(data).hexdigest() == file.sha256
            assert all(0 < chunk.bytes <= LIMITS.chunk_bytes for chunk in file.chunks)
    manifest = tiny.manifest_of(tiny.prepared(name), slices)
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_small_weights_share_chunks_within_their_layer() -> None:
    """Small tensors of one layer share a chunk up to 64 KiB; other layers, large and shared tensors stand apart."""
    sizes = [
        ("a", 100),
        ("a", 100),
        ("b", 100),
        ("b", 200_000),
        ("b", 100),
        ("", 100),
        ("", 100),
        ("c", 60_000),
        ("c", 6_000),
    ]
    runs = weight_chunks(WeightData(owner, bytes(size)) for owner, size in sizes)
    assert [len(run) for run in runs] == [256, 128, 131_072, 68_928, 128, 128, 128, 60_032, 6_016]


def table(rows: tuple[Row, ...]) -> Plan:
    """A plan over layers."""
    return Plan(
        model="tiny", device_class="x", rows=rows, link=Link(up_bytes_per_s=1.0, down_bytes_per_s=1.0, rtt_s=0.0)
    )


def test_release_plan_names_slices() -> None:
    """Rows of layers become rows of slices, each placed once; sums and tensors stay."""
    layers = tuple(layer.name for layer in tiny.prepared("branches").graph.layers)
    rows = (
        Row(name="local", layers=layers),
        Row(name="cut-1", layers=("stem",), sends=("shared",), receives=("y", "seen")),
        Row(name="remote", sends=("x",), receives=("y", "seen"), up_bytes=512),
    )
    slices = cut("branches", *(frozenset(row.layers) for row in rows))
    plan = to_release_plan(table(rows), slices, {slice_.slice.name: 0.1 for slice_ in slices})
    names = tuple(slice_.slice.name for slice_ in slices)
    assert [(row.device, row.remote, row.layers) for row in plan.rows] == [
        (names, (), ()),
        (names[:1], names[1:], ()),
        ((), names, ()),
    ]
    assert plan.row("remote").up_bytes == 512
    assert plan.slice_s == dict.fromkeys(names, 0.1)
    manifest = msgspec.structs.replace(tiny.manifest_of(tiny.prepared("branches"), slices), plans={"x": plan})
    assert decode_manifest(encode_manifest(manifest)).plans["x"] == plan


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Row(name="cut-1", layers=("stem", "left"), sends=("shared", "left")), "divides a slice"),
        (Row(name="cut-1", layers=("stem",), sends=("x",)), r"its remote slices take \['shared'\]"),
    ],
)
def test_plan_of_another_cut_is_refused(row: Row, reason: str) -> None:
    """A table that these slices were not cut for, or whose tensors are not theirs, is a usage error."""
    slices = cut("branches", frozenset({"stem"}))
    with pytest.raises(UsageError, match=reason):
        to_release_plan(table((row,)), slices, {})


def test_a_value_dependent_length_crosses_with_its_real_length(tmp_path: Path) -> None:
    """Three elements, or four where the input is large, which no trial run shows: the length stays open, and a slice
    behind the cut accepts either."""
    node = helper.make_node
    raw = tiny.build(
        [
            node("ReduceMax", ["x"], ["most"], keepdims=0),
            node("Greater", ["most", "limit"], ["large"]),
            node("Cast", ["large"], ["more"], to=TensorProto.INT64),
            node("Add", ["more", "three"], ["count"]),
            node("Slice", ["x", "zero", "count"], ["part"]),
            node("Sin", ["part"], ["y"]),
        ],
        [tiny.value("x", [8])],
        [tiny.value("y", None)],
        [tiny.scalar("limit", 100, np.float32), tiny.ints("three", 3), tiny.ints("zero", 0)],
    )
    model = prepare_model(raw)
    assert model.graph.tensors["part"].shape == (-1,)
    names = [layer.name for layer in model.graph.layers]
    slices = cut_slices(model, model.graph, atoms(model.graph, [frozenset(names[:-1])]), None)
    live = tiny.run_chain(tmp_path, model, slices, {"x": np.full(8, 200, np.float32)})
    assert live["y"].shape == (4,)
