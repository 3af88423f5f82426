"""Open Inference Protocol v2 bodies: JSON, and tensors as bytes behind it (the binary tensor data extension).

Promises that decoding raises nothing but MalformedMessage, that each size is checked before it is believed, and that
tensors in the binary part are views of the body, copied only where they lie unaligned. Bodies made here pad their JSON
with spaces so that they do not. A number that JSON cannot hold (NaN, infinity) travels as `null` in JSON data and comes
back as NaN. Tensors in shared memory (`places`) are read and written by the `Memory` that a caller gives, and what it
raises rises. HTTP itself, and whether a model wants these tensors, is left to others, except for `check_tensors`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from edgesplit.errors import InferenceFailed, MalformedMessage, UsageError
from edgesplit.lazy_import import later
from edgesplit.limits import LIMITS
from edgesplit.msgspec_warmup import settle
from edgesplit.oip.shared_memory import Memory, Place, place_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from edgesplit.oip import datatypes
    from edgesplit.release.manifest import TensorSpec

    Tensor = npt.NDArray[Any]
    DTYPES = datatypes.DTYPES
else:
    np, datatypes = later("numpy"), later("edgesplit.oip.datatypes")
    Tensor = Any

HEADER_LENGTH = "inference-header-content-length"
"""The HTTP header that says how long the JSON part of a body is; without it the body is JSON alone."""

Scalar = bool | int | float | str
Body = bytes | bytearray | memoryview
Buffers = list["bytes | memoryview"]
Binary = bool | frozenset[str]
"""Which tensors travel as bytes: all, none, or those named."""
T = TypeVar("T")

SHARED_FROM = 16_384
"""Tensors of fewer bytes are not worth a place in shared memory: they travel in the body."""
ALIGN = 64
_RANK = 16
_BYTES_PREFIX = struct.Struct("<I")


@dataclass(frozen=True)
class InferRequest:
    """One request: tensors in, and which outputs are wanted."""

    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...] = ()
    """Empty: all of them."""
    id: str = ""
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    binary_outputs: Binary = True
    inputs_at: Mapping[str, Place] = field(default_factory=dict)
    """Inputs that lie in shared memory, where whoever sends the request has put them."""
    outputs_at: Mapping[str, Place] = field(default_factory=dict)
    """Outputs that are to be put into shared memory."""
    answer_at: Place | None = None
    """Room for large outputs that have no place of their own (ours; Triton has no such thing)."""


@dataclass(frozen=True)
class InferResponse:
    """One answer, under the id of its request."""

    model: str
    outputs: Mapping[str, Tensor]
    version: str = "1"
    id: str = ""
    parameters: Mapping[str, Scalar] = field(default_factory=dict)


class TensorEntry(msgspec.Struct):
    """A tensor in the JSON of a request or an answer."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Scalar] = {}
    data: msgspec.Raw = msgspec.Raw()


class _Wanted(msgspec.Struct):
    name: str
    parameters: dict[str, Scalar] = {}


class RequestHead(msgspec.Struct):
    """The JSON of a request."""

    inputs: list[TensorEntry]
    outputs: list[_Wanted] = []
    id: str = ""
    parameters: dict[str, Scalar] = {}


class _Response(msgspec.Struct):
    """KServe says null of what it does not say."""

    outputs: list[TensorEntry]
    model_name: str = ""
    model_version: str | None = "1"
    id: str | None = ""
    parameters: dict[str, Scalar] | None = {}


def __getattr__(name: str) -> Any:
    """`DTYPES`, which needs numpy."""
    if name != "DTYPES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = datatypes.DTYPES
    return datatypes.DTYPES


def datatype(tensor: Tensor) -> str:
    """The protocol's name for this array's elements; UsageError where it has none. Text is BYTES."""
    if known := datatypes.KNOWN.get(tensor.dtype):
        return known
    if tensor.dtype.kind in "SU":
        return "BYTES"
    name = datatypes.DATATYPES.get(tensor.dtype.name)
    if name is None:
        raise UsageError(f"arrays of {tensor.dtype} cannot be sent; these can: {', '.join(datatypes.DATATYPES)}")
    return name


def encode_request(request: InferRequest) -> tuple[Buffers, int]:
    """The body, in parts to be sent in order, and the length of its JSON part. Inputs that do not lie in shared memory
    travel as bytes."""
    parts = [
        _encode_tensor(name, tensor, binary=True, at=request.inputs_at.get(name))
        for name, tensor in request.inputs.items()
    ]
    head: dict[str, Any] = {"id": request.id} if request.id else {}
    parameters = dict(request.parameters)
    if request.outputs:
        wanted = [(name, _is_binary(request.binary_outputs, name)) for name in request.outputs]
        head["outputs"] = [
            {"name": name, "parameters": _wanted_at(request.outputs_at.get(name), binary)} for name, binary in wanted
        ]
    else:
        parameters["binary_data_output"] = request.binary_outputs is not False
    if request.answer_at is not None:
        parameters.update(request.answer_at.parameters())
    head["parameters"] = parameters
    head["inputs"] = [entry for entry, _ in parts]
    json = _aligned(head)
    return [json, *(raw for _, raw in parts)], len(json)


def encode_json_request(request: InferRequest) -> bytes:
    """The body with every tensor as JSON, for servers that know nothing else; outputs are wanted so too."""
    head: dict[str, Any] = {"id": request.id} if request.id else {}
    if request.parameters:
        head["parameters"] = dict(request.parameters)
    head["inputs"] = [_encode_tensor(name, tensor, binary=False)[0] for name, tensor in request.inputs.items()]
    if request.outputs:
        head["outputs"] = [{"name": name} for name in request.outputs]
    return msgspec.json.encode(head)


def encode_response(
    response: InferResponse,
    binary: Binary = True,
    *,
    at: Mapping[str, Place] | None = None,
    room: Place | None = None,
    memory: Memory | None = None,
) -> tuple[Buffers, int | None]:
    """The body in parts, and the length of its JSON part, or None where all of it is JSON. Outputs that have a place in
    `at` are put into `memory`, UsageError where one is too small; other large ones too while there is `room`."""
    places = {**(_within(room, response.outputs) if room is not None else {}), **(at or {})}
    parts: list[tuple[dict[str, Any], bytes | memoryview]] = []
    for name, tensor in response.outputs.items():
        place = places.get(name)
        if place is not None and memory is not None:
            parts.append((_put(name, tensor, place, memory), b""))
        else:
            parts.append(_encode_tensor(name, tensor, binary=_is_binary(binary, name)))
    head: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        head["id"] = response.id
    if response.parameters:
        head["parameters"] = dict(response.parameters)
    head["outputs"] = [entry for entry, _ in parts]
    if not any("binary_data_size" in entry["parameters"] for entry, _ in parts):
        return [msgspec.json.encode(head)], None
    json = _aligned(head)
    return [json, *(raw for _, raw in parts if len(raw))], len(json)


def decode_request(body: Body, header_length: int | None, memory: Memory | None = None) -> InferRequest:
    """The request in `body`; MalformedMessage for anything that is not exactly one.

    Floating-point inputs in shared memory may be views of it. Everything else is copied: an index that changes after it
    was checked would read foreign memory.
    """
    head, section = _split(body, header_length, RequestHead)
    inputs = _decode_tensors(head.inputs, section, memory)
    names, binary = wanted_outputs(head)
    return InferRequest(
        inputs=inputs,
        outputs=names,
        id=head.id,
        parameters=head.parameters,
        binary_outputs=binary,
        outputs_at=_outputs_at(head.outputs, memory) if names else {},
        answer_at=_checked("the answer", place_of("the answer", head.parameters), memory),
    )


def wanted_outputs(head: RequestHead) -> tuple[tuple[str, ...], Binary]:
    """The outputs asked for, and which of them as binary data."""
    default = head.parameters.get("binary_data_output") is True
    if not head.outputs:
        return (), default
    names = tuple(wanted.name for wanted in head.outputs)
    if len(set(names)) != len(names):
        raise MalformedMessage("an output is asked for twice")
    asked = (one.name for one in head.outputs if one.parameters.get("binary_data", default) is True)
    return names, frozenset(asked)


def decode_response(body: Body, header_length: int | None, memory: Memory | None = None) -> InferResponse:
    """The answer in `body`; MalformedMessage for anything that is not exactly one. Outputs in `memory` are copied."""
    head, section = _split(body, header_length, _Response)
    outputs = _decode_tensors(head.outputs, section, memory, settled=True)
    version, parameters = head.model_version or "1", head.parameters or {}
    return InferResponse(
        model=head.model_name, outputs=outputs, version=version, id=head.id or "", parameters=parameters
    )


def header_length(headers: Mapping[str, str]) -> int | None:
    """The length of the JSON part by these HTTP headers (lower-case names); None where there is no such header."""
    text = headers.get(HEADER_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise MalformedMessage(f"{HEADER_LENGTH}: {text[:80]!r} is not a length")
    return int(text)


def timeout_s(parameters: Mapping[str, Scalar]) -> float | None:
    """The time that a request gives for its answer; it travels as `timeout`, microseconds, as Triton's does."""
    value = parameters.get("timeout")
    if value is None:
        return None
    if isinstance(value, bool | str) or not 0 < value < 1e15:
        raise MalformedMessage(f"parameter timeout: {str(value)[:80]!r} is not a positive number of microseconds")
    return value / 1e6


def check_tensors(tensors: Mapping[str, Tensor], specs: Iterable[TensorSpec], what: str = "input") -> None:
    """UsageError, saying what was given and what is wanted, unless names, data types and shapes are as in `specs`."""
    wanted = {spec.name: spec for spec in specs}
    if wanted.keys() != tensors.keys():
        missing = sorted(wanted.keys() - tensors.keys())
        kind, name = ("missing", missing[0]) if missing else ("unknown", min(tensors.keys() - wanted.keys()))
        raise UsageError(f"{kind} {what} {name[:80]!r}; the {what}s are {sorted(wanted)}")
    for name, spec in wanted.items():
        given, shape = datatype(tensors[name]), tensors[name].shape
        if given != spec.datatype:
            raise UsageError(f"{what} {name!r} is {given}, but must be {spec.datatype}")
        if shape != spec.shape and (
            len(shape) != len(spec.shape) or any(w not in (-1, g) for g, w in zip(shape, spec.shape, strict=True))
        ):
            raise UsageError(f"{what} {name!r} has shape {list(shape)}, but must have {list(spec.shape)}")


def pick_outputs(outputs: Mapping[str, T], names: Sequence[str]) -> dict[str, T]:
    """The outputs asked for, all where none is named; UsageError names the one that does not exist."""
    for name in names:
        if name not in outputs:
            raise UsageError(f"unknown output {name[:80]!r}; the outputs are {sorted(outputs)}")
    return {name: outputs[name] for name in (names or outputs)}


def server_metadata(*extensions: str) -> dict[str, Any]:
    """The answer to `GET /v2`; `extensions`: those of Triton's that this server has besides."""
    from edgesplit import __version__

    said = ["binary_tensor_data", "model_configuration", *extensions]
    return {"name": "edgesplit", "version": __version__, "extensions": said}


def model_metadata(
    name: str, versions: Iterable[str], inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]
) -> dict[str, Any]:
    """The answer to `GET /v2/models/NAME`."""
    ends = {"inputs": inputs, "outputs": outputs}
    tensors = {
        end: [{"name": one.name, "datatype": one.datatype, "shape": list(one.shape)} for one in specs]
        for end, specs in ends.items()
    }
    return {"name": name, "versions": list(versions), "platform": "edgesplit", **tensors}


def model_config(name: str, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> dict[str, Any]:
    """The answer to `GET /v2/models/NAME/config`, in the words of Triton's model configuration extension."""
    ends = {"input": inputs, "output": outputs}
    tensors = {
        end: [{"name": one.name, "data_type": _config_type(one.datatype), "dims": list(one.shape)} for one in specs]
        for end, specs in ends.items()
    }
    return {"name": name, "platform": "edgesplit", "backend": "edgesplit", "max_batch_size": 0, **tensors}


def remote_name(release: str, device_class: str, row: str) -> str:
    """The model that an offload server knows the far half of one row of one plan by."""
    return f"{release}.{device_class}.{row}"


def parse_remote_name(name: str) -> tuple[str, str, str]:
    """Release, device class and row of `remote_name`; MalformedMessage if it is none."""
    release, _, rest = name.partition(".")
    device_class, _, row = rest.rpartition(".")
    if not (release and device_class and row):
        raise MalformedMessage(f"not RELEASE.DEVICE_CLASS.ROW: {name[:200]!r}")
    return release, device_class, row


def _config_type(name: str) -> str:
    return "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"


def _is_binary(binary: Binary, name: str) -> bool:
    return binary if isinstance(binary, bool) else name in binary


def _aligned(head: dict[str, Any]) -> bytes:
    """JSON of `head`, padded by spaces to a length at which tensors lie aligned."""
    json = msgspec.json.encode(head)
    return json + b" " * (-len(json) % ALIGN)


def _encode_tensor(
    name: str, tensor: Tensor, *, binary: bool, at: Place | None = None
) -> tuple[dict[str, Any], bytes | memoryview]:
    """The tensor's entry in the JSON, and its bytes where it travels as bytes."""
    kind = datatype(tensor)
    entry: dict[str, Any] = {"name": name, "shape": list(tensor.shape), "datatype": kind, "parameters": {}}
    if at is not None:
        entry["parameters"] = at.parameters()
        return entry, b""
    if not binary:
        entry["data"] = _texts(name, tensor) if kind == "BYTES" else tensor.ravel().tolist()
        return entry, b""
    raw = raw_bytes(tensor)
    entry["parameters"]["binary_data_size"] = len(raw)
    return entry, raw


def _put(name: str, tensor: Tensor, place: Place, memory: Memory) -> dict[str, Any]:
    """The tensor's entry in the JSON, once its bytes are in `memory`."""
    raw = raw_bytes(tensor)
    if len(raw) > place.size:
        raise UsageError(f"output {name!r} takes {len(raw)} bytes of shared memory, and {place.size} were given for it")
    used = Place(place.region, len(raw), place.offset)
    memory.write(used, [raw])
    return _encode_tensor(name, tensor, binary=True, at=used)[0]


def _wanted_at(place: Place | None, binary: bool) -> dict[str, Any]:
    return {"binary_data": binary} if place is None else dict(place.parameters())


def _outputs_at(wanted: list[_Wanted], memory: Memory | None) -> dict[str, Place]:
    """Where outputs are to be put; each place is there now."""
    places = {one.name: _checked(one.name, place_of(one.name, one.parameters), memory) for one in wanted}
    return {name: place for name, place in places.items() if place is not None}


def _checked(name: str, place: Place | None, memory: Memory | None) -> Place | None:
    """The place, which is there now."""
    if place is not None:
        _served(name, memory).check(place)
    return place


def _within(room: Place, tensors: Mapping[str, Tensor]) -> dict[str, Place]:
    """Places in `room` for the large tensors, one behind the other, as far as they fit."""
    places: dict[str, Place] = {}
    offset, end = room.offset, room.offset + room.size
    for name, tensor in tensors.items():
        offset += -offset % ALIGN
        if tensor.nbytes >= SHARED_FROM and tensor.dtype.kind not in "OSU" and offset + tensor.nbytes <= end:
            places[name] = Place(room.region, tensor.nbytes, offset)
            offset += tensor.nbytes
    return places


def _served(name: str, memory: Memory | None) -> Memory:
    if memory is None:
        raise MalformedMessage(f"tensor {name[:80]!r}: shared memory is not served here: send its bytes")
    return memory


def raw_bytes(tensor: Tensor) -> bytes | memoryview:
    """The tensor as it travels: little-endian, in C order, not copied where it lies so; BYTES behind their lengths."""
    kind = datatype(tensor)
    return (
        b"".join(map(_prefixed, tensor.ravel().tolist())) if kind == "BYTES" else _raw(tensor, datatypes.DTYPES[kind])
    )


def _raw(tensor: Tensor, dtype: np.dtype[Any]) -> memoryview:
    """The elements' bytes, little-endian and in C order; no copy where they lie so already."""
    flat = np.ascontiguousarray(tensor, dtype=dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8).data.toreadonly()


def _prefixed(element: bytes | str) -> bytes:
    """One BYTES element as it travels: its length, then itself."""
    raw = element.encode() if isinstance(element, str) else bytes(element)
    return _BYTES_PREFIX.pack(len(raw)) + raw


def _texts(name: str, tensor: Tensor) -> list[str]:
    """The elements of a BYTES tensor as JSON strings."""
    try:
        return [one if isinstance(one, str) else bytes(one).decode() for one in tensor.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise InferenceFailed(f"output {name!r} is not UTF-8 text: ask for it as binary data") from error


class _Section:
    """What follows the JSON: the tensors' bytes, taken in order."""

    def __init__(self, rest: memoryview) -> None:
        self._rest = rest

    def take(self, name: str, size: object) -> memoryview:
        """The next `size` bytes, which are those of the tensor `name`."""
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(self._rest):
            raise MalformedMessage(f"tensor {name[:80]!r}: binary_data_size {str(size)[:80]} of {len(self._rest)} left")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def finish(self) -> None:
        """Nothing may be left."""
        if len(self._rest):
            raise MalformedMessage(f"{len(self._rest)} bytes follow the last tensor")


def _split(body: Body, length: int | None, kind: type[T]) -> tuple[T, _Section]:
    """The JSON part, decoded, and the bytes after it."""
    view = memoryview(body).cast("B")
    end = len(view) if length is None else length
    if len(view) > LIMITS.http_body_bytes or not 0 <= end <= len(view):
        raise MalformedMessage(f"a JSON part of {end} bytes in a body of {len(view)}")
    if end > LIMITS.inference_json_bytes:
        raise MalformedMessage(f"{end} bytes of JSON, at most {LIMITS.inference_json_bytes}: send binary tensor data")
    return _from_json(view[:end], kind), _Section(view[end:])


def _from_json(raw: Body | msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise MalformedMessage(f"inference body: {error}") from error


def _decode_tensors(
    entries: list[TensorEntry], section: _Section, memory: Memory | None, *, settled: bool = False
) -> dict[str, Tensor]:
    """All tensors by name, each once, with no byte left over."""
    if len(entries) > LIMITS.inference_tensors:
        raise MalformedMessage(f"{len(entries)} tensors, at most {LIMITS.inference_tensors}")
    tensors: dict[str, Tensor] = {}
    shared = 0
    for entry in entries:
        if entry.name in tensors:
            raise MalformedMessage(f"tensor {entry.name[:80]!r} is there twice")
        place = place_of(entry.name, entry.parameters)
        if place is None:
            tensors[entry.name] = _decode_tensor(entry, section)
            continue
        shared += place.size
        if shared > LIMITS.http_body_bytes:
            raise MalformedMessage(f"more than {LIMITS.http_body_bytes} bytes of tensors in shared memory")
        tensors[entry.name] = _shared_tensor(entry, place, _served(entry.name, memory), settled=settled)
    section.finish()
    return tensors


def _shared_tensor(entry: TensorEntry, place: Place, memory: Memory, *, settled: bool) -> Tensor:
    """A tensor that lies in shared memory."""
    dtype = _dtype(entry)
    count = _elements(entry, _BYTES_PREFIX.size if dtype.kind == "O" else dtype.itemsize)
    if len(memoryview(entry.data)) > 0 or "binary_data_size" in entry.parameters:
        raise MalformedMessage(f"tensor {entry.name[:80]!r} lies in shared memory and has data too")
    if dtype.kind != "O" and place.size != count * dtype.itemsize:  # before anything is read
        raise MalformedMessage(
            f"tensor {entry.name[:80]!r}: {place.size} bytes do not fill shape {str(entry.shape)[:80]}"
        )
    if dtype.kind == "O" and place.size > LIMITS.inference_json_bytes:  # each element becomes an object
        raise MalformedMessage(f"tensor {entry.name[:80]!r}: at most {LIMITS.inference_json_bytes} bytes of BYTES")
    raw = memory.read(place, settled=settled or dtype.kind != "f")
    return _from_bytes(entry, raw, dtype, count).reshape(entry.shape)


def _dtype(entry: TensorEntry) -> np.dtype[Any]:
    dtype = datatypes.DTYPES.get(entry.datatype)
    if dtype is None:
        raise MalformedMessage(f"tensor {entry.name[:80]!r}: unknown datatype {entry.datatype[:80]!r}")
    return dtype


def _decode_tensor(entry: TensorEntry, section: _Section) -> Tensor:
    dtype = _dtype(entry)
    count = _elements(entry, _BYTES_PREFIX.size if entry.datatype == "BYTES" else dtype.itemsize)
    given_as_json = len(memoryview(entry.data)) > 0
    if "binary_data_size" not in entry.parameters:
        if not given_as_json:
            raise MalformedMessage(f"tensor {entry.name[:80]!r} has neither data nor binary_data_size")
        return _from_data(entry, dtype, count).reshape(entry.shape)
    raw = section.take(entry.name, entry.parameters["binary_data_size"])
    if given_as_json:
        raise MalformedMessage(f"tensor {entry.name[:80]!r} has both data and binary_data_size")
    return _from_bytes(entry, raw, dtype, count).reshape(entry.shape)


def _elements(entry: TensorEntry, itemsize: int) -> int:
    """How many elements the shape asks for, once it is a shape that a body could hold."""
    lengths = entry.shape
    if len(lengths) > _RANK or min(lengths, default=0) < 0:
        raise MalformedMessage(f"tensor {entry.name[:80]!r}: not a shape: {str(lengths)[:80]}")
    count = math.prod(lengths)
    most = count or math.prod(length or 1 for length in lengths)  # one without elements has a shape of some size, too
    if most * itemsize > LIMITS.http_body_bytes:
        raise MalformedMessage(f"tensor {entry.name[:80]!r}: shape {str(lengths)[:80]} is too large")
    return count


def _from_bytes(entry: TensorEntry, raw: memoryview, dtype: np.dtype[Any], count: int) -> Tensor:
    """The tensor's elements as a flat array over `raw`."""
    if dtype.kind == "O":
        return _objects(_bytes_elements(entry.name, raw, count))
    if len(raw) != count * dtype.itemsize:
        raise MalformedMessage(
            f"tensor {entry.name[:80]!r}: {len(raw)} bytes do not fill shape {str(entry.shape)[:80]}"
        )
    if not count:
        return np.empty(0, dtype)
    flat = np.frombuffer(raw, dtype.newbyteorder("<"))
    if dtype.kind == "b" and int(flat.view(np.uint8).max()) > 1:
        raise MalformedMessage(f"tensor {entry.name[:80]!r}: a BOOL is neither 0 nor 1")
    return flat if flat.flags.aligned and flat.dtype.isnative else flat.astype(dtype)


def _bytes_elements(name: str, raw: memoryview, count: int) -> list[bytes]:
    """`count` elements, each behind its length, filling `raw`."""
    elements: list[bytes] = []
    offset = 0
    while offset < len(raw):
        begin = offset + _BYTES_PREFIX.size
        length = _BYTES_PREFIX.unpack_from(raw, offset)[0] if begin <= len(raw) else 0
        if begin + length > len(raw):
            raise MalformedMessage(f"tensor {name[:80]!r}: its last element is cut short")
        elements.append(bytes(raw[begin : begin + length]))
        offset = begin + length
    if len(elements) != count:
        raise MalformedMessage(f"tensor {name[:80]!r}: {len(elements)} elements for a shape of {count}")
    return elements


def _objects(elements: list[bytes]) -> Tensor:
    """An object array; numpy would otherwise make a fixed-width text array and strip trailing zeros."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


def _from_data(entry: TensorEntry, dtype: np.dtype[Any], count: int) -> Tensor:
    """The tensor's elements, given as JSON: flat, or nested exactly as the shape says."""
    scalar: Any = {"b": bool, "u": int, "i": int, "f": float | None, "O": str}[dtype.kind]
    try:
        values = _from_json(entry.data, list[scalar])
    except MalformedMessage:
        if len(entry.shape) < 2:
            raise
        values = _unnested(entry, scalar)
    if len(values) != count:
        raise MalformedMessage(f"tensor {entry.name[:80]!r}: {len(values)} elements for a shape of {count}")
    if dtype.kind == "O":
        return _objects([text.encode() for text in values])
    return _in_range(entry.name, values, dtype)


def _unnested(entry: TensorEntry, scalar: Any) -> list[Any]:
    """The elements of nested lists, each list as long as the shape says."""
    kind: Any = list[scalar]
    for _ in entry.shape[1:]:
        kind = list[kind]
    level = [_from_json(entry.data, kind)]
    for length in entry.shape:
        if any(len(part) != length for part in level):
            raise MalformedMessage(f"tensor {entry.name[:80]!r}: data is not nested as shape {str(entry.shape)[:80]}")
        level = list(chain.from_iterable(level))
    return level


def _in_range(name: str, values: list[Any], dtype: np.dtype[Any]) -> Tensor:
    """The numbers as `dtype`; one that it cannot hold is refused, never wrapped."""
    if dtype.kind in "ui" and values:
        bounds = np.iinfo(dtype)
        if min(values) < bounds.min or max(values) > bounds.max:
            raise MalformedMessage(f"tensor {name[:80]!r}: a number does not fit {dtype}")
    with np.errstate(over="ignore"):
        array = np.array(values, np.float64 if dtype.kind == "f" else dtype).astype(dtype)
    if dtype.kind == "f" and bool(np.isinf(array).any()):
        raise MalformedMessage(f"tensor {name[:80]!r}: a number does not fit {dtype}")
    return array


settle(__name__)
