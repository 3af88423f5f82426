"""Both sides of an exported cut: the far slices as one model, and the slices run one by one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgesplit.plan import Row
from edgesplit.runtime import run_slices
from edgesplit.runtime.loader import load_slices
from edgesplit.runtime.onnx import OnnxRuntime
from edgesplit_partitioner.onnx_format.export import SlicePart, merge_slices
from support import onnx_models as tiny
from support.recut_repository import CutRelease

Array = np.ndarray[Any, Any]


def far_half(one: CutRelease, row: Row) -> onnx.ModelProto:
    """The row's slices as one model."""
    parts = [
        SlicePart(cut.slice, cut.files["graph.onnx"], cut.files.get("weights.bin", b""))
        for cut in one.cut
        if cut.slice.name in row.remote
    ]
    return merge_slices(one.manifest, row, parts, "half")


def near_half(one: CutRelease, row: Row, folder: Path, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Every tensor once the device's slices, and then the far ones, have run one by one."""
    tiny.write_slices(folder, one.cut)
    programs = load_slices(one.manifest, lambda name: folder / name, OnnxRuntime())
    order = [cut.slice.name for cut in one.cut]
    live = run_slices(programs, [name for name in order if name in row.device], feeds)
    return {**live, **run_slices(programs, [name for name in order if name in row.remote], live)}
