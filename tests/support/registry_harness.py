"""A small model and a registry on a folder, for the controller's tests."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx

from edgesplit_controller.model_registry.registry import Registry
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Model


def a_model(seed: int = 0, batch: int | str = 1, width: int = 4) -> bytes:
    """A convolution of so many channels, a pool and a classifier."""
    rng = np.random.default_rng(seed)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)

    nodes = [
        onnx.helper.make_node("Conv", ["image", "w1"], ["a"], "conv", kernel_shape=[3, 3]),
        onnx.helper.make_node("GlobalAveragePool", ["a"], ["b"], "pool"),
        onnx.helper.make_node("Flatten", ["b"], ["c"], "flatten"),
        onnx.helper.make_node("Gemm", ["c", "w2"], ["scores"], "classify"),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "small",
        [onnx.helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [batch, 3, 16, 16])],
        [onnx.helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, [batch, 5])],
        [weight("w1", width, 3, 3, 3), weight("w2", width, 5)],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    raw: bytes = model.SerializeToString()
    return raw


def npz(**arrays: np.ndarray) -> bytes:
    """Arrays as an archive."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


class RegistryHarness:
    """A registry on a folder, its rows in SQLite there or at `database_url`."""

    def __init__(self, folder: Path, database_url: str = "") -> None:
        self.blobs = BlobStore(folder / "blobs")
        self.database = Database(database_url or f"sqlite:///{folder / 'controller.db'}")
        self.registry = Registry(self.database, self.blobs, now=lambda: 1_000.0)

    def push(self, raw: bytes, name: str = "small", **options: object) -> Model:
        """Push these bytes."""
        part = self.blobs.incoming_file()
        part.write_bytes(raw)
        return self.registry.push(part, name, **options)  # type: ignore[arg-type]
