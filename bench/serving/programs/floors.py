"""Lower bounds: the protocol in a few dozen lines of Python, on threads and blocking sockets, or on bare asyncio.

`floors.py threads|asyncio MODEL PORT PROCESSES`: without admission, deadlines, checks or batching, whose cost a real
server has in addition.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import threading

import numpy as np
import onnxruntime

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_JSON_LENGTH = re.compile(rb"\r\ninference-header-content-length: *(\d+)", re.IGNORECASE)


class Model:
    """The suffix as an onnxruntime session with one thread per inference."""

    def __init__(self, path: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._input, self._output = self._session.get_inputs()[0].name, self._session.get_outputs()[0].name

    def answer(self, head: bytes, body: memoryview) -> tuple[bytes, memoryview]:
        """Head and tensor of the response to one request."""
        split = int(_JSON_LENGTH.search(head)[1])
        request = json.loads(bytes(body[:split]))
        tensor = np.frombuffer(body[split:], np.float32).reshape(request["inputs"][0]["shape"])
        (out,) = self._session.run([self._output], {self._input: tensor})
        parameters = {"binary_data_size": out.nbytes}
        output = {"name": self._output, "shape": list(out.shape), "datatype": "FP32", "parameters": parameters}
        response = {"model_name": "suffix", "model_version": "1", "id": request.get("id", ""), "outputs": [output]}
        text = json.dumps(response).encode()
        lengths = f"content-length: {len(text) + out.nbytes}\r\ninference-header-content-length: {len(text)}\r\n\r\n"
        return b"HTTP/1.1 200 OK\r\n" + lengths.encode() + text, out.data.cast("B")


def serve_connection(model: Model, connection: socket.socket) -> None:
    """Handle all requests of one connection, in a thread of its own."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(1 << 20)
    view, got = memoryview(buffer), 0
    while True:
        end = buffer.find(b"\r\n\r\n", 0, got)
        if end < 0:
            read = connection.recv_into(view[got:])
            if not read:
                return
            got += read
            continue
        head = bytes(view[:end])
        whole = end + 4 + int(_LENGTH.search(head)[1])
        while got < whole:
            got += connection.recv_into(view[got:whole])
        send_all(connection, model.answer(head, view[end + 4 : whole]))
        got = 0


def send_all(connection: socket.socket, parts: tuple[bytes, memoryview]) -> None:
    """Send both parts in as few system calls as possible."""
    sent = connection.sendmsg(parts)
    if sent < len(parts[0]):
        connection.sendall(parts[0][sent:])
        sent = len(parts[0])
    if sent < len(parts[0]) + len(parts[1]):
        connection.sendall(parts[1][sent - len(parts[0]) :])


def on_threads(model: Model, listening: socket.socket) -> None:
    """Accept connections, with a thread for each."""
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=serve_connection, args=(model, connection), daemon=True).start()


class Protocol(asyncio.Protocol):
    """The server on an event loop, on which the model runs too."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._buffer = bytearray()
        self._whole = 0
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._whole:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head = bytes(self._buffer[:end])
            self._whole = end + 4 + int(_LENGTH.search(self._head)[1])
        if len(self._buffer) < self._whole:
            return
        body, self._buffer, self._whole = memoryview(self._buffer)[len(self._head) + 4 :], bytearray(), 0
        self._transport.writelines(self._model.answer(self._head, body))


async def on_asyncio(model: Model, listening: socket.socket) -> None:
    """Accept connections on one event loop."""
    server = await asyncio.get_running_loop().create_server(lambda: Protocol(model), sock=listening)
    await server.serve_forever()


def main() -> None:
    """Start as many processes as requested, on one port."""
    kind, path, port, processes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    for _ in range(processes - 1):
        if os.fork() == 0:
            import ctypes
            import signal

            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            break
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(128)
    model = Model(path)
    if kind == "threads":
        on_threads(model, listening)
    try:
        import uvloop

        uvloop.run(on_asyncio(model, listening))
    except ImportError:
        asyncio.run(on_asyncio(model, listening))


if __name__ == "__main__":
    main()
