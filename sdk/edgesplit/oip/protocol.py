"""Open Inference Protocol v2 bodies: JSON, followed by tensors as bytes (the binary tensor data extension).

Decoding raises only MalformedMessage, each size is checked before it is used, and tensors in the binary part are views
of the body, copied only if unaligned. Bodies encoded here pad their JSON with spaces so that tensors are aligned.
Numbers that JSON cannot hold (NaN, infinity) are `null` in JSON data and decoded as NaN. Tensors in shared memory are
read and written through the caller's `Memory`, whose errors pass through. HTTP itself is not handled here; whether a
model accepts the tensors is only checked by `check_tensors`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from edgesplit.decoding import decode_json
from edgesplit.errors import InferenceFailed, MalformedMessage, UsageError
from edgesplit.input_spec import FRAME
from edgesplit.lazy_import import Tensor as Tensor
from edgesplit.lazy_import import lazy_import, np
from edgesplit.limits import LIMITS
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.oip.shared_memory import Memory, TensorRef, parse_reference

if TYPE_CHECKING:
    from edgesplit.oip import datatypes
    from edgesplit.release.manifest import TensorSpec

    DTYPES = datatypes.DTYPES
else:
    datatypes = lazy_import("edgesplit.oip.datatypes")

HEADER_LENGTH = "inference-header-content-length"
"""HTTP header with the length of the body's JSON part; without it the body is JSON alone."""

Scalar = bool | int | float | str
Body = bytes | bytearray | memoryview
Buffers = list["bytes | memoryview"]
Binary = bool | frozenset[str]
"""Which tensors travel as bytes: all, none, or those named."""
T = TypeVar("T")

MIN_SHARED_BYTES = 16_384
"""Least size in bytes of a tensor that is put into shared memory; smaller ones travel in the body."""
ALIGN = 64
_MAX_RANK = 32
"""Dimensions of a tensor: numpy before version 2 has no more."""
_WHAT = "inference body"
_BYTES_PREFIX = struct.Struct("<I")


@dataclass(frozen=True)
class InferRequest:
    """One request: input tensors, and which outputs are requested."""

    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...] = ()
    """Names of the requested outputs; empty: all."""
    id: str = ""
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    binary_outputs: Binary = True
    inputs_at: Mapping[str, TensorRef] = field(default_factory=dict)
    """Inputs that lie in shared memory, where the sender has put them."""
    outputs_at: Mapping[str, TensorRef] = field(default_factory=dict)
    """Requested outputs that the server must put into shared memory."""
    answer_at: TensorRef | None = None
    """Room in shared memory for large outputs without a reference of their own (edgesplit's extension; Triton has
    none)."""


@dataclass(frozen=True)
class InferResponse:
    """The answer to the request with the same id."""

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


class _RequestedOutput(msgspec.Struct):
    name: str
    parameters: dict[str, Scalar] = {}


class RequestHead(msgspec.Struct):
    """The JSON part of a request."""

    inputs: list[TensorEntry]
    outputs: list[_RequestedOutput] = []
    id: str = ""
    parameters: dict[str, Scalar] = {}


class _Response(msgspec.Struct):
    """The JSON part of an answer. KServe sends null for absent fields."""

    outputs: list[TensorEntry]
    model_name: str = ""
    model_version: str | None = "1"
    id: str | None = ""
    parameters: dict[str, Scalar] | None = {}


def __getattr__(name: str) -> Any:
    """`DTYPES`, loaded on first use because it needs numpy."""
    if name != "DTYPES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = datatypes.DTYPES
    return datatypes.DTYPES


def to_tensor(name: str, value: Tensor | bytes) -> Tensor:
    """The input `value` as an array; UsageError if it is neither an array nor bytes."""
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    raise UsageError(f"input {name[:80]!r} is a {type(value).__name__}, not a numpy array or bytes")


def datatype(tensor: Tensor) -> str:
    """The protocol's name of the array's element type; UsageError if it has none. Text is BYTES."""
    if known := datatypes.NAME_BY_DTYPE.get(tensor.dtype):
        return known
    if tensor.dtype.kind in "SU":
        return "BYTES"
    name = datatypes.NAME_BY_DTYPE_NAME.get(tensor.dtype.name)
    if name is None:
        known = ", ".join(datatypes.NAME_BY_DTYPE_NAME)
        raise UsageError(f"arrays of {tensor.dtype} cannot be sent; these can: {known}")
    return name


def encode_request(request: InferRequest) -> tuple[Buffers, int]:
    """The body, in parts to be sent in order, and the length of its JSON part. Inputs not in shared memory travel as
    bytes."""
    parts = [
        _encode_tensor(name, tensor, binary=True, at=request.inputs_at.get(name))
        for name, tensor in request.inputs.items()
    ]
    head: dict[str, Any] = {"id": request.id} if request.id else {}
    parameters = dict(request.parameters)
    if request.outputs:
        requested = [(name, _is_binary(request.binary_outputs, name)) for name in request.outputs]
        head["outputs"] = [
            {"name": name, "parameters": _output_parameters(request.outputs_at.get(name), binary)}
            for name, binary in requested
        ]
    else:
        parameters["binary_data_output"] = request.binary_outputs is not False
    if request.answer_at is not None:
        parameters.update(request.answer_at.to_parameters())
    head["parameters"] = parameters
    head["inputs"] = [entry for entry, _ in parts]
    json = _encode_aligned(head)
    return [json, *(raw for _, raw in parts)], len(json)


def encode_json_request(request: InferRequest) -> bytes:
    """The body with every tensor as JSON, for servers without the binary extension; the outputs are requested as JSON
    too."""
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
    at: Mapping[str, TensorRef] | None = None,
    room: TensorRef | None = None,
    memory: Memory | None = None,
) -> tuple[Buffers, int | None]:
    """The body in parts, and the length of its JSON part, or None if all of it is JSON.

    Outputs with a reference in `at` are written to `memory`, UsageError if one is too small; other large outputs too
    while they fit into `room`.
    """
    references = {**(_allocate(room, response.outputs) if room is not None else {}), **(at or {})}
    parts: list[tuple[dict[str, Any], bytes | memoryview]] = []
    for name, tensor in response.outputs.items():
        reference = references.get(name)
        if reference is not None and memory is not None:
            parts.append((_store(name, tensor, reference, memory), b""))
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
    json = _encode_aligned(head)
    return [json, *(raw for _, raw in parts if len(raw))], len(json)


def decode_request(body: Body, header_length: int | None, memory: Memory | None = None) -> InferRequest:
    """The request in `body`; MalformedMessage for anything else.

    Floating-point inputs in shared memory may be views of it. All others are copied: an index that changes after its
    check would read foreign memory.
    """
    head, section = _split(body, header_length, RequestHead)
    inputs = _decode_tensors(head.inputs, section, memory)
    names, binary = requested_outputs(head)
    return InferRequest(
        inputs=inputs, outputs=names, id=head.id, parameters=head.parameters, binary_outputs=binary,
        outputs_at=_outputs_at(head.outputs, memory) if names else {},
        answer_at=_check_reference("the answer", parse_reference("the answer", head.parameters), memory),
    )  # fmt: skip


def requested_outputs(head: RequestHead) -> tuple[tuple[str, ...], Binary]:
    """Names of the requested outputs, and which of them as binary data. MalformedMessage if one is requested twice."""
    default = head.parameters.get("binary_data_output") is True
    if not head.outputs:
        return (), default
    names = tuple(output.name for output in head.outputs)
    if len(set(names)) != len(names):
        raise MalformedMessage("an output is requested twice")
    binary_names = (output.name for output in head.outputs if output.parameters.get("binary_data", default) is True)
    return names, frozenset(binary_names)


def decode_response(body: Body, header_length: int | None, memory: Memory | None = None) -> InferResponse:
    """The answer in `body`; MalformedMessage for anything else. Outputs in `memory` are copied."""
    head, section = _split(body, header_length, _Response)
    outputs = _decode_tensors(head.outputs, section, memory, stable=True)
    version, parameters = head.model_version or "1", head.parameters or {}
    return InferResponse(head.model_name, outputs, version, head.id or "", parameters)


def header_length(headers: Mapping[str, str]) -> int | None:
    """The length of the JSON part from the HTTP headers (lower-case names); None without such a header."""
    text = headers.get(HEADER_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise MalformedMessage(f"{HEADER_LENGTH}: {text[:80]!r} is not a length")
    return int(text)


def timeout_s(parameters: Mapping[str, Scalar]) -> float | None:
    """The request's timeout in seconds; None without one. It travels as `timeout` in microseconds, as Triton's does."""
    value = parameters.get("timeout")
    if value is None:
        return None
    if isinstance(value, bool | str) or not 0 < value < 1e15:
        raise MalformedMessage(f"parameter timeout: {str(value)[:80]!r} is not a positive number of microseconds")
    return value / 1e6


def check_tensors(tensors: Mapping[str, Tensor], specs: Iterable[TensorSpec]) -> None:
    """UsageError, with the given and the expected value, unless names, data types and shapes match `specs`."""
    wanted = {spec.name: spec for spec in specs}
    if wanted.keys() != tensors.keys():
        missing = sorted(wanted.keys() - tensors.keys())
        if FRAME in tensors and FRAME not in wanted:
            inputs = ", ".join(f"{spec.name!r} ({spec.datatype} {list(spec.shape)})" for spec in wanted.values())
            raise UsageError(
                f"this model takes tensors, {inputs}, and no encoded frame: it was pushed without --input. Send arrays"
                f" (`edgectl infer` reads .npy and .npz), or push it again with --input: `edgectl model push --help`"
            )
        kind, name = ("missing", missing[0]) if missing else ("unknown", min(tensors.keys() - wanted.keys()))
        raise UsageError(f"{kind} input {name[:80]!r}; the inputs are {sorted(wanted)}")
    for name, spec in wanted.items():
        actual, shape = datatype(tensors[name]), tensors[name].shape
        if actual != spec.datatype:
            raise UsageError(f"input {name!r} is {actual}, but must be {spec.datatype}")
        if shape != spec.shape and (
            len(shape) != len(spec.shape) or any(w not in (-1, g) for g, w in zip(shape, spec.shape, strict=True))
        ):
            raise UsageError(f"input {name!r} has shape {list(shape)}, but must have {list(spec.shape)}")


def pick_outputs(outputs: Mapping[str, T], names: Sequence[str]) -> dict[str, T]:
    """The outputs called `names`, or all if empty; UsageError for a name that does not exist."""
    for name in names:
        if name not in outputs:
            raise UsageError(f"unknown output {name[:80]!r}; the outputs are {sorted(outputs)}")
    return {name: outputs[name] for name in (names or outputs)}


def server_metadata(*extensions: str) -> dict[str, Any]:
    """The answer to `GET /v2`; `extensions`: Triton extensions of this server beyond the two always present."""
    from edgesplit import __version__

    all_extensions = ["binary_tensor_data", "model_configuration", *extensions]
    return {"name": "edgesplit", "version": __version__, "extensions": all_extensions}


def model_metadata(
    name: str, versions: Iterable[str], inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec],
    interface: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The answer to `GET /v2/models/NAME`; `interface` is what the agent adds (`edgesplit.client.model_interface`)."""
    ends = {"inputs": inputs, "outputs": outputs}
    tensors = {
        end: [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]
        for end, specs in ends.items()
    }
    added = {"edgesplit": interface} if interface else {}
    return {"name": name, "versions": list(versions), "platform": "edgesplit", **tensors, **added}


def model_config(name: str, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> dict[str, Any]:
    """The answer to `GET /v2/models/NAME/config`, in the words of Triton's model configuration extension."""
    ends = {"input": inputs, "output": outputs}
    tensors = {
        end: [{"name": spec.name, "data_type": _config_type(spec.datatype), "dims": list(spec.shape)} for spec in specs]
        for end, specs in ends.items()
    }
    return {"name": name, "platform": "edgesplit", "backend": "edgesplit", "max_batch_size": 0, **tensors}


def remote_name(release: str, device_class: str, row: str) -> str:
    """The model name under which an offload server serves the remote half of one row of one plan."""
    return f"{release}.{device_class}.{row}"


def parse_remote_name(name: str) -> tuple[str, str, str]:
    """Release, device class and row of a `remote_name`; MalformedMessage if it is not one."""
    release, _, rest = name.partition(".")
    device_class, _, row = rest.rpartition(".")
    if not (release and device_class and row):
        raise MalformedMessage(f"not RELEASE.DEVICE_CLASS.ROW: {name[:200]!r}")
    return release, device_class, row


def _config_type(name: str) -> str:
    return "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"


def _is_binary(binary: Binary, name: str) -> bool:
    return binary if isinstance(binary, bool) else name in binary


def _encode_aligned(head: dict[str, Any]) -> bytes:
    """JSON of `head`, padded with spaces so that tensors behind it are aligned."""
    json = msgspec.json.encode(head)
    return json + b" " * (-len(json) % ALIGN)


def _encode_tensor(
    name: str, tensor: Tensor, *, binary: bool, at: TensorRef | None = None
) -> tuple[dict[str, Any], bytes | memoryview]:
    """The tensor's JSON entry, and its bytes if it travels as bytes."""
    kind = datatype(tensor)
    entry: dict[str, Any] = {"name": name, "shape": list(tensor.shape), "datatype": kind, "parameters": {}}
    if at is not None:
        entry["parameters"] = at.to_parameters()
        return entry, b""
    if not binary:
        entry["data"] = _to_texts(name, tensor) if kind == "BYTES" else tensor.ravel().tolist()
        return entry, b""
    raw = raw_bytes(tensor)
    entry["parameters"]["binary_data_size"] = len(raw)
    return entry, raw


def _store(name: str, tensor: Tensor, reference: TensorRef, memory: Memory) -> dict[str, Any]:
    """Write the tensor to `memory`; returns its JSON entry. UsageError if it does not fit."""
    raw = raw_bytes(tensor)
    if len(raw) > reference.size:
        raise UsageError(
            f"output {name!r} takes {len(raw)} bytes of shared memory, and {reference.size} are provided for it"
        )
    used = TensorRef(reference.region, len(raw), reference.offset)
    memory.write(used, [raw])
    return _encode_tensor(name, tensor, binary=True, at=used)[0]


def _output_parameters(reference: TensorRef | None, binary: bool) -> dict[str, Any]:
    return {"binary_data": binary} if reference is None else dict(reference.to_parameters())


def _outputs_at(wanted: list[_RequestedOutput], memory: Memory | None) -> dict[str, TensorRef]:
    """References of the requested outputs, each checked against `memory`."""
    references = {
        output.name: _check_reference(output.name, parse_reference(output.name, output.parameters), memory)
        for output in wanted
    }
    return {name: reference for name, reference in references.items() if reference is not None}


def _check_reference(name: str, reference: TensorRef | None, memory: Memory | None) -> TensorRef | None:
    """The reference, checked against `memory`; None without one."""
    if reference is not None:
        _require_memory(name, memory).check(reference)
    return reference


def _allocate(room: TensorRef, tensors: Mapping[str, Tensor]) -> dict[str, TensorRef]:
    """References within `room` for the large tensors, one behind the other, as far as they fit."""
    references: dict[str, TensorRef] = {}
    offset, end = room.offset, room.offset + room.size
    for name, tensor in tensors.items():
        offset += -offset % ALIGN
        if tensor.nbytes >= MIN_SHARED_BYTES and tensor.dtype.kind not in "OSU" and offset + tensor.nbytes <= end:
            references[name] = TensorRef(room.region, tensor.nbytes, offset)
            offset += tensor.nbytes
    return references


def _require_memory(name: str, memory: Memory | None) -> Memory:
    if memory is None:
        raise MalformedMessage(f"tensor {name[:80]!r}: shared memory is not served here: send its bytes")
    return memory


def raw_bytes(tensor: Tensor) -> bytes | memoryview:
    """The tensor's wire format: little-endian in C order, without a copy if it is so already; BYTES elements behind
    their lengths."""
    kind = datatype(tensor)
    return (
        b"".join(map(_encode_element, tensor.ravel().tolist()))
        if kind == "BYTES"
        else _raw(tensor, datatypes.DTYPES[kind])
    )


def _raw(tensor: Tensor, dtype: np.dtype[Any]) -> memoryview:
    """The elements' bytes, little-endian in C order, without a copy if they are so already."""
    flat = np.ascontiguousarray(tensor, dtype=dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8).data.toreadonly()


def _encode_element(element: bytes | str) -> bytes:
    """One BYTES element on the wire: its length, then itself."""
    raw = element.encode() if isinstance(element, str) else bytes(element)
    return _BYTES_PREFIX.pack(len(raw)) + raw


def _to_texts(name: str, tensor: Tensor) -> list[str]:
    """The elements of a BYTES tensor as JSON strings."""
    try:
        return [element if isinstance(element, str) else bytes(element).decode() for element in tensor.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise InferenceFailed(f"output {name!r} is not UTF-8 text: request it as binary data") from error


class _BinarySection:
    """The binary part of a body, consumed tensor by tensor."""

    def __init__(self, rest: memoryview) -> None:
        self._rest = rest

    def take(self, name: str, size: object) -> memoryview:
        """The next `size` bytes, which belong to tensor `name`. MalformedMessage if there are fewer."""
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(self._rest):
            raise MalformedMessage(f"tensor {name[:80]!r}: binary_data_size {str(size)[:80]} of {len(self._rest)} left")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def finish(self) -> None:
        """MalformedMessage if bytes are left."""
        if len(self._rest):
            raise MalformedMessage(f"{len(self._rest)} bytes follow the last tensor")


def _split(body: Body, length: int | None, kind: type[T]) -> tuple[T, _BinarySection]:
    """The decoded JSON part, and the binary part behind it."""
    view = memoryview(body).cast("B")
    end = len(view) if length is None else length
    if len(view) > LIMITS.http_body_bytes or not 0 <= end <= len(view):
        raise MalformedMessage(f"a JSON part of {end} bytes in a body of {len(view)}")
    if end > LIMITS.inference_json_bytes:
        raise MalformedMessage(f"{end} bytes of JSON, at most {LIMITS.inference_json_bytes}: send binary tensor data")
    return decode_json(view[:end], kind, _WHAT), _BinarySection(view[end:])


def _decode_tensors(
    entries: list[TensorEntry], section: _BinarySection, memory: Memory | None, *, stable: bool = False
) -> dict[str, Tensor]:
    """All tensors by name. MalformedMessage for a repeated name or surplus bytes."""
    if len(entries) > LIMITS.inference_tensors:
        raise MalformedMessage(f"{len(entries)} tensors, at most {LIMITS.inference_tensors}")
    tensors: dict[str, Tensor] = {}
    shared = 0
    for entry in entries:
        if entry.name in tensors:
            raise MalformedMessage(f"tensor {entry.name[:80]!r} occurs twice")
        reference = parse_reference(entry.name, entry.parameters)
        if reference is None:
            tensors[entry.name] = _decode_tensor(entry, section)
            continue
        shared += reference.size
        if shared > LIMITS.http_body_bytes:
            raise MalformedMessage(f"more than {LIMITS.http_body_bytes} bytes of tensors in shared memory")
        tensors[entry.name] = _shared_tensor(entry, reference, _require_memory(entry.name, memory), stable=stable)
    section.finish()
    return tensors


def _shared_tensor(entry: TensorEntry, reference: TensorRef, memory: Memory, *, stable: bool) -> Tensor:
    """A tensor that lies in shared memory."""
    dtype = _dtype(entry)
    count = _element_count(entry, _BYTES_PREFIX.size if dtype.kind == "O" else dtype.itemsize)
    if len(memoryview(entry.data)) > 0 or "binary_data_size" in entry.parameters:
        raise MalformedMessage(f"tensor {entry.name[:80]!r} lies in shared memory and has data too")
    if dtype.kind != "O" and reference.size != count * dtype.itemsize:  # checked before anything is read
        raise MalformedMessage(
            f"tensor {entry.name[:80]!r}: {reference.size} bytes do not fill shape {str(entry.shape)[:80]}"
        )
    if dtype.kind == "O" and reference.size > LIMITS.inference_json_bytes:  # each element becomes an object
        raise MalformedMessage(f"tensor {entry.name[:80]!r}: at most {LIMITS.inference_json_bytes} bytes of BYTES")
    raw = memory.read(reference, stable=stable or dtype.kind != "f")
    return _from_bytes(entry, raw, dtype, count).reshape(entry.shape)


def _dtype(entry: TensorEntry) -> np.dtype[Any]:
    dtype = datatypes.DTYPES.get(entry.datatype)
    if dtype is None:
        raise MalformedMessage(f"tensor {entry.name[:80]!r}: unknown datatype {entry.datatype[:80]!r}")
    return dtype


def _decode_tensor(entry: TensorEntry, section: _BinarySection) -> Tensor:
    dtype = _dtype(entry)
    count = _element_count(entry, _BYTES_PREFIX.size if entry.datatype == "BYTES" else dtype.itemsize)
    given_as_json = len(memoryview(entry.data)) > 0
    if "binary_data_size" not in entry.parameters:
        if not given_as_json:
            raise MalformedMessage(f"tensor {entry.name[:80]!r} has neither data nor binary_data_size")
        return _from_json_data(entry, dtype, count).reshape(entry.shape)
    raw = section.take(entry.name, entry.parameters["binary_data_size"])
    if given_as_json:
        raise MalformedMessage(f"tensor {entry.name[:80]!r} has both data and binary_data_size")
    return _from_bytes(entry, raw, dtype, count).reshape(entry.shape)


def _element_count(entry: TensorEntry, itemsize: int) -> int:
    """Number of elements of the entry's shape; MalformedMessage if it is not a shape that a body could hold."""
    lengths = entry.shape
    if len(lengths) > _MAX_RANK or min(lengths, default=0) < 0:
        raise MalformedMessage(f"tensor {entry.name[:80]!r}: not a shape: {str(lengths)[:80]}")
    count = math.prod(lengths)
    most = count or math.prod(
        length or 1 for length in lengths
    )  # a shape with a zero length is bounded by its other lengths
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
    """`count` length-prefixed elements that fill `raw` exactly."""
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


def _from_json_data(entry: TensorEntry, dtype: np.dtype[Any], count: int) -> Tensor:
    """The tensor's elements from JSON: flat, or nested as the shape requires."""
    scalar: Any = {"b": bool, "u": int, "i": int, "f": float | None, "O": str}[dtype.kind]
    try:
        values = decode_json(entry.data, list[scalar], _WHAT)
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
    """The elements of nested lists, each list as long as the shape requires."""
    kind: Any = list[scalar]
    for _ in entry.shape[1:]:
        kind = list[kind]
    level = [decode_json(entry.data, kind, _WHAT)]
    for length in entry.shape:
        if any(len(part) != length for part in level):
            raise MalformedMessage(f"tensor {entry.name[:80]!r}: data is not nested as shape {str(entry.shape)[:80]}")
        level = list(chain.from_iterable(level))
    return level


def _in_range(name: str, values: list[Any], dtype: np.dtype[Any]) -> Tensor:
    """The numbers as `dtype`; MalformedMessage for a number that does not fit."""
    if dtype.kind in "ui" and values:
        bounds = np.iinfo(dtype)
        if min(values) < bounds.min or max(values) > bounds.max:
            raise MalformedMessage(f"tensor {name[:80]!r}: a number does not fit {dtype}")
    with np.errstate(over="ignore"):
        array = np.array(values, np.float64 if dtype.kind == "f" else dtype).astype(dtype)
    if dtype.kind == "f" and bool(np.isinf(array).any()):
        raise MalformedMessage(f"tensor {name[:80]!r}: a number does not fit {dtype}")
    return array


warm_up_structs(__name__)
