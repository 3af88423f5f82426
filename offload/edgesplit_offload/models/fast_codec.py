"""Fast path of the protocol codec for requests whose tensors match the model's signature exactly, and for their
answers.

A request that brings exactly the model's input tensors, as aligned binary data, needs no further check. Everything else
is left to `edgesplit.oip.protocol`, which decodes it or raises the error. The JSON parts of requests and answers are
cached, because clients repeat them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edgesplit.limits import LIMITS
from edgesplit.oip import datatypes
from edgesplit.oip import protocol as oip
from edgesplit.oip.protocol import Binary, Body, Buffers, RequestHead, Scalar, Tensor
from edgesplit.oip.shared_memory import BYTE_SIZE, REGION
from edgesplit.release.manifest import TensorSpec

_HEADS = msgspec.json.Decoder(RequestHead)
_PARTS = attrgetter("name", "shape", "datatype", "parameters", "data")
_MAX_SUFFIXES = 16
_MAX_HEADS = 64
"""Most cached JSON parts of requests per model."""
_MAX_HEAD_BYTES = 4_096
"""JSON parts longer than this are not cached."""


class TensorLayout(NamedTuple):
    """The binary layout of one numeric input tensor in a body."""

    datatype: str
    shape: list[int]
    parameters: dict[str, Any]
    dtype: np.dtype[Any]
    elements: int

    @classmethod
    def from_spec(cls, spec: TensorSpec) -> TensorLayout | None:
        """The layout of `spec`; None for a tensor that needs a check per element or has no fixed size."""
        dtype = datatypes.DTYPES.get(spec.datatype)
        if dtype is None or dtype.kind not in "fiu" or min(spec.shape, default=1) < 1:
            return None
        if dtype != dtype.newbyteorder("<"):
            return None
        count = math.prod(spec.shape)
        return cls(spec.datatype, list(spec.shape), {"binary_data_size": count * dtype.itemsize}, dtype, count)


class FastRequest(NamedTuple):
    """A request that matches the model's signature exactly; field names are those of `oip.InferRequest`."""

    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    id: str
    parameters: Mapping[str, Scalar]
    binary_outputs: Binary


class _CachedHead(NamedTuple):
    """The cached decoding of a JSON part."""

    body_bytes: int
    """Length of the whole body in bytes."""
    layout: tuple[tuple[str, np.dtype[Any], int, int, list[int]], ...]
    """Name, element type, element count, offset and shape of each input."""
    outputs: tuple[str, ...]
    id: str
    parameters: Mapping[str, Scalar]
    binary_outputs: Binary


class FastCodec:
    """Fast codec of one model. Thread-safe."""

    def __init__(self, model: str, version: str, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> None:
        layouts = {spec.name: TensorLayout.from_spec(spec) for spec in inputs}
        self._layouts = {name: layout for name, layout in layouts.items() if layout is not None}
        self._is_supported = len(layouts) == len(self._layouts)
        self._outputs = frozenset(spec.name for spec in outputs)
        self._prefix = msgspec.json.encode({"model_name": model, "model_version": version})[:-1]
        self._suffixes: dict[Any, bytes] = {}
        self._heads: dict[bytes, _CachedHead | None] = {}

    def decode_request(self, body: Body, header_length: int | None) -> FastRequest | None:
        """The request in `body` if its inputs match the model's signature exactly and it asks for nothing special; the
        inputs are views of `body`. None if the general decoder must handle it."""
        end = len(body)
        if not self._is_supported or header_length is None or header_length > min(end, LIMITS.inference_json_bytes):
            return None
        json_part = bytes(memoryview(body)[:header_length])
        cached = self._heads.get(json_part)
        if cached is not None and cached.body_bytes == end:
            inputs_cached = {
                name: np.frombuffer(body, dtype, count, at).reshape(shape)
                for name, dtype, count, at, shape in cached.layout
            }
            return FastRequest(inputs_cached, cached.outputs, cached.id, cached.parameters, cached.binary_outputs)
        try:
            head = _HEADS.decode(json_part)
            outputs, binary = oip.requested_outputs(head)
        except Exception:  # the general decoder raises the proper error
            return None
        if BYTE_SIZE in head.parameters or REGION in head.parameters or not self._outputs.issuperset(outputs):
            return None
        if any(REGION in output.parameters for output in head.outputs):
            return None
        inputs = self._decode_inputs(head, body, header_length)
        if inputs is None:
            return None
        cached_head = _CachedHead(end, (), outputs, head.id, head.parameters, binary)
        self._cache_head(json_part, inputs, header_length, cached_head)
        return FastRequest(inputs, outputs, head.id, head.parameters, binary)

    def _cache_head(self, json_part: bytes, inputs: Mapping[str, Tensor], at: int, head: _CachedHead) -> None:
        """Cache the JSON part when it comes the second time, so that it is used from the third on: many come once, with
        an id of their own."""
        if len(json_part) > _MAX_HEAD_BYTES:
            return
        if json_part not in self._heads:
            if len(self._heads) >= _MAX_HEADS:
                self._heads.clear()
            self._heads[json_part] = None
            return
        layout = []
        for name, tensor in inputs.items():  # in the order of their bytes in the body
            layout.append((name, tensor.dtype, tensor.size, at, list(tensor.shape)))
            at += tensor.nbytes
        self._heads[json_part] = head._replace(layout=tuple(layout))

    def _decode_inputs(self, head: RequestHead, body: Body, at: int) -> dict[str, Tensor] | None:
        layouts, inputs, end = self._layouts, dict[str, Tensor](), len(body)
        for name, shape, kind, parameters, data in map(_PARTS, head.inputs):
            layout = layouts.get(name)
            if (
                layout is None or kind != layout.datatype or shape != layout.shape or parameters != layout.parameters
                or memoryview(data).nbytes or at % layout.dtype.itemsize or name in inputs
            ):  # fmt: skip
                return None
            end_of_tensor = at + layout.elements * layout.dtype.itemsize
            if end_of_tensor > end:
                return None
            inputs[name] = np.frombuffer(body, layout.dtype, layout.elements, at).reshape(shape)
            at = end_of_tensor
        return inputs if at == end and len(inputs) == len(layouts) else None

    def encode_response(self, outputs: Mapping[str, Tensor], id: str) -> tuple[Buffers, int] | None:
        """The body with all `outputs` as binary data, in parts, and the length of its JSON part; None if the general
        encoder must write it."""
        form = tuple([(name, tensor.shape, tensor.dtype) for name, tensor in outputs.items()])
        end = self._suffixes.get(form) or self._response_suffix(outputs, form)
        if not end or not all(tensor.flags.c_contiguous for tensor in outputs.values()):
            return None
        begin = self._prefix + b',"id":' + msgspec.json.encode(id) if id else self._prefix
        head = begin + end
        head += b" " * (-len(head) % oip.ALIGN)
        return [head, *(tensor.data.cast("B") for tensor in outputs.values())], len(head)

    def _response_suffix(self, outputs: Mapping[str, Tensor], form: Any) -> bytes:
        """The answer's JSON behind the id, cached by shapes and types (`form`); empty if the general encoder must
        write it."""
        if any(tensor.dtype.kind not in "fiu" or not tensor.size for tensor in outputs.values()):
            return b""
        entries = [
            {
                "name": name, "shape": list(tensor.shape), "datatype": oip.datatype(tensor),
                "parameters": {"binary_data_size": tensor.nbytes},
            }
            for name, tensor in outputs.items()
        ]  # fmt: skip
        if len(self._suffixes) >= _MAX_SUFFIXES:
            self._suffixes.clear()
        suffix = self._suffixes[form] = b"," + msgspec.json.encode({"outputs": entries})[1:]
        return suffix
