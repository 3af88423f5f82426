"""Checks that the bytes that were pushed are an ONNX model, and binds its free dimensions.

`read_model` refuses what is no ONNX model and says what it is instead; `bind_shapes` binds free dimensions or says what
to type. Only the protobuf is parsed here; whether its operators are valid is found out by onnxruntime in a child
process (`optimise`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import numpy_helper

from edgesplit.errors import ModelRefused, UsageError
from edgesplit_partitioner.onnx_format import archive, nodes

MIN_EXTERNAL_BYTES = 1024
"""Minimum size of a weight that stays in a data file; smaller ones move into the model's message."""
EXPORT_ADVICE = "export the model to ONNX (for PyTorch: torch.onnx.export) and push that file"
"""Advice on how to get an ONNX file, for error messages."""


def read_model(raw: bytes, data: Mapping[str, memoryview] | None = None) -> onnx.ModelProto:
    """The ONNX model in `raw`; ModelRefused says what the bytes are instead. `data` are its external data files, by the
    name that the model uses for each: large weights stay there, and `archive.external_location` gives their place."""
    if not raw:
        raise ModelRefused("the file is empty")
    _refuse_other_formats(raw)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(raw)
    except DecodeError as error:
        raise ModelRefused(f"not a whole ONNX file: its {len(raw)} bytes are truncated or damaged") from error
    _refuse_incomplete(model)
    _inline_small_data(model, data or {})
    _make_names_unique(model.graph)
    return model


def _refuse_other_formats(raw: bytes) -> None:
    """Raise ModelRefused for formats that are pushed by mistake, each recognised by its magic bytes."""
    if raw[4:8] == b"TFL3":
        raise ModelRefused("this is a TFLite model in an archive; push the .tflite file itself")
    if raw[4:8] == b"ORTM":
        raise ModelRefused("this is an onnxruntime ORT-format file; push the ONNX file that it was made from")
    if raw.startswith(b"PK\x03\x04"):
        kind = "a PyTorch file (a zip of pickles, never opened here)" if b"data.pkl" in raw else "a zip archive"
        raise ModelRefused(f"this is {kind}; {EXPORT_ADVICE}")
    if raw[0] == 0x80 and 2 <= raw[1:2].ljust(1, b"\0")[0] <= 5:
        raise ModelRefused(f"this is a Python pickle, which is never opened because it can run code; {EXPORT_ADVICE}")
    if raw.startswith(b"\x89HDF"):
        raise ModelRefused(f"this is an HDF5 file, as older Keras writes; {EXPORT_ADVICE}")
    if raw.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")):
        raise ModelRefused("this is a compressed file; unpack it and push what is inside")
    if raw.startswith(b"version https://git-lfs"):
        raise ModelRefused("this is a Git LFS pointer, not the model; run `git lfs pull` and push the real file")
    if _is_text(raw[:512]):
        raise ModelRefused(f"this is text, not a model (it begins {raw[:40].decode('utf-8', 'replace')!r})")


def _is_text(head: bytes) -> bool:
    """Whether the first bytes of a file are text. A protobuf always has control characters near its start; text has
    none but white space."""
    return all(byte >= 0x20 or byte in b"\t\n\r\f" for byte in head)


def _refuse_incomplete(model: onnx.ModelProto) -> None:
    """Raise ModelRefused where bytes that parse are not a whole model: other protobufs parse too, and so do files cut
    off at the end of a field."""
    graph = model.graph
    if not model.ir_version or not model.HasField("graph"):
        raise ModelRefused("not an ONNX model: it has no ONNX version or no graph (another protobuf, or cut off)")
    if not model.opset_import:
        raise ModelRefused("not a whole ONNX file: it names no operator set, so its end is missing")
    if not graph.output:
        raise ModelRefused("the model has no outputs, so there is nothing to compute")
    if not graph.node:
        raise ModelRefused("the model has no operators, so there is nothing to run or to cut")


def _make_names_unique(graph: onnx.GraphProto) -> None:
    """Make node and output names unique, in place. Nodes that share a name lose it, and get a new one when the model is
    normalised; an output that is listed twice is kept once, because results are returned by name."""
    for inner in nodes.all_graphs(graph):
        shared = {name for name, count in Counter(node.name for node in inner.node).items() if count > 1}
        for node in inner.node:
            if node.name in shared:
                node.name = ""
    outputs = list({value.name: value for value in graph.output}.values())
    del graph.output[:]
    graph.output.extend(outputs)


def _inline_small_data(model: onnx.ModelProto, data: Mapping[str, memoryview]) -> None:
    """Check that every tensor in an external data file is there and whole, else ModelRefused. Large weights of the main
    graph stay in the file; all others move into the message, in place."""
    stored = chain(nodes.stored_tensors(model.graph), nodes.function_tensors(model))
    for position, tensor in enumerate(stored):  # the main graph's weights come first
        if not archive.is_external(tensor):
            continue
        content = _external_data(tensor, data)
        if position < len(model.graph.initializer) and len(content) >= MIN_EXTERNAL_BYTES:
            continue
        del tensor.external_data[:]
        tensor.ClearField("data_location")
        tensor.raw_data = bytes(content)


def _external_data(tensor: onnx.TensorProto, data: Mapping[str, memoryview]) -> memoryview:
    """The bytes of a tensor that lie in an external data file; ModelRefused where they are not whole."""
    location, offset, length = archive.external_location(tensor)
    if location not in data:
        raise ModelRefused(
            f"the weights of {tensor.name[:80]!r} are in another file ({location[:80]!r}), which was not given; push"
            " the model with that file beside it, or save it as one file: onnx.save_model(model, path,"
            " save_as_external_data=False)"
        )
    end = len(data[location]) if length < 0 else offset + length
    size = nodes.tensor_bytes(tensor)
    if end > len(data[location]) or (tensor.data_type in nodes.DATATYPES and end - offset != size):
        raise ModelRefused(f"the weights of {tensor.name[:80]!r} are not whole in {location[:80]!r}")
    return data[location][offset:end]


def drop_initializer_inputs(model: onnx.ModelProto) -> None:
    """Remove from the inputs what is a weight, in place: IR version 3 requires weights to be listed as inputs, and
    later exporters still do."""
    graph = model.graph
    model.ir_version = max(model.ir_version, 4)
    weights = nodes.constant_names(graph)
    inputs_left = [value for value in graph.input if value.name not in weights]
    del graph.input[:]
    graph.input.extend(inputs_left)


def may_be_too_new(model: onnx.ModelProto) -> bool:
    """Whether the file is of the newest version that this onnx knows, or newer: onnxruntime may not read it yet."""
    newest = onnx.defs.onnx_opset_version()
    sets = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    return model.ir_version >= onnx.IR_VERSION or any(version > newest for version in sets)


def has_foreign_operators(model: onnx.ModelProto) -> bool:
    """Whether the model has operators that are in no ONNX operator set and that it does not define itself: those of
    other domains, of which onnxruntime has some."""
    defined = {(function.domain, function.name) for function in model.functions}
    return any(
        (node.domain, node.op_type) not in defined and not onnx.defs.has(node.op_type, node.domain)
        for graph in nodes.all_graphs(model.graph)
        for node in graph.node
    )


def bind_values(graph: onnx.GraphProto, bindings: Mapping[str, int]) -> dict[str, int]:
    """Make an input that is a single integer and named by a binding a constant of that value, in place; returns the
    bindings that remain.

    So a sampling rate, for example, decides its branches before the model is cut. A free dimension of the same name
    takes precedence.
    """
    lengths = {name for _, name, _ in _free_dimensions(graph)}
    remaining = dict(bindings)
    for value_info in integer_inputs(graph):
        if value_info.name in bindings and value_info.name not in lengths:
            shape = [1] * len(value_info.type.tensor_type.shape.dim)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(value_info.type.tensor_type.elem_type)
            value = np.full(shape, remaining.pop(value_info.name), dtype)
            graph.initializer.append(numpy_helper.from_array(value, value_info.name))
            graph.input.remove(value_info)
    return remaining


def integer_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """The inputs that are a single integer each."""
    integer_types = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    return [
        value_info
        for value_info in graph.input
        if value_info.type.tensor_type.elem_type in integer_types
        and value_info.type.tensor_type.HasField("shape")
        and all(length.dim_value == 1 for length in value_info.type.tensor_type.shape.dim)
    ]


def has_branches(graph: onnx.GraphProto) -> bool:
    """Whether the main graph has an If."""
    return any(node.op_type == "If" for node in graph.node)


def bind_shapes(graph: onnx.GraphProto, bindings: Mapping[str, int]) -> dict[str, int]:
    """Give every free dimension of the inputs its length, in place, and drop the shapes that were inferred from free
    ones. A batch without a binding gets 1; the lengths that were given so are returned, by name or label.

    ModelRefused lists what to type where a length is missing; UsageError where a binding matches nothing.
    """
    _check_bindings(graph, bindings)
    batches = {}
    for dimension, name, label in _free_dimensions(graph):
        length = bindings.get(label, bindings.get(name, 0))
        if not length and _is_batch(name or label):
            length = batches[name or label] = 1
        if length:
            dimension.dim_value = length
    missing = list(dict.fromkeys(name or label for _, name, label in _free_dimensions(graph)))
    if missing:
        raise ModelRefused(f"the inputs' shapes are not settled; {_how_to_bind(missing)}")
    del graph.value_info[:]
    for output in graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")
    return batches


def _check_bindings(graph: onnx.GraphProto, bindings: Mapping[str, int]) -> None:
    """Raise UsageError where a binding names no free dimension, or its length is out of range."""
    labels = {either for _, name, axis_label in _free_dimensions(graph) for either in (name, axis_label) if either}
    for name, length in bindings.items():
        if name not in labels:
            choice = f"its free dimensions are {', '.join(sorted(labels))}" if labels else "it has no free dimensions"
            raise UsageError(f"--bind {name}={length}: the model knows no such dimension; {choice}")
        if not 1 <= length < 2**31:
            raise UsageError(f"--bind {name}={length}: a length is at least 1")


def _free_dimensions(graph: onnx.GraphProto) -> Iterator[tuple[onnx.TensorShapeProto.Dimension, str, str]]:
    """Each input dimension without a length: the dimension, its name (may be empty), and its label `INPUT:AXIS`.
    ModelRefused where an input is no tensor of numbers or has no shape."""
    for value_info in graph.input:
        tensor_type = value_info.type.tensor_type
        if not value_info.type.HasField("tensor_type") or tensor_type.elem_type not in nodes.DATATYPES:
            raise ModelRefused(f"the input {value_info.name[:80]!r} is not a tensor of numbers; only those can be fed")
        if not tensor_type.HasField("shape"):
            raise ModelRefused(
                f"the input {value_info.name[:80]!r} does not say how many dimensions it has; export it with a shape"
            )
        for axis, dimension in enumerate(tensor_type.shape.dim):
            if dimension.dim_value <= 0:
                yield dimension, dimension.dim_param, f"{value_info.name}:{axis}"


def _how_to_bind(names: list[str]) -> str:
    """The options to type."""
    return "give each length: " + " ".join(f"--bind {name}=LENGTH" for name in names)


def _is_batch(name: str) -> bool:
    """Whether a free dimension's name is one that exporters use for the batch, or it is the first axis."""
    return name.lower() in ("n", "b", "bs", "batch", "batch_size", "none") or name.endswith(":0")
