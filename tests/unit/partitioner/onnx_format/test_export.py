"""Remote halves exported as ordinary models: one file that gives the slices' outputs, with the codecs decoded
inside."""

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
from support.recut_repository import CLASS, build_release

Array = np.ndarray[Any, Any]


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    return tiny.run_whole(model.SerializeToString(), feeds)


@pytest.mark.parametrize("name", [name for name in tiny.MODELS if name != "sequences"])
def test_the_exported_remote_half_equals_its_slices_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Cut anywhere, several times: subgraphs that capture, weights in two slices, several inputs and outputs."""
    graph, rng = tiny.prepared(name).graph, random.Random(name)
    sets = {tiny.closed_set(graph, rng) for _ in range(6)} - {frozenset(layer.name for layer in graph.layers)}
    one = build_release(name, *sorted(sets, key=sorted), private_tensors=())
    feeds = tiny.feeds_of(tiny.prepared(name))
    for row in one.manifest.plans[CLASS].rows:
        if row.is_local:
            continue
        live = near_half(one, row, tmp_path / row.name, feeds)
        given = run(far_half(one, row), {tensor: live[tensor] for tensor in row.sends})
        assert tiny.same_bits(given, {tensor: live[tensor] for tensor in row.receives}), row.name


@pytest.mark.parametrize("codec", [name for name in boundary_codecs.LOSSY if name not in boundary_codecs.PACKED])
def test_an_exported_half_decodes_lossy_codecs_like_our_server(codec: str, tmp_path: Path) -> None:
    """Encoded tensors are inputs under their own names and types, and the output has the bits of our own decoding."""
    one = build_release("chain", [layer.name for layer in tiny.prepared("chain").graph.layers][:2])
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
    assert {tensor.name for tensor in model.graph.input} == set(travels)


def with_codec(row: Row, codec: str) -> Row:
    return msgspec.structs.replace(row, codecs=dict.fromkeys(row.sends, codec))


def test_an_unexportable_half_is_refused_with_an_alternative() -> None:
    """TFLite slices, pictures that are not decoded yet, packed or unknown codecs, and a row without a remote half."""
    one = build_release("chain", [layer.name for layer in tiny.prepared("chain").graph.layers][:2])
    row, local = one.manifest.plans[CLASS].rows
    check_exportable(one.manifest, row)
    for manifest, refused, what in (
        (of_format(one.manifest, "tflite"), row, "edgectl offload serve"),
        (of_format(one.manifest, "input"), row, "--offload URL"),
        (one.manifest, with_codec(row, "int2"), "int2.*not known"),
        (one.manifest, with_codec(row, "int4"), "int4.*--offload URL` plans without it"),
        (one.manifest, local, "no remote half"),
    ):
        with pytest.raises(ModelRefused, match=what):
            check_exportable(manifest, refused)


def of_format(manifest: Manifest, name: str) -> Manifest:
    slices = tuple(msgspec.structs.replace(slice_, format=name) for slice_ in manifest.slices)
    return msgspec.structs.replace(manifest, slices=slices)


def test_an_exported_half_runs_with_all_optimisations() -> None:
    """As Triton opens it."""
    one = build_release("chain", [layer.name for layer in tiny.prepared("chain").graph.layers][:2])
    row = with_codec(one.manifest.plans[CLASS].rows[0], "int8")
    raw = far_half(one, row).SerializeToString()
    assert onnxruntime.InferenceSession(raw, providers=["CPUExecutionProvider"]).get_inputs()
