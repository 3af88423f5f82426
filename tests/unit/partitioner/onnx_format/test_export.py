"""Far halves as ordinary models: what the slices give, by one file, with the codecs undone inside it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest

from edgesplit.errors import ModelRefused
from edgesplit.plan import Row
from edgesplit.release import boundary_codecs
from edgesplit.release.manifest import Manifest
from edgesplit_partitioner.onnx_format.export import check_exportable
from support import onnx_models as tiny
from support.exported_halves import far_half, near_half
from support.recut_repository import CLASS, made

Array = np.ndarray[Any, Any]


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    return tiny.run_whole(model.SerializeToString(), feeds)


@pytest.mark.parametrize("name", [name for name in tiny.MODELS if name != "sequences"])
def test_the_far_half_gives_the_bits_of_its_slices(name: str, tmp_path: Path) -> None:
    """Cut anywhere, several times: subgraphs that capture, weights in two slices, several inputs and outputs."""
    graph, rng = tiny.prepared(name).graph, random.Random(name)
    sets = {tiny.closed_set(graph, rng) for _ in range(6)} - {frozenset(layer.name for layer in graph.layers)}
    one = made(name, *sorted(sets, key=sorted), private_tensors=())
    feeds = tiny.feeds_of(tiny.prepared(name))
    for row in one.manifest.plans[CLASS].rows:
        if row.is_local:
            continue
        live = near_half(one, row, tmp_path / row.name, feeds)
        given = run(far_half(one, row), {tensor: live[tensor] for tensor in row.sends})
        assert tiny.same_bits(given, {tensor: live[tensor] for tensor in row.receives}), row.name


@pytest.mark.parametrize("codec", boundary_codecs.LOSSY)
def test_a_lossy_codec_is_undone_inside_as_our_server_undoes_it(codec: str, tmp_path: Path) -> None:
    """What travels goes in by its own names and types, and the answer has the bits that our own decoding leads to."""
    one = made("chain", [layer.name for layer in tiny.prepared("chain").graph.layers][:2])
    row = with_codec(one.manifest.plans[CLASS].rows[0], codec)
    live = near_half(one, row, tmp_path, tiny.feeds_of(tiny.prepared("chain")))
    (sent,) = row.sends
    travels = boundary_codecs.encode(sent, live[sent], codec)

    model = far_half(one, row)
    given = run(model, travels)

    specs = [spec for cut in one.cut for spec in cut.slice.outputs if spec.name == sent]
    ours = boundary_codecs.decode_tensors(travels, specs, {sent: codec})[sent]
    plain = run(far_half(one, msgspec.structs.replace(row, codecs={})), {sent: ours})
    assert tiny.same_bits(given, plain)
    assert {one.name for one in model.graph.input} == set(travels)


def with_codec(row: Row, codec: str) -> Row:
    return msgspec.structs.replace(row, codecs=dict.fromkeys(row.sends, codec))


def test_a_half_that_no_onnxruntime_runs_is_refused_with_what_would_do() -> None:
    """TFLite slices, pictures that are not decoded yet, codecs of a later day, and a row that needs nobody."""
    one = made("chain", [layer.name for layer in tiny.prepared("chain").graph.layers][:2])
    row, local = one.manifest.plans[CLASS].rows
    check_exportable(one.manifest, row)
    for manifest, refused, what in (
        (of_format(one.manifest, "tflite"), row, "edgectl offload serve"),
        (of_format(one.manifest, "input"), row, "--offload URL"),
        (one.manifest, with_codec(row, "int4"), "int4"),
        (one.manifest, local, "no remote half"),
    ):
        with pytest.raises(ModelRefused, match=what):
            check_exportable(manifest, refused)


def of_format(manifest: Manifest, name: str) -> Manifest:
    slices = tuple(msgspec.structs.replace(one, format=name) for one in manifest.slices)
    return msgspec.structs.replace(manifest, slices=slices)


def test_an_optimising_session_takes_the_half_as_well() -> None:
    """As Triton opens it: all optimisations on."""
    one = made("chain", [layer.name for layer in tiny.prepared("chain").graph.layers][:2])
    row = with_codec(one.manifest.plans[CLASS].rows[0], "int8")
    raw = far_half(one, row).SerializeToString()
    assert onnxruntime.InferenceSession(raw, providers=["CPUExecutionProvider"]).get_inputs()
