"""A server of the handmade release as its tests see it: a runtime whose runs wait for leave, and clients."""

from __future__ import annotations

import gzip
import threading
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import msgspec
import zstandard

from edgesplit.client.client import Connection, Reply
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Tensor, Tensors
from edgesplit_offload.server import OffloadServer
from support.handmade_release import CUT, MID

PATIENCE_S = 20.0


@dataclass
class Gate:
    """A runtime whose programs wait for leave; counts its loads and its most concurrent runs."""

    name: str = "gate"

    def __post_init__(self) -> None:
        self.leave = threading.Event()
        self.leave.set()
        self.begun = threading.Semaphore(0)
        self.loads: list[str] = []
        self.runs = 0
        self.fail: Exception | None = None

    def load(self, slice_: Slice, folder: Path) -> Gate:
        self.loads.append(slice_.name)
        return self

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        self.runs += 1
        self.begun.release()
        assert self.leave.wait(PATIENCE_S)
        if self.fail:
            raise self.fail
        value = next(iter(tensors.values()))
        return {"mid": value, "out": 2 * value, "same": value}


def ask(server: OffloadServer, model: str = CUT, coding: str = "", timeout_us: int = 0, **inputs: Tensor) -> Reply:
    """One inference, as the agent asks it; raises for an answer that is none."""
    request = oip.InferRequest(inputs or {"mid": MID}, id="i", parameters={"timeout": timeout_us} if timeout_us else {})
    buffers, length = oip.encode_request(request)
    headers = {oip.HEADER_LENGTH: str(length)}
    body = b"".join(buffers)
    if coding:
        coders = {"zstd": zstandard.ZstdCompressor(level=1).compress, "gzip": gzip.compress, "deflate": zlib.compress}
        body, headers["content-encoding"] = coders.get(coding, bytes)(body), coding
    return post(server, f"/v2/models/{model}/infer", body, headers)


def post(server: OffloadServer, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Reply:
    with closing(Connection("127.0.0.1", server.port)) as connection:
        return connection.exchange("POST", path, deadline=soon(), headers=headers or {}, body=[body])


def soon() -> float:
    """By the monotonic clock: longer than anything takes."""
    return monotonic() + PATIENCE_S


def outputs(reply: Reply) -> dict[str, list[float]]:
    assert reply.status == 200, bytes(reply.body)
    response = oip.decode_response(reply.body, oip.header_length(reply.headers))
    return {name: tensor.ravel().tolist() for name, tensor in response.outputs.items()}


def error(reply: Reply) -> tuple[int, str]:
    return reply.status, msgspec.json.decode(reply.body)["error"]


class Answers:
    """What a server answers on one connection, one after the other. `receive` is as a socket's."""

    def __init__(self, receive: Callable[[int], bytes]) -> None:
        self._receive = receive
        self._raw = b""

    def next(self) -> tuple[int, bytes]:
        """Status and body."""
        while b"\r\n\r\n" not in self._raw:
            self._more()
        head, _, self._raw = self._raw.partition(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        while len(self._raw) < length:
            self._more()
        body, self._raw = self._raw[:length], self._raw[length:]
        return int(head.split()[1]), body

    def _more(self) -> None:
        got = self._receive(65_536)
        assert got, "closed before the answer was whole"
        self._raw += got
