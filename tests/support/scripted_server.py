"""A server that answers each inference request by a script, and what clients' tests need to judge their answers."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable

import numpy as np

from edgesplit.client.client import Answer
from edgesplit.errors import EdgeError
from edgesplit.oip import protocol as oip

PATIENCE_S = 20.0
MARGIN_S = 15.0
"""How late a call may return before a test calls it hung: sooner than a server that holds it lets go."""
X = np.arange(64, dtype=np.float32)

Script = Callable[[socket.socket, bytes, int], None]
"""What the server does with one connection: the socket, the good response, the number of the attempt from 0."""


def read_request(sock: socket.socket) -> oip.InferRequest | None:
    """The next request on this connection, or None at its end."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(65_536)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    while len(body) < int(lines["content-length"]):
        body += sock.recv(65_536)
    return oip.decode_request(body, oip.header_length(lines))


def response_to(id_: str, value: float = 2.0) -> bytes:
    """A whole, good HTTP response to that id."""
    outputs = {"y": np.full(64, value, np.float32)}
    buffers, length = oip.encode_response(oip.InferResponse("m", outputs, id=id_))
    body = b"".join(buffers)
    lines = ["HTTP/1.1 200 OK", f"content-length: {len(body)}", f"{oip.HEADER_LENGTH}: {length}", "", ""]
    return "\r\n".join(lines).encode() + body


class ScriptedServer:
    """A server that answers each request by a script."""

    def __init__(self) -> None:
        self.script: Script = lambda sock, good, n: sock.sendall(good)
        self.ids: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        self.over.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while (request := read_request(sock)) is not None:
                    self.ids.append(request.id)
                    self.script(sock, response_to(request.id), len(self.ids) - 1)
            except OSError:
                pass


def is_good(outcome: Answer | EdgeError, request_id: str = "the-one") -> bool:
    return isinstance(outcome, Answer) and outcome.id == request_id and outcome.outputs["y"].tolist() == [2.0] * 64


def reset(sock: socket.socket) -> None:
    """End this connection as a killed process may: by a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
