"""ONNX graphs in onnxruntime: optimised to a file, and run on samples to measure ranges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, shape_inference

from edgesplit.runtime import Tensors
from edgesplit_partitioner.compression.onnx_biases import CORRECTED
from edgesplit_partitioner.compression.ranges import RangeCollector
from edgesplit_partitioner.onnx_format import nodes


def collect_ranges(model: onnx.ModelProto, samples: Sequence[Tensors]) -> RangeCollector:
    """The ranges of the inputs and of every float tensor between nodes."""
    exposed = shape_inference.infer_shapes(model)
    outputs = {value.name for value in exposed.graph.output}
    floats = [value for value in exposed.graph.value_info if value.type.tensor_type.elem_type == TensorProto.FLOAT]
    constants = nodes.constant_names(exposed.graph)
    # A file may describe tensors that no node writes any more, such as those that optimising has fused.
    written = {name for node in exposed.graph.node for name in node.output}
    exposed.graph.output.extend(
        onnx.ValueInfoProto(name=value.name)
        for value in floats
        if value.name in written and value.name not in outputs and value.name not in constants
    )
    # Not optimised: fusing would remove the tensors whose ranges are wanted.
    session = open_session(exposed.SerializeToString(), onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)
    names = [output.name for output in session.get_outputs()]
    collector = RangeCollector({node.input[0]: 1 for node in model.graph.node if node.op_type in CORRECTED})
    for sample in samples:
        for name, tensor in (*sample.items(), *zip(names, session.run(names, dict(sample)), strict=True)):
            collector.add(name, np.asarray(tensor))
    return collector


def fused(raw: Path, target: Path) -> onnx.ModelProto:
    """The quantised graph with integer operators in the place of QDQ nodes, also written to `target`. Fusions of this
    level do not depend on the machine."""
    model = optimised(raw.read_bytes(), onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED, target)
    raw.unlink()
    target.write_bytes(model.SerializeToString(deterministic=True))
    return model


def optimised(raw: bytes, level: Any, target: Path | None = None) -> onnx.ModelProto:
    file = target or Path("optimised.onnx")
    open_session(raw, level, file)
    return onnx.load_model(str(file))


def open_session(raw: bytes, level: Any, file: Path | None = None) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = level
    if file is not None:
        options.optimized_model_filepath = str(file)
    return onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
