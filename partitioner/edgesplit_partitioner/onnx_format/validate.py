"""Bytes that someone says are an ONNX model: is it one, and are its shapes settled?

`read_model` refuses what is no ONNX model and says what it is instead; `bind_shapes` settles free dimensions or says
what to type. Only the protobuf is looked at: whether the operators mean anything is onnxruntime's to say, in a child
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

EXTERNAL_BYTES = 1024
"""Weights in data files stay there from this size on."""
EXPORT = "export the model to ONNX (for PyTorch: torch.onnx.export) and push that file"


def read_model(raw: bytes, data: Mapping[str, memoryview] | None = None) -> onnx.ModelProto:
    """The ONNX model in `raw`; ModelRefused says what the bytes are instead. `data` are its data files, by the name
    that it calls them: large weights stay in them, where `external` of `bundle` finds them."""
    if not raw:
        raise ModelRefused("the file is empty")
    _refuse_other_formats(raw)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(raw)
    except DecodeError as error:
        raise ModelRefused(f"not a whole ONNX file: its {len(raw)} bytes are truncated or damaged") from error
    _refuse_hollow(model)
    _settle_external_data(model, data or {})
    _name_once(model.graph)
    return model


def _refuse_other_formats(raw: bytes) -> None:
    """ModelRefused for the formats people push by mistake, each by its own mark."""
    if raw[4:8] == b"TFL3":
        raise ModelRefused("this is a TFLite model in an archive; push the .tflite file itself")
    if raw[4:8] == b"ORTM":
        raise ModelRefused("this is an onnxruntime ORT-format file; push the ONNX file that it was made from")
    if raw.startswith(b"PK\x03\x04"):
        what = "a PyTorch file (a zip of pickles, never opened here)" if b"data.pkl" in raw else "a zip archive"
        raise ModelRefused(f"this is {what}; {EXPORT}")
    if raw[0] == 0x80 and 2 <= raw[1:2].ljust(1, b"\0")[0] <= 5:
        raise ModelRefused(f"this is a Python pickle, which is never opened because it can run code; {EXPORT}")
    if raw.startswith(b"\x89HDF"):
        raise ModelRefused(f"this is an HDF5 file, as older Keras writes; {EXPORT}")
    if raw.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")):
        raise ModelRefused("this is a compressed file; unpack it and push what is inside")
    if raw.startswith(b"version https://git-lfs"):
        raise ModelRefused("this is a Git LFS pointer, not the model; run `git lfs pull` and push the real file")
    if _is_text(raw[:512]):
        raise ModelRefused(f"this is text, not a model (it begins {raw[:40].decode('utf-8', 'replace')!r})")


def _is_text(head: bytes) -> bool:
    """A protobuf always has control characters near its start; text has none but white space."""
    return all(byte >= 0x20 or byte in b"\t\n\r\f" for byte in head)


def _refuse_hollow(model: onnx.ModelProto) -> None:
    """Bytes that happen to parse are not yet a model: other protobufs do, and so do files cut at a field's edge."""
    graph = model.graph
    if not model.ir_version or not model.HasField("graph"):
        raise ModelRefused("not an ONNX model: it has no ONNX version or no graph (another protobuf, or cut off)")
    if not model.opset_import:
        raise ModelRefused("not a whole ONNX file: it names no operator set, so its end is missing")
    if not graph.output:
        raise ModelRefused("the model has no outputs, so there is nothing to compute")
    if not graph.node:
        raise ModelRefused("the model has no operators, so there is nothing to run or to cut")


def _name_once(graph: onnx.GraphProto) -> None:
    """Nodes that share a name lose it (they get one of their own when the model is tidied), and an output that is
    listed twice is one output, in place: answers go by name."""
    for inner in nodes.all_graphs(graph):
        shared = {name for name, count in Counter(node.name for node in inner.node).items() if count > 1}
        for node in inner.node:
            if node.name in shared:
                node.name = ""
    outputs = list({one.name: one for one in graph.output}.values())
    del graph.output[:]
    graph.output.extend(outputs)


def _settle_external_data(model: onnx.ModelProto, data: Mapping[str, memoryview]) -> None:
    """Every tensor whose bytes are in a data file: there and whole, else ModelRefused. Large weights of the main graph
    stay there; all others move into the message, in place."""
    stored = chain(nodes.stored_tensors(model.graph), nodes.function_tensors(model))
    for place, tensor in enumerate(stored):  # the main graph's weights come first
        if not archive.is_external(tensor):
            continue
        content = _content(tensor, data)
        if place < len(model.graph.initializer) and len(content) >= EXTERNAL_BYTES:
            continue
        del tensor.external_data[:]
        tensor.ClearField("data_location")
        tensor.raw_data = bytes(content)


def _content(tensor: onnx.TensorProto, data: Mapping[str, memoryview]) -> memoryview:
    """The bytes of a tensor that are in a data file."""
    location, offset, length = archive.external(tensor)
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
    """Weights that are listed as inputs (IR 3 demands it, later exporters still do) become plain weights, in place."""
    graph = model.graph
    model.ir_version = max(model.ir_version, 4)
    weights = nodes.constant_names(graph)
    kept = [one for one in graph.input if one.name not in weights]
    del graph.input[:]
    graph.input.extend(kept)


def bind_values(graph: onnx.GraphProto, bindings: Mapping[str, int]) -> dict[str, int]:
    """Inputs of one whole number that a binding names have that value for good, in place; the bindings that are left.

    So a sampling rate, say, decides its branches before the model is cut. A free dimension of the same name goes first.
    """
    lengths = {name for _, name, _ in _free_dimensions(graph)}
    left = dict(bindings)
    for one in whole_numbers(graph):
        if one.name in bindings and one.name not in lengths:
            shape = [1] * len(one.type.tensor_type.shape.dim)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(one.type.tensor_type.elem_type)
            value = np.full(shape, left.pop(one.name), dtype)
            graph.initializer.append(numpy_helper.from_array(value, one.name))
            graph.input.remove(one)
    return left


def whole_numbers(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """The inputs that are one whole number each."""
    kinds = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    return [
        one
        for one in graph.input
        if one.type.tensor_type.elem_type in kinds
        and one.type.tensor_type.HasField("shape")
        and all(length.dim_value == 1 for length in one.type.tensor_type.shape.dim)
    ]


def has_branches(graph: onnx.GraphProto) -> bool:
    """Whether an If stands in the main graph."""
    return any(node.op_type == "If" for node in graph.node)


def bind_shapes(graph: onnx.GraphProto, bindings: Mapping[str, int]) -> None:
    """Give every free dimension of the inputs its length, in place; what was inferred from free ones is dropped.

    ModelRefused lists what to type where a length is missing; UsageError where a binding fits nothing.
    """
    _check_bindings(graph, bindings)
    for dimension, name, place in _free_dimensions(graph):
        length = bindings.get(place, bindings.get(name, 0))
        if length:
            dimension.dim_value = length
    missing = list(dict.fromkeys(name or place for _, name, place in _free_dimensions(graph)))
    if missing:
        raise ModelRefused(f"the inputs' shapes are not settled; {_how_to_bind(missing)}")
    del graph.value_info[:]
    for output in graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")


def _check_bindings(graph: onnx.GraphProto, bindings: Mapping[str, int]) -> None:
    known = {label for _, name, place in _free_dimensions(graph) for label in (name, place) if label}
    for name, length in bindings.items():
        if name not in known:
            choice = f"its free dimensions are {', '.join(sorted(known))}" if known else "it has no free dimensions"
            raise UsageError(f"--bind {name}={length}: the model knows no such dimension; {choice}")
        if not 1 <= length < 2**31:
            raise UsageError(f"--bind {name}={length}: a length is at least 1")


def _free_dimensions(graph: onnx.GraphProto) -> Iterator[tuple[onnx.TensorShapeProto.Dimension, str, str]]:
    """Each input dimension without a length: itself, its name (may be empty), and `INPUT:AXIS`."""
    for one in graph.input:
        kind = one.type.tensor_type
        if not one.type.HasField("tensor_type") or kind.elem_type not in nodes.DATATYPES:
            raise ModelRefused(f"the input {one.name[:80]!r} is not a tensor of numbers; only those can be fed")
        if not kind.HasField("shape"):
            raise ModelRefused(
                f"the input {one.name[:80]!r} does not say how many dimensions it has; export it with a shape"
            )
        for axis, dimension in enumerate(kind.shape.dim):
            if dimension.dim_value <= 0:
                yield dimension, dimension.dim_param, f"{one.name}:{axis}"


def _how_to_bind(names: list[str]) -> str:
    """The words to type; 1 is offered where it is what almost everyone means."""
    return "give each length: " + " ".join(f"--bind {name}={1 if _is_batch(name) else 'LENGTH'}" for name in names)


def _is_batch(name: str) -> bool:
    return name.lower() in ("n", "b", "bs", "batch", "batch_size", "none") or name.endswith(":0")
