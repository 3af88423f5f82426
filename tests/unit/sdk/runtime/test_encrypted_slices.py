"""Encrypted slices on the engines: from memory alone, and bit-identical to the same slice from files."""

from __future__ import annotations

import contextlib
import gc
import io
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edgesplit.crypto.slice_encryption import SliceInMemory, decrypt_slice, derive_slice_key, encrypt_slice
from edgesplit.errors import ModelRefused
from edgesplit.release.manifest import Slice, SliceFile, TensorSpec
from edgesplit.runtime import Tensor, tflite
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.loader import load_slice
from edgesplit.runtime.onnx import GRAPH, WEIGHTS, OnnxRuntime
from edgesplit.runtime.onnx_external_data import external_weights
from edgesplit.runtime.options import Optimise
from edgesplit.runtime.tflite import LiteRtRuntime
from edgesplit_partitioner.ir.chunking import slice_file
from edgesplit_partitioner.ir.prepared_model import whole_model_slice
from edgesplit_partitioner.slicing import atoms, cut_slices
from support import onnx_models, tflite_models

SECRET = b"s" * 32


def in_memory(plain: Slice, files: dict[str, bytes]) -> tuple[Slice, SliceInMemory]:
    """The slice, sealed and opened again."""
    clear = {file.name: in_chunks(files[file.name], file) for file in plain.files}
    sealed, contents = encrypt_slice(plain, clear, SECRET)
    key = derive_slice_key(plain, SECRET)
    opened = decrypt_slice(sealed, lambda file: io.BytesIO(b"".join(contents[file.name])), {key.key_id: key.secret})
    return sealed, opened


def in_chunks(raw: bytes, file: SliceFile) -> list[bytes]:
    source = io.BytesIO(raw)
    return [source.read(chunk.bytes) for chunk in file.chunks]


@pytest.mark.parametrize("optimise", ["exact", "fast"])
@pytest.mark.parametrize("model", ["chain", "branches"])
def test_onnx_from_memory_is_bit_identical_to_files(model: str, optimise: Optimise, tmp_path: Path) -> None:
    """Weights in place from memory, or copied where optimisers read them: the same answer, also after the memory was
    closed and collected, because the program holds on to what the engine reads."""
    prepared = onnx_models.prepared(model)
    for part in cut_slices(prepared, prepared.graph, atoms(prepared.graph, []), None):
        folder = tmp_path / part.slice.name
        folder.mkdir()
        for name, data in part.files.items():
            (folder / name).write_bytes(data)
        runtime = OnnxRuntime(optimise=optimise)
        feeds = onnx_models.feeds_of(prepared)
        expected = runtime.load(part.slice, folder).run(feeds)
        sealed, memory = in_memory(part.slice, part.files)
        manifest = onnx_models.manifest_of(prepared, [])
        program = load_slice(manifest, sealed, lambda _, opened=memory: opened, runtime)
        with pytest.raises(KeyError):
            memory.path(GRAPH)  # closed: the engine has what it needs
        del memory
        gc.collect()
        for _ in range(3):
            got = program.run(feeds)
            assert {name: value.tobytes() for name, value in got.items()} == {
                name: value.tobytes() for name, value in expected.items()
            }


def test_weights_without_a_numpy_type_are_copied() -> None:
    """bfloat16 has no equivalent in numpy: the engine gets a copy, and answers."""
    values = np.arange(1, 65, dtype=np.float32).astype(ml_dtypes.bfloat16)
    weight = TensorProto(name="w", data_type=TensorProto.BFLOAT16, dims=[64], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", WEIGHTS), ("offset", "0"), ("length", "128")):
        weight.external_data.add(key=key, value=value)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64]) for name in ("x", "y")]
    nodes = [helper.make_node("Cast", ["w"], ["f"], to=TensorProto.FLOAT), helper.make_node("Add", ["x", "f"], ["y"])]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight])
    raw = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()
    files = {GRAPH: raw, WEIGHTS: values.tobytes()}
    plain = Slice(
        "s01", "onnx", ("l",), (TensorSpec("x", "FP32", (64,)),), (TensorSpec("y", "FP32", (64,)),),
        (slice_file(GRAPH, [raw]), slice_file(WEIGHTS, [files[WEIGHTS]])),
    )  # fmt: skip
    sealed, memory = in_memory(plain, files)
    with memory:
        answer: Tensor = OnnxRuntime().load(sealed, memory).run({"x": np.zeros(64, np.float32)})["y"]
    np.testing.assert_array_equal(answer, np.arange(1, 65, dtype=np.float32))


def test_weights_beyond_their_file_are_refused() -> None:
    """A graph that points beyond its weights is refused at load, not read beyond their end."""
    prepared = onnx_models.prepared("chain")
    (one,) = cut_slices(prepared, prepared.graph, atoms(prepared.graph, []), None)
    short = one.files[WEIGHTS][:64]
    graph, _ = one.slice.files
    cut = msgspec.structs.replace(one.slice, files=(graph, slice_file(WEIGHTS, [short])))
    sealed, memory = in_memory(cut, {**one.files, WEIGHTS: short})
    with memory, pytest.raises(ModelRefused, match=one.slice.name):
        OnnxRuntime().load(sealed, memory)


def test_tflite_from_memory_is_bit_identical_to_files(tmp_path: Path) -> None:
    """LiteRT maps the memory file; it lives as long as the interpreter."""
    model = tflite_models.prepared("chain")
    (tmp_path / tflite.FILE).write_bytes(model.raw)
    plain = whole_model_slice(model)
    plain = msgspec.structs.replace(plain, files=(slice_file(tflite.FILE, [model.raw]),))
    feeds = tflite_models.feeds_of(model)
    expected = LiteRtRuntime().load(plain, tmp_path).run(feeds)
    sealed, memory = in_memory(plain, {tflite.FILE: model.raw})
    with memory:
        program = DispatchingRuntime().load(sealed, memory)
    del memory
    gc.collect()
    assert {name: value.tobytes() for name, value in program.run(feeds).items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


# The reader of graphs


def test_external_weights_are_found_as_by_onnx() -> None:
    """Name, type, shape and place of each external weight, as the onnx package reads them."""
    for name in ("chain", "branches"):
        prepared = onnx_models.prepared(name)
        for part in cut_slices(prepared, prepared.graph, atoms(prepared.graph, []), None):
            model = onnx.load_model_from_string(part.files[GRAPH])
            wanted = [
                (tensor.name, tensor.data_type, tuple(tensor.dims))
                for tensor in model.graph.initializer
                if tensor.data_location == TensorProto.EXTERNAL
            ]
            found = external_weights(part.files[GRAPH])
            assert [(weight.name, weight.data_type, weight.dims) for weight in found] == wanted
            assert sum(weight.length for weight in found) <= len(part.files.get(WEIGHTS, b""))


def test_every_prefix_of_a_graph_is_parsed_or_refused() -> None:
    """A graph that ends anywhere gives weights or ModelRefused, never anything else."""
    prepared = onnx_models.prepared("chain")
    raw = cut_slices(prepared, prepared.graph, atoms(prepared.graph, []), None)[0].files[GRAPH]
    for end in range(len(raw)):
        read_or_refused(raw[:end])


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_parsed_or_refused(raw: bytes) -> None:
    """Bytes that are no graph at all, also within what looks like one, give weights or ModelRefused."""
    read_or_refused(raw)
    inner = bytes([5 << 3 | 2, len(raw) & 0x7F]) + raw
    read_or_refused(bytes([7 << 3 | 2, len(inner) & 0x7F]) + inner)


def read_or_refused(raw: bytes) -> None:
    with contextlib.suppress(ModelRefused):
        external_weights(raw)
