"""The commonest requests and answers of one model, read and written with little ado.

What brings exactly the tensors that a model takes, as bytes that lie as they are needed, needs no further check: it is
recognised here, and everything else is left to `oip`, which says what is wrong with it, or makes something of it. An
answer whose tensors are as large as the last one's has the same words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from edgesplit.lazy_import import later
from edgesplit.limits import LIMITS
from edgesplit.oip import datatypes
from edgesplit.oip import protocol as oip
from edgesplit.oip.protocol import Binary, Body, Buffers, RequestHead, Scalar, Tensor
from edgesplit.oip.shared_memory import BYTE_SIZE, REGION
from edgesplit.release.manifest import TensorSpec

if TYPE_CHECKING:
    import numpy as np
else:
    np = later("numpy")

_HEADS = msgspec.json.Decoder(RequestHead)
_PARTS = attrgetter("name", "shape", "datatype", "parameters", "data")
_MOST_FORMS = 16
_MOST_HEADS = 64
"""JSON parts that come again and again and are known, of one model..."""
_LONGEST_HEAD = 4_096
"""...none longer than that."""


class Layout(NamedTuple):
    """How a tensor of numbers lies in a body that brings it as its model takes it."""

    datatype: str
    shape: list[int]
    parameters: dict[str, Any]
    dtype: np.dtype[Any]
    elements: int

    @classmethod
    def of(cls, spec: TensorSpec) -> Layout | None:
        """None for what must be looked at element by element, or has no fixed size."""
        dtype = datatypes.DTYPES.get(spec.datatype)
        if dtype is None or dtype.kind not in "fiu" or min(spec.shape, default=1) < 1:
            return None
        if dtype != dtype.newbyteorder("<"):
            return None
        count = math.prod(spec.shape)
        return cls(spec.datatype, list(spec.shape), {"binary_data_size": count * dtype.itemsize}, dtype, count)


class Exact(NamedTuple):
    """A request that brings exactly what its model takes, in the words of `oip.InferRequest`."""

    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    id: str
    parameters: Mapping[str, Scalar]
    binary_outputs: Binary


class _Known(NamedTuple):
    """A JSON part that came before."""

    end: int
    """So long is the whole body."""
    places: tuple[tuple[str, np.dtype[Any], int, int, list[int]], ...]
    """Of each input: its name, element type, count, offset and shape."""
    outputs: tuple[str, ...]
    id: str
    parameters: Mapping[str, Scalar]
    binary_outputs: Binary


class Words:
    """One model's. Thread-safe."""

    def __init__(self, model: str, version: str, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> None:
        layouts = {spec.name: Layout.of(spec) for spec in inputs}
        self._layouts = {name: layout for name, layout in layouts.items() if layout is not None}
        self._are_known = len(layouts) == len(self._layouts)
        self._outputs = frozenset(spec.name for spec in outputs)
        self._begin = msgspec.json.encode({"model_name": model, "model_version": version})[:-1]
        self._forms: dict[Any, bytes] = {}
        self._heads: dict[bytes, _Known | None] = {}

    def exactly(self, body: Body, header_length: int | None) -> Exact | None:
        """The request in `body` if its inputs are exactly the model's, and nothing else is there: they are views of
        `body` then. None where others must say what it is."""
        end = len(body)
        if not self._are_known or header_length is None or header_length > min(end, LIMITS.inference_json_bytes):
            return None
        words = bytes(memoryview(body)[:header_length])
        known = self._heads.get(words)
        if known is not None and known.end == end:
            found = {
                name: np.frombuffer(body, dtype, count, at).reshape(shape)
                for name, dtype, count, at, shape in known.places
            }
            return Exact(found, known.outputs, known.id, known.parameters, known.binary_outputs)
        try:
            head = _HEADS.decode(words)
            outputs, binary = oip.wanted_outputs(head)
        except Exception:  # whatever it is, others say it
            return None
        if BYTE_SIZE in head.parameters or REGION in head.parameters or not self._outputs.issuperset(outputs):
            return None
        if any(REGION in one.parameters for one in head.outputs):
            return None
        inputs = self._inputs(head, body, header_length)
        if inputs is None:
            return None
        self._keep(words, inputs, header_length, _Known(end, (), outputs, head.id, head.parameters, binary))
        return Exact(inputs, outputs, head.id, head.parameters, binary)

    def _keep(self, words: bytes, inputs: Mapping[str, Tensor], at: int, known: _Known) -> None:
        """Know it when it comes a third time: many come once, with an id of their own."""
        if len(words) > _LONGEST_HEAD:
            return
        if words not in self._heads:
            if len(self._heads) >= _MOST_HEADS:
                self._heads.clear()
            self._heads[words] = None
            return
        places = []
        for name, tensor in inputs.items():  # in the order in which they lie in the body
            places.append((name, tensor.dtype, tensor.size, at, list(tensor.shape)))
            at += tensor.nbytes
        self._heads[words] = known._replace(places=tuple(places))

    def _inputs(self, head: RequestHead, body: Body, at: int) -> dict[str, Tensor] | None:
        layouts, inputs, end = self._layouts, dict[str, Tensor](), len(body)
        for name, shape, kind, parameters, data in map(_PARTS, head.inputs):
            layout = layouts.get(name)
            if (
                layout is None or kind != layout.datatype or shape != layout.shape or parameters != layout.parameters
                or memoryview(data).nbytes or at % layout.dtype.itemsize or name in inputs
            ):  # fmt: skip
                return None
            behind = at + layout.elements * layout.dtype.itemsize
            if behind > end:
                return None
            inputs[name] = np.frombuffer(body, layout.dtype, layout.elements, at).reshape(shape)
            at = behind
        return inputs if at == end and len(inputs) == len(layouts) else None

    def answer(self, outputs: Mapping[str, Tensor], id: str) -> tuple[Buffers, int] | None:
        """The body with all of these as bytes, in parts, and the length of its JSON; None where `oip` must write it."""
        form = tuple([(name, tensor.shape, tensor.dtype) for name, tensor in outputs.items()])
        end = self._forms.get(form) or self._form(outputs, form)
        if not end or not all(tensor.flags.c_contiguous for tensor in outputs.values()):
            return None
        begin = self._begin + b',"id":' + msgspec.json.encode(id) if id else self._begin
        head = begin + end
        head += b" " * (-len(head) % oip.ALIGN)
        return [head, *(tensor.data.cast("B") for tensor in outputs.values())], len(head)

    def _form(self, outputs: Mapping[str, Tensor], form: Any) -> bytes:
        """Everything behind the id; empty where it cannot be said so simply."""
        if any(tensor.dtype.kind not in "fiu" or not tensor.size for tensor in outputs.values()):
            return b""
        told = [
            {
                "name": name, "shape": list(tensor.shape), "datatype": oip.datatype(tensor),
                "parameters": {"binary_data_size": tensor.nbytes},
            }
            for name, tensor in outputs.items()
        ]  # fmt: skip
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
        found = self._forms[form] = b"," + msgspec.json.encode({"outputs": told})[1:]
        return found
