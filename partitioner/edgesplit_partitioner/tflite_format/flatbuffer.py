"""Reads, checks and writes TFLite files: the flatbuffer and its schema's objects.

A file is refused (ModelRefused) unless every index in it is valid; whether its operators are valid is found out by
LiteRT in a child process (`trial_run`). A file is written with the graph first and the weights after it, each at a
multiple of 64 bytes, so that chunks cut between them keep their bytes when only the graph changes. The same model gives
the same bytes. Of names, signatures and metadata only what a slice needs is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated

from edgesplit.errors import ModelRefused
from edgesplit_partitioner.ir.chunking import (
    ALIGNMENT,
    Bytes,
    WeightData,
    padded_size,
    split_into_chunks,
    weight_chunks,
)

schema: Any = schema_py_generated
"""Generated code, whose type annotations do not match what it holds: arrays where it declares lists, bytes where it
declares text."""
IDENTIFIER = b"TFL3"
"""File identifier of TFLite, at offset 4."""
SCHEMA_VERSION = 3
"""The only schema version that is read."""
EDGE_TPU_OPERATOR = "edgetpu-custom-op"
"""Name of the custom operator that a model compiled for an Edge TPU consists of."""
OPERATOR_NAMES: Mapping[int, str] = {
    code: name for name, code in vars(schema.BuiltinOperator).items() if not name.startswith("_")
}
"""Names of the built-in operators by their number."""
CUSTOM_OPERATOR = "CUSTOM"
"""Name of every operator that is not built in."""
WEIGHT_PREFIX_BYTES = ALIGNMENT
"""Bytes before each weight: zeros, and in the last four its length, as a flatbuffer's vector begins."""
STATEFUL_OPERATORS = frozenset({"VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE", "CALL_ONCE", "HASHTABLE"})
"""Operators on resources that live in the interpreter and are not visible as tensors."""
_SUBGRAPH_FIELDS = (
    "thenSubgraphIndex",
    "elseSubgraphIndex",
    "condSubgraphIndex",
    "bodySubgraphIndex",
    "decompositionSubgraphIndex",
    "comparatorSubgraphIndex",
    "updateComputationSubgraphIndex",
)

Model = Any
"""`schema.ModelT`, which has no types of its own; also stands for the other objects of the schema."""


def read_model(raw: bytes) -> Model:
    """The model in `raw`, whose weights stay views of `raw`; ModelRefused says what is wrong with it."""
    if raw[4:8] != IDENTIFIER:
        raise ModelRefused("not a TFLite model: it does not say TFL3")
    try:
        _PartBudget(raw).walk()
        model = schema.ModelT.InitFromPackedBuf(raw, 0)
    except (struct.error, IndexError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ModelRefused(f"not a whole TFLite file: its {len(raw)} bytes are truncated or damaged") from error
    _check_model(model)
    for buffer in model.buffers:
        _resolve_external(buffer, raw)
    return model


class _PartBudget:
    """Refuses a file with more parts than its size has room for: tables that are referred to many times over, many
    levels deep, would keep a reader busy for ever. In a valid file each table costs at least the four bytes that refer
    to it."""

    def __init__(self, raw: bytes) -> None:
        self._root = schema.Model.GetRootAs(raw, 0)
        self._parts_left = len(raw)

    def spend(self, *counts: int) -> None:
        """Count so many parts; ModelRefused where they exceed the file's size."""
        self._parts_left -= sum(counts)
        if self._parts_left < 0:
            raise ModelRefused("not a whole TFLite file: its parts are referenced too often")

    def walk(self) -> None:
        """Count every vector of tables, and everything else that has a length of its own."""
        root = self._root
        self.spend(root.OperatorCodesLength(), root.BuffersLength(), root.MetadataLength(), root.SubgraphsLength())
        self.spend(root.SignatureDefsLength(), root.ExternalBuffersLength(), root.ExternalBufferGroupsLength())
        for number in range(root.SignatureDefsLength()):
            signature = root.SignatureDefs(number)
            self.spend(signature.InputsLength(), signature.OutputsLength())
        for number in range(root.SubgraphsLength()):
            graph = root.Subgraphs(number)
            self.spend(graph.TensorsLength(), graph.OperatorsLength(), graph.InputsLength(), graph.OutputsLength())
            for position in range(graph.TensorsLength()):
                self._tensor(graph.Tensors(position))
            for position in range(graph.OperatorsLength()):
                operator = graph.Operators(position)
                self.spend(operator.InputsLength(), operator.OutputsLength(), operator.IntermediatesLength())

    def _tensor(self, tensor: Any) -> None:
        self.spend(tensor.ShapeLength(), tensor.VariantTensorsLength(), len(tensor.Name() or b""))
        sparsity = tensor.Sparsity()
        if sparsity is not None:
            self.spend(sparsity.DimMetadataLength())


def _check_model(model: Model) -> None:
    """Check the schema version, and every index that another function follows; ModelRefused where one is invalid."""
    if model.version != SCHEMA_VERSION:
        raise ModelRefused(f"a TFLite file of schema version {model.version}; only {SCHEMA_VERSION} is known")
    if not model.subgraphs or not model.operatorCodes or not model.buffers:
        raise ModelRefused("not a whole TFLite file: it has no graph, no operators or no buffers")
    main = model.subgraphs[0]
    if not main.operators:
        raise ModelRefused("the model has no operators, so there is nothing to run or to cut")
    if main.outputs is None or not len(main.outputs):
        raise ModelRefused("the model has no outputs, so there is nothing to compute")
    for graph in model.subgraphs:
        _check_graph(model, graph)
    _check_order(main)


def _check_graph(model: Model, graph: Model) -> None:
    if any(item is None for item in (graph, *(graph.tensors or ()), *(graph.operators or ()), *model.buffers)):
        raise ModelRefused("not a whole TFLite file: parts of it are missing")
    count = len(graph.tensors or ())
    for tensor in graph.tensors or ():
        if not 0 <= tensor.buffer < len(model.buffers) or tensor.externalBuffer:
            raise ModelRefused(f"the weights of {tensor_name(tensor)!r} are not in the file")
    for operator in graph.operators or ():
        if not 0 <= operator.opcodeIndex < len(model.operatorCodes):
            raise ModelRefused("not a whole TFLite file: an operator has no code")
        if operator.largeCustomOptionsSize:
            raise ModelRefused("a custom operator has its options outside of the flatbuffer, which is not read")
        if not set(tensors_of(graph, operator)) <= set(range(count)):
            raise ModelRefused("not a whole TFLite file: an operator uses a tensor that is not there")
        if not all(0 <= index < len(model.subgraphs) for index in subgraphs_of(operator)):
            raise ModelRefused("not a whole TFLite file: an operator uses a subgraph that is not there")
    for index in (*ints(graph.inputs), *ints(graph.outputs)):
        if not 0 <= index < count:
            raise ModelRefused("not a whole TFLite file: an input or output is not there")


def _check_order(graph: Model) -> None:
    """Check that each tensor has one writer, listed before its readers: LiteRT runs operators in the order of the
    file."""
    available = set(ints(graph.inputs)) | {index for index, tensor in enumerate(graph.tensors) if tensor.isVariable}
    written = {index for operator in graph.operators for index in ints(operator.outputs) if index >= 0}
    for operator in graph.operators:
        outputs = {index for index in ints(operator.outputs) if index >= 0}
        early = [index for index in ints(operator.inputs) if index in written - available]
        if early:
            raise ModelRefused(f"the tensor {tensor_name(graph.tensors[early[0]])!r} is read before it is computed")
        rewritten = [index for index in outputs & available if not graph.tensors[index].isVariable]
        if rewritten:
            raise ModelRefused(f"the tensor {tensor_name(graph.tensors[rewritten[0]])!r} is written twice")
        available |= outputs
    missing = [index for index in ints(graph.outputs) if index not in available and not graph.tensors[index].buffer]
    if missing:
        raise ModelRefused(f"the output {tensor_name(graph.tensors[missing[0]])!r} is computed by no operator")


def _resolve_external(buffer: Model, raw: bytes) -> None:
    """Make a buffer that lies behind the flatbuffer (files above 2 GB) like the others; its data stays a view of
    `raw`."""
    if buffer.offset > 1:
        if buffer.offset + buffer.size > len(raw):
            raise ModelRefused("not a whole TFLite file: weights behind its graph are missing")
        buffer.data = np.frombuffer(raw, np.uint8, buffer.size, buffer.offset)
    buffer.offset = buffer.size = 0


def ints(values: Iterable[int] | None) -> tuple[int, ...]:
    """A vector of the schema (an array, a list or None) as a tuple of Python integers."""
    return () if values is None else tuple(int(value) for value in values)


def tensor_name(tensor: Model) -> str:
    """A tensor's name as the file has it, for people: it may be empty, and several tensors may share it."""
    name = tensor.name or b""
    return name.decode("utf-8", "replace")[:200] if isinstance(name, bytes) else str(name)[:200]


def operator_name(model: Model, operator: Model) -> str:
    """An operator's type, for example `CONV_2D`, or `CUSTOM`."""
    code = model.operatorCodes[operator.opcodeIndex]
    return OPERATOR_NAMES.get(max(code.builtinCode, code.deprecatedBuiltinCode), "UNKNOWN")


def custom_name(model: Model, operator: Model) -> str:
    """Name of a custom operator."""
    name = model.operatorCodes[operator.opcodeIndex].customCode or b""
    return name.decode("utf-8", "replace")[:80] if isinstance(name, bytes) else str(name)[:80]


def tensors_of(graph: Model, operator: Model) -> Iterator[int]:
    """Index of every tensor that an operator needs: inputs, outputs, intermediates, and tensors that hold the scales of
    these."""
    direct = (*ints(operator.inputs), *ints(operator.outputs), *ints(operator.intermediates))
    for index in direct:
        if index == -1:  # an optional input that is not given
            continue
        yield index
        if 0 <= index < len(graph.tensors or ()):
            yield from scale_tensors_of(graph.tensors[index])


def scale_tensors_of(tensor: Model) -> tuple[int, ...]:
    """Indices of the tensors that hold this tensor's scales and zero points (blockwise quantisation); mostly none."""
    details: Any = tensor.quantization.details if tensor.quantization is not None else None
    if not isinstance(details, schema.BlockwiseQuantizationT):
        return ()
    return tuple(index for index in (details.scales, details.zeroPoints) if index > 0)


def subgraphs_of(operator: Model) -> tuple[int, ...]:
    """Indices of the subgraphs that a control-flow operator runs."""
    numbers = []
    for options in (operator.builtinOptions, operator.builtinOptions2):
        numbers += [int(getattr(options, name)) for name in _SUBGRAPH_FIELDS if hasattr(options, name)]
        numbers += ints(getattr(options, "branchSubgraphIndices", None))
    return tuple(numbers)


def renumber_subgraphs(operator: Model, number_of: Mapping[int, int]) -> None:
    """Replace the operator's subgraph indices by those of `number_of`, in place."""
    for options in (operator.builtinOptions, operator.builtinOptions2):
        for name in _SUBGRAPH_FIELDS:
            if hasattr(options, name):
                setattr(options, name, number_of[int(getattr(options, name))])
        if getattr(options, "branchSubgraphIndices", None) is not None:
            options.branchSubgraphIndices = [number_of[number] for number in ints(options.branchSubgraphIndices)]


def buffer_bytes(model: Model, index: int) -> int:
    """Size of a buffer's data in bytes."""
    data = model.buffers[index].data
    return 0 if data is None else len(data)


def pack(model: Model, owner_of: Mapping[int, str] | None = None) -> list[Bytes]:
    """The model's file as the list of its chunks; joined they are the file.

    `owner_of` names the layer that each buffer's chunk is grouped with, in the order in which they lie in the file; a
    buffer without an entry, or with an empty name, gets a chunk of its own.
    """
    owners = owner_of or {}
    order = dict.fromkeys((*owners, *range(len(model.buffers))))
    stored = [index for index in order if buffer_bytes(model, index)]
    pieces = [WeightData(owners.get(index, ""), _with_length_prefix(model.buffers[index].data)) for index in stored]
    raw = _write_flatbuffer(model, stored)
    weights_bytes = sum(padded_size(len(piece.data)) for piece in pieces)
    return split_into_chunks(raw[: len(raw) - weights_bytes]) + weight_chunks(pieces)


def _with_length_prefix(data: Any) -> bytes:
    raw = np.ascontiguousarray(data, np.uint8).tobytes()
    return bytes(WEIGHT_PREFIX_BYTES - 4) + struct.pack("<I", len(raw)) + raw


def _write_flatbuffer(model: Model, stored: list[int]) -> bytes:
    """The file's bytes. A flatbuffer is written from its end: the last weight first, then the graph in front of the
    weights."""
    builder = flatbuffers.Builder(1 << 16)
    vectors: dict[int, int] = {}
    # The builder fills its buffer from the end: what is written first lies last in the file.
    for index in reversed(stored):
        vectors[index] = _write_vector(builder, model.buffers[index].data)
        builder.Prep(1, WEIGHT_PREFIX_BYTES - 4)
        builder.Pad(WEIGHT_PREFIX_BYTES - 4)
    tables = [_write_buffer(builder, vectors.get(index)) for index in range(len(model.buffers))]
    buffers = _write_offsets(builder, tables)
    codes = _write_offsets(builder, [table.Pack(builder) for table in model.operatorCodes])
    graphs = _write_offsets(builder, [table.Pack(builder) for table in model.subgraphs])
    description = builder.CreateString("edgesplit")
    schema.ModelStart(builder)
    schema.ModelAddVersion(builder, SCHEMA_VERSION)
    schema.ModelAddOperatorCodes(builder, codes)
    schema.ModelAddSubgraphs(builder, graphs)
    schema.ModelAddDescription(builder, description)
    schema.ModelAddBuffers(builder, buffers)
    builder.Finish(schema.ModelEnd(builder), IDENTIFIER)
    return bytes(builder.Output())


def _write_vector(builder: Any, data: Any) -> int:
    """Append a weight's bytes to the flatbuffer, aligned because kernels read them in place; returns its offset."""
    values = np.ascontiguousarray(data, np.uint8)
    builder.StartVector(1, len(values), ALIGNMENT)
    builder.head = builder.Head() - len(values)
    builder.Bytes[builder.Head() : builder.Head() + len(values)] = values.tobytes()
    return int(builder.EndVector())


def _write_buffer(builder: Any, vector: int | None) -> int:
    schema.BufferStart(builder)
    if vector is not None:
        schema.BufferAddData(builder, vector)
    return int(schema.BufferEnd(builder))


def _write_offsets(builder: Any, offsets: list[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return int(builder.EndVector())
