"""Encodes the request for each contender: bytes made once, for the client that all contenders share."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgesplit.oip import protocol as oip

from .suffixes import INPUT, OUTPUT

MODEL = "suffix"
"""Name of the model at all contenders but ours, whose models are named by their release."""
Sample = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Request:
    """One request's bytes, and its protocol."""

    protocol: str
    """`http` or `grpc`."""
    raw: bytes


def oip_http(sample: Sample, model: str = MODEL) -> Request:
    """The request in the Open Inference Protocol over HTTP with binary tensors, as a device sends it."""
    buffers, length = oip.encode_request(oip.InferRequest({INPUT: sample}, (OUTPUT,), "1"))
    headers = {"content-type": "application/octet-stream", oip.HEADER_LENGTH: str(length)}
    return post(f"/v2/models/{model}/infer", b"".join(buffers), headers)


def oip_grpc(sample: Sample) -> Request:
    """The Open Inference Protocol's `ModelInferRequest`: model_name = 1, id = 3, inputs = 5, outputs = 6, raw contents
    = 7."""
    shape = b"".join(_varint(length) for length in sample.shape)
    tensor = _field(1, INPUT.encode()) + _field(2, b"FP32") + _field(3, shape)
    message = _field(1, MODEL.encode()) + _field(3, b"1") + _field(5, tensor)
    return Request("grpc", message + _field(6, _field(1, OUTPUT.encode())) + _field(7, sample.tobytes()))


def raw_http(sample: Sample, path: str) -> Request:
    """An HTTP request with the tensor's bytes as its body."""
    return post(path, sample.tobytes(), {"content-type": "application/octet-stream"})


def base64_http(sample: Sample, path: str) -> Request:
    """An HTTP request with the tensor as base64 in JSON."""
    body = json.dumps({INPUT: base64.b64encode(sample.tobytes()).decode()}).encode()
    return post(path, body, {"content-type": "application/json"})


def post(path: str, body: bytes, headers: Mapping[str, str]) -> Request:
    """An HTTP request as bytes."""
    lines = {"host": "localhost", **headers, "content-length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return Request("http", f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)


def write(request: Request, path: Path) -> Path:
    """Write the request's bytes to a file, for the client."""
    path.write_bytes(request.raw)
    return path


def parse_tensor(raw: bytes, count: int) -> Sample | None:
    """The tensor of so many elements in a response: JSON's, or the end of its body; None where there is neither."""
    head, _, body = raw.partition(b"\r\n\r\n") if raw.startswith(b"HTTP/") else (b"", b"", raw)
    if b"transfer-encoding: chunked" in head.lower():
        body = _dechunk(body)
    if body.startswith(b'{"y":'):
        body = base64.b64decode(json.loads(body)["y"])
    end = body[-4 * count :]
    return np.frombuffer(end, np.float32) if len(end) == 4 * count else None


def _dechunk(chunks: bytes) -> bytes:
    """A chunked body, decoded."""
    whole = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        whole, chunks = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return whole


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def _field(number: int, data: bytes) -> bytes:
    """A protobuf field of bytes, text or a message."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data
