"""Bytes that say they are a TFLite model: read into the schema's objects, checked, and written again.

What is read is refused (ModelRefused) unless every index in it leads somewhere; what its operators mean is LiteRT's to
say, in a child process (`tflite_trial`). What is written has the graph first and the weights after it, each at a
multiple of 64 bytes, so that chunks cut between them keep their bytes when only the graph changes. The same model gives
the same bytes. Names, signatures, metadata: only what a slice needs is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated

from edgesplit.errors import ModelRefused
from edgesplit_partitioner.ir.chunking import ALIGNMENT, Bytes, Piece, padded_bytes, plain_runs, weight_runs

schema: Any = schema_py_generated
"""Generated code, whose types are not those that it takes: arrays for lists, bytes for text."""
IDENTIFIER = b"TFL3"
VERSION = 3
EDGE_TPU = "edgetpu-custom-op"
OPERATORS: Mapping[int, str] = {
    code: name for name, code in vars(schema.BuiltinOperator).items() if not name.startswith("_")
}
"""Names of the built-in operators by their number."""
CUSTOM = "CUSTOM"
PREFIX = ALIGNMENT
"""Bytes before each weight: zeros, and in the last four its length, as a flatbuffer's vector has it."""
KEEPS_STATE = frozenset({"VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE", "CALL_ONCE", "HASHTABLE"})
"""Operators over resources that live in the interpreter, out of every tensor's sight."""
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
"""`schema.ModelT`, which has no types of its own; so have the other objects of the schema."""


def read_model(raw: bytes) -> Model:
    """The model in `raw`; ModelRefused says what is wrong with it. Weights stay views of `raw`."""
    if raw[4:8] != IDENTIFIER:
        raise ModelRefused("not a TFLite model: it does not say TFL3")
    try:
        _Budget(raw).walk()
        model = schema.ModelT.InitFromPackedBuf(raw, 0)
    except (struct.error, IndexError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ModelRefused(f"not a whole TFLite file: its {len(raw)} bytes are truncated or damaged") from error
    _check(model)
    for buffer in model.buffers:
        _bring_in(buffer, raw)
    return model


class _Budget:
    """Refuses a file whose parts are more than it has room for: tables that are used many times over, many levels deep,
    would keep a reader busy for ever. An honest file's table costs at least the four bytes that lead to it."""

    def __init__(self, raw: bytes) -> None:
        self._root = schema.Model.GetRootAs(raw, 0)
        self._left = len(raw)

    def spend(self, *counts: int) -> None:
        """So many parts more."""
        self._left -= sum(counts)
        if self._left < 0:
            raise ModelRefused("not a whole TFLite file: its parts are used over and over")

    def walk(self) -> None:
        """Look at every vector of tables, and at whatever has a length of its own."""
        root = self._root
        self.spend(root.OperatorCodesLength(), root.BuffersLength(), root.MetadataLength(), root.SubgraphsLength())
        self.spend(root.SignatureDefsLength(), root.ExternalBuffersLength(), root.ExternalBufferGroupsLength())
        for number in range(root.SignatureDefsLength()):
            signature = root.SignatureDefs(number)
            self.spend(signature.InputsLength(), signature.OutputsLength())
        for number in range(root.SubgraphsLength()):
            graph = root.Subgraphs(number)
            self.spend(graph.TensorsLength(), graph.OperatorsLength(), graph.InputsLength(), graph.OutputsLength())
            for place in range(graph.TensorsLength()):
                self._tensor(graph.Tensors(place))
            for place in range(graph.OperatorsLength()):
                one = graph.Operators(place)
                self.spend(one.InputsLength(), one.OutputsLength(), one.IntermediatesLength())

    def _tensor(self, tensor: Any) -> None:
        self.spend(tensor.ShapeLength(), tensor.VariantTensorsLength(), len(tensor.Name() or b""))
        sparsity = tensor.Sparsity()
        if sparsity is not None:
            self.spend(sparsity.DimMetadataLength())


def _check(model: Model) -> None:
    """Versions, and every index that another function follows."""
    if model.version != VERSION:
        raise ModelRefused(f"a TFLite file of schema version {model.version}; only {VERSION} is known")
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
    if any(one is None for one in (graph, *(graph.tensors or ()), *(graph.operators or ()), *model.buffers)):
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
    """LiteRT runs operators as they are listed: each tensor has one writer, and that before its readers."""
    made = set(ints(graph.inputs)) | {index for index, one in enumerate(graph.tensors) if one.isVariable}
    written = {index for operator in graph.operators for index in ints(operator.outputs) if index >= 0}
    for operator in graph.operators:
        outputs = {index for index in ints(operator.outputs) if index >= 0}
        early = [index for index in ints(operator.inputs) if index in written - made]
        if early:
            raise ModelRefused(f"the tensor {tensor_name(graph.tensors[early[0]])!r} is read before it is computed")
        again = [index for index in outputs & made if not graph.tensors[index].isVariable]
        if again:
            raise ModelRefused(f"the tensor {tensor_name(graph.tensors[again[0]])!r} is written twice")
        made |= outputs
    missing = [index for index in ints(graph.outputs) if index not in made and not graph.tensors[index].buffer]
    if missing:
        raise ModelRefused(f"the output {tensor_name(graph.tensors[missing[0]])!r} is computed by no operator")


def _bring_in(buffer: Model, raw: bytes) -> None:
    """A buffer that lies behind the flatbuffer (files above 2 GB) becomes like the others, still a view of `raw`."""
    if buffer.offset > 1:
        if buffer.offset + buffer.size > len(raw):
            raise ModelRefused("not a whole TFLite file: weights behind its graph are missing")
        buffer.data = np.frombuffer(raw, np.uint8, buffer.size, buffer.offset)
    buffer.offset = buffer.size = 0


def ints(values: Iterable[int] | None) -> tuple[int, ...]:
    """A vector of the schema (an array, a list or None) as plain numbers."""
    return () if values is None else tuple(int(value) for value in values)


def tensor_name(tensor: Model) -> str:
    """As the file has it, for people: it may be empty, or that of several tensors."""
    name = tensor.name or b""
    return name.decode("utf-8", "replace")[:200] if isinstance(name, bytes) else str(name)[:200]


def operator_name(model: Model, operator: Model) -> str:
    """`CONV_2D`, or `CUSTOM`."""
    code = model.operatorCodes[operator.opcodeIndex]
    return OPERATORS.get(max(code.builtinCode, code.deprecatedBuiltinCode), "UNKNOWN")


def custom_name(model: Model, operator: Model) -> str:
    """What a custom operator is called."""
    name = model.operatorCodes[operator.opcodeIndex].customCode or b""
    return name.decode("utf-8", "replace")[:80] if isinstance(name, bytes) else str(name)[:80]


def tensors_of(graph: Model, operator: Model) -> Iterator[int]:
    """Every tensor that an operator needs to exist: read, written, held between, or holding another one's scales."""
    direct = (*ints(operator.inputs), *ints(operator.outputs), *ints(operator.intermediates))
    for index in direct:
        if index == -1:  # an optional input that is not given
            continue
        yield index
        if 0 <= index < len(graph.tensors or ()):
            yield from scales_of(graph.tensors[index])


def scales_of(tensor: Model) -> tuple[int, ...]:
    """Tensors that hold this tensor's scales and zero points (blockwise quantisation); mostly none."""
    details: Any = tensor.quantization.details if tensor.quantization is not None else None
    if not isinstance(details, schema.BlockwiseQuantizationT):
        return ()
    return tuple(one for one in (details.scales, details.zeroPoints) if one > 0)


def subgraphs_of(operator: Model) -> tuple[int, ...]:
    """The subgraphs that a control-flow operator runs."""
    found = []
    for options in (operator.builtinOptions, operator.builtinOptions2):
        found += [int(getattr(options, name)) for name in _SUBGRAPH_FIELDS if hasattr(options, name)]
        found += ints(getattr(options, "branchSubgraphIndices", None))
    return tuple(found)


def renumber_subgraphs(operator: Model, number_of: Mapping[int, int]) -> None:
    """The same operator with its subgraphs under other numbers, in place."""
    for options in (operator.builtinOptions, operator.builtinOptions2):
        for name in _SUBGRAPH_FIELDS:
            if hasattr(options, name):
                setattr(options, name, number_of[int(getattr(options, name))])
        if getattr(options, "branchSubgraphIndices", None) is not None:
            options.branchSubgraphIndices = [number_of[one] for one in ints(options.branchSubgraphIndices)]


def buffer_bytes(model: Model, index: int) -> int:
    """Size of a buffer's data."""
    data = model.buffers[index].data
    return 0 if data is None else len(data)


def pack(model: Model, owner_of: Mapping[int, str] | None = None) -> list[Bytes]:
    """The model's file as the chunks that it consists of: joined they are the file.

    `owner_of` names the layer that each buffer's chunk is grouped with, in the order in which they shall lie in the
    file; an empty name, or none, is a chunk of its own.
    """
    owners = owner_of or {}
    order = dict.fromkeys((*owners, *range(len(model.buffers))))
    stored = [index for index in order if buffer_bytes(model, index)]
    pieces = [Piece(owners.get(index, ""), _prefixed(model.buffers[index].data)) for index in stored]
    raw = _flatbuffer(model, stored)
    behind = sum(padded_bytes(len(piece.data)) for piece in pieces)
    return plain_runs(raw[: len(raw) - behind]) + weight_runs(pieces)


def _prefixed(data: Any) -> bytes:
    raw = np.ascontiguousarray(data, np.uint8).tobytes()
    return bytes(PREFIX - 4) + struct.pack("<I", len(raw)) + raw


def _flatbuffer(model: Model, stored: list[int]) -> bytes:
    """The file. A flatbuffer is written from its end: the last weight first, then the graph in front of them."""
    builder = flatbuffers.Builder(1 << 16)
    vectors: dict[int, int] = {}
    for index in reversed(stored):
        vectors[index] = _vector(builder, model.buffers[index].data)
        builder.Prep(1, PREFIX - 4)
        builder.Pad(PREFIX - 4)
    tables = [_buffer(builder, vectors.get(index)) for index in range(len(model.buffers))]
    buffers = _offsets(builder, tables)
    codes = _offsets(builder, [one.Pack(builder) for one in model.operatorCodes])
    graphs = _offsets(builder, [one.Pack(builder) for one in model.subgraphs])
    description = builder.CreateString("edgesplit")
    schema.ModelStart(builder)
    schema.ModelAddVersion(builder, VERSION)
    schema.ModelAddOperatorCodes(builder, codes)
    schema.ModelAddSubgraphs(builder, graphs)
    schema.ModelAddDescription(builder, description)
    schema.ModelAddBuffers(builder, buffers)
    builder.Finish(schema.ModelEnd(builder), IDENTIFIER)
    return bytes(builder.Output())


def _vector(builder: Any, data: Any) -> int:
    """A weight's bytes, aligned: kernels read them in place."""
    values = np.ascontiguousarray(data, np.uint8)
    builder.StartVector(1, len(values), ALIGNMENT)
    builder.head = builder.Head() - len(values)
    builder.Bytes[builder.Head() : builder.Head() + len(values)] = values.tobytes()
    return int(builder.EndVector())


def _buffer(builder: Any, vector: int | None) -> int:
    schema.BufferStart(builder)
    if vector is not None:
        schema.BufferAddData(builder, vector)
    return int(schema.BufferEnd(builder))


def _offsets(builder: Any, offsets: list[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return int(builder.EndVector())
