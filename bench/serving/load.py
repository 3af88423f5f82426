"""The client that sends the same load to every contender: a program of its own, so that it shares its interpreter with
no server.

It reads a job as one line of JSON, opens its connections, prints `ready`, begins at the next line and prints its
counts. A request is bytes made once; a response is read whole and only its status is checked. Needs the standard
library alone; for gRPC grpcio, but no message classes: the bytes are sent as they are.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = sys.maxsize
"""Length of a response with chunked encoding, which ends with its last chunk."""
_REFUSALS = (b"429", b"503")
METHOD = "/inference.GRPCInferenceService/ModelInfer"


class Http:
    """One persistent HTTP connection."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._request = Path(job["request"]).read_bytes()
        self._buffer = bytearray(job["answer_bytes"] + 65_536)
        self.answer: bytes | memoryview = b""
        self._view = memoryview(self._buffer)
        self._socket = socket.create_connection((job["host"], job["port"]), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self) -> bool:
        """Send the request and read the response; False where the server refused it for load. OSError for anything
        else."""
        self._socket.sendall(self._request)
        got, whole, head = 0, None, b""
        while whole is None or got < whole:
            read = self._socket.recv_into(self._view[got:])
            if not read:
                raise ConnectionError("the server closed the connection")
            got += read
            end = self._buffer.find(b"\r\n\r\n", 0, got) if whole is None else 0
            if whole is None and end >= 0:
                head = bytes(self._buffer[:end])
                length = _LENGTH.search(head)
                whole = end + 4 + int(length[1]) if length else _CHUNKED
                if length and whole > len(self._buffer):
                    raise ConnectionError(f"an answer of {whole} bytes")
            if whole == _CHUNKED and self._buffer[got - 5 : got] == b"0\r\n\r\n":
                break
        if head[9:12] == b"200":
            self.answer = self._view[:got]
            return True
        if head[9:12] in _REFUSALS:
            return False
        raise ConnectionError(f"{head[:40]!r}: {bytes(self._view[len(head) + 4 : got])[:300]!r}")


class Grpc:
    """One gRPC channel, with a connection of its own."""

    def __init__(self, job: dict[str, Any]) -> None:
        import grpc

        self.answer = b""
        self._refusals = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
        self._error: type[Exception] = grpc.RpcError
        self._request = Path(job["request"]).read_bytes()
        options = [("grpc.use_local_subchannel_pool", 1), *((f"grpc.max_{way}_message_length", -1) for way in _WAYS)]
        self._channel = grpc.insecure_channel(f"{job['host']}:{job['port']}", options)
        self._call = self._channel.unary_unary(METHOD, request_serializer=None, response_deserializer=None)

    def ask(self) -> bool:
        """Send the request and read the response; False where the server refused it for load. OSError for anything
        else."""
        try:
            self.answer = self._call(self._request, timeout=TIMEOUT_S)
        except self._error as error:
            if error.code() in self._refusals:  # type: ignore[attr-defined]
                return False
            raise ConnectionError(str(error)[:400]) from error
        return True


_WAYS = ("send", "receive")


class LoadCounts:
    """Counts and latencies of all connections after the warm-up."""

    def __init__(self) -> None:
        self.latencies_s: list[float] = []
        self.refused = 0
        self.problem = ""

    def run(self, ask: Callable[[], bool], begin: float, end: float) -> None:
        """Send requests one after the other until `end`; a response that comes later is not counted."""
        try:
            while (start := time.perf_counter()) < end:
                answered, now = ask(), time.perf_counter()
                if begin <= now <= end:
                    if answered:
                        self.latencies_s.append(now - start)
                    else:
                        self.refused += 1
        except OSError as error:
            self.problem = f"{type(error).__name__}: {error}"


def main() -> None:
    """The program."""
    job = json.loads(sys.stdin.readline())
    kind = Grpc if job["protocol"] == "grpc" else Http
    connections = [kind(job) for _ in range(job["connections"])]
    if not all(connection.ask() for connection in connections):
        raise ConnectionError("refused before there was any load")
    if job.get("keep"):
        Path(job["keep"]).write_bytes(connections[0].answer)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    begin = start + job["warm_s"]
    counted = [LoadCounts() for _ in connections]
    threads = [
        threading.Thread(target=count.run, args=(connection.ask, begin, begin + job["seconds"]))
        for connection, count in zip(connections, counted, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    latencies = sorted(latency for count in counted for latency in count.latencies_s)
    refused, problem = sum(count.refused for count in counted), next((c.problem for c in counted if c.problem), "")
    print(json.dumps({"latencies_s": latencies, "refused": refused, "problem": problem}), flush=True)


if __name__ == "__main__":
    main()
