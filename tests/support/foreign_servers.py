"""Inference servers that are not ours, as they really behave: on http.server and onnxruntime, with none of our code.

Each has the manners of a kind: Triton (binary tensors, gzip, echoes ids, 400 for a model that it has not), KServe
(binary tensors, answers in chunks, null for what it does not say), MLServer (JSON alone; here it leaves ids out too).
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

KINDS = {"FP32": np.float32, "FP16": np.float16, "FP64": np.float64, "UINT8": np.uint8, "INT64": np.int64}
NAMES = {np.dtype(kind): name for name, kind in KINDS.items()}
_INFER = re.compile(r"/v2/models/([^/]+)/infer")


@dataclass(frozen=True)
class Manners:
    """What a kind of server does with requests."""

    binary: bool = True
    gzip: bool = False
    echoes_id: bool = True
    chunked: bool = False
    says_null: bool = False
    """Of what it has nothing to say about."""
    unknown_model: int = 404
    not_json: int = 500
    """Said of a body that begins as JSON and goes on otherwise."""
    extensions: tuple[str, ...] = ()
    prefix: str = ""


TRITON = Manners(gzip=True, unknown_model=400, extensions=("classification", "binary_tensor_data"))
KSERVE = Manners(chunked=True, says_null=True, prefix="/serving")
MLSERVER = Manners(binary=False, echoes_id=False)


@dataclass
class ReceivedRequests:
    """What the server received."""

    models: list[str] = field(default_factory=list)
    codings: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    binary: list[bool] = field(default_factory=list)
    refused: int = 0


class ForeignServerHere:
    """Serves a model repository as `edgectl export` writes it (`NAME/1/model.onnx`), or sessions given by name."""

    def __init__(self, manners: Manners, repository: Path | None = None) -> None:
        self.manners = manners
        self.sessions: dict[str, Any] = {}
        self.seen = ReceivedRequests()
        for home in sorted(repository.iterdir()) if repository else []:
            self.add(home.name, (home / "1" / "model.onnx").read_bytes())
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """With its prefix."""
        return f"http://127.0.0.1:{self.port}{self.manners.prefix}"

    def add(self, name: str, model: bytes) -> None:
        """One more model, run operator by operator: its bits can be compared."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.sessions[name] = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def stop(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, headers: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """One exchange."""
        found = _INFER.fullmatch(path.removeprefix(self.manners.prefix))
        if path.removesuffix("/") == f"{self.manners.prefix}/v2":
            return 200, {}, json.dumps({"name": "x", "extensions": list(self.manners.extensions)}).encode()
        if found is None:
            return (200 if path.endswith("/v2/health/live") else 404), {}, b""
        if found[1] not in self.sessions:
            self.seen.refused += 1
            text = json.dumps({"error": f"Request for unknown model: {found[1]!r} is not found"})
            return self.manners.unknown_model, {}, text.encode()
        coding, length = headers.get("content-encoding", ""), headers.get("inference-header-content-length")
        self.seen.models.append(found[1])
        self.seen.codings.append(coding)
        self.seen.headers.append({name.lower(): value for name, value in headers.items()})
        self.seen.binary.append(length is not None)
        if coding and not (coding == "gzip" and self.manners.gzip):
            return 400, {}, b'{"error": "cannot read the body"}'
        if length is not None and not self.manners.binary:
            return self.manners.not_json, {}, b"Internal Server Error"
        return self._infer(found[1], gzip.decompress(body) if coding else body, length)

    def _infer(self, name: str, body: bytes, length: str | None) -> tuple[int, dict[str, str], bytes]:
        split = int(length) if length is not None else len(body)
        asked, rest = json.loads(body[:split]), body[split:]
        tensors = {}
        for one in asked["inputs"]:
            kind = KINDS[one["datatype"]]
            if "data" in one:
                tensors[one["name"]] = np.array(one["data"], kind).reshape(one["shape"])
                continue
            size = one["parameters"]["binary_data_size"]
            tensors[one["name"]] = np.frombuffer(rest[:size], kind).reshape(one["shape"])
            rest = rest[size:]
        session = self.sessions[name]
        names = [one.name for one in session.get_outputs()]
        try:
            values = session.run(names, tensors)
        except Exception as error:
            return 400, {}, json.dumps({"error": str(error)}).encode()
        said = {"model_name": name, "model_version": "1", "outputs": []}
        if self.manners.echoes_id:
            said["id"] = asked.get("id", "")
        if self.manners.says_null:
            said |= {"model_version": None, "parameters": None}
        raw = b""
        for output, tensor in zip(names, values, strict=True):
            entry = {"name": output, "datatype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
            if self.manners.binary:
                entry["parameters"] = {"binary_data_size": tensor.nbytes}
                raw += tensor.tobytes()
            else:
                entry["data"] = tensor.ravel().tolist()
            said["outputs"].append(entry)
        head = json.dumps(said).encode()
        told = {"inference-header-content-length": str(len(head))} if self.manners.binary else {}
        return 200, told, head + raw

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        served = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._reply(b"")

            def do_POST(self) -> None:
                self._reply(self.rfile.read(int(self.headers.get("content-length", "0"))))

            def _reply(self, body: bytes) -> None:
                status, headers, answer = served.answer(self.path, self.headers, body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if served.manners.chunked and answer:
                    self.send_header("transfer-encoding", "chunked")
                    self.end_headers()
                    for part in (answer[:7], answer[7:]):
                        self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    self.wfile.write(b"0\r\n\r\n")
                    return
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Nothing: a test prints what matters."""

        return Handler
