"""An exported model repository, read as Triton reads it: by its own schema, and by onnxruntime, which runs it there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import pytest
from google.protobuf import text_format

from edgesplit_cli.export_files import CONFIG, MODEL, VERSION, triton_config, write_model
from edgesplit_partitioner.onnx_format.export import wire_signature
from support import onnx_models as tiny
from support.exported_halves import far_half, near_half
from support.recut_repository import CLASS, build_release
from support.triton_schema import SCHEMA


def config_of(home: Path) -> Any:
    return text_format.Parse((home / CONFIG).read_text(), SCHEMA.ModelConfig())


@pytest.mark.parametrize("name", ["chain", "branches"])
def test_exported_repositories_load_in_triton_and_answer_as_the_whole_model(name: str, tmp_path: Path) -> None:
    """Each row of a plan: the configuration names the model's folder and its ends as the file has them, types and
    shapes too, and the file makes of the boundary what the whole model makes of its input."""
    prepared = tiny.prepared(name)
    graph, rng = prepared.graph, random.Random(name)
    sets = {tiny.closed_set(graph, rng) for _ in range(4)} - {frozenset(layer.name for layer in graph.layers)}
    one, feeds = build_release(name, *sorted(sets, key=sorted), private_tensors=()), tiny.feeds_of(prepared)
    rows = [row for row in one.manifest.plans[CLASS].rows if not row.is_local]
    assert rows
    for row in rows:
        inputs, outputs = wire_signature(one.manifest, row)
        label = f"{one.digest}.{CLASS}.{row.name}"
        text = triton_config(label, msgspec.to_builtins(inputs), msgspec.to_builtins(outputs))
        home = write_model(tmp_path / "models", label, text, far_half(one, row).SerializeToString())

        config = config_of(home)
        assert (config.name, config.backend, config.max_batch_size) == (home.name, "onnxruntime", 0)
        session = onnxruntime.InferenceSession(home / VERSION / MODEL)
        for told, real in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
            assert {each.name: list(each.dims) for each in told} == {each.name: each.shape for each in real}
            assert {each.name: type_name(each.data_type) for each in told} == {each.name: each.type for each in real}
        live = near_half(one, row, tmp_path / row.name, feeds)
        answers = session.run(None, {each.name: live[each.name] for each in session.get_inputs()})
        whole = tiny.run_whole(tiny.MODELS[name](), feeds)
        for output, answer in zip(session.get_outputs(), answers, strict=True):
            assert np.allclose(answer, whole[output.name], rtol=1e-4, atol=1e-6), (row.name, output.name)


def type_name(number: int) -> str:
    """As onnxruntime calls Triton's type."""
    word: str = SCHEMA.DataType.Name(number).removeprefix("TYPE_").lower()
    return f"tensor({ {'fp32': 'float', 'fp64': 'double', 'fp16': 'float16'}.get(word, word) })"
