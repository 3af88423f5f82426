"""An S3 store for tests: moto's mock of it (no real store), over HTTP on loopback, with faults on demand.

Debian's radosgw, the real store that could stand here, needs a Ceph cluster of its own.
"""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import moto.s3.models
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from edgesplit_controller.storage.object_store import ObjectStore, ObjectUrl, make_client

Environ = dict[str, Any]
Application = Callable[[Environ, Any], Iterable[bytes]]
Fault = Callable[[Environ, Any, Application], Iterable[bytes]]


def refuse(status: str, code: str) -> Fault:
    """Answers with an error of S3."""

    def fault(environ: Environ, start: Any, _application: Application) -> Iterable[bytes]:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = f"<Error><Code>{code}</Code><Message>made for a test</Message></Error>".encode()
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    return fault


def cut_request(environ: Environ, _start: Any, _application: Application) -> Iterable[bytes]:
    """Breaks the connection within the upload."""
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0) // 2)
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionError("cut for a test")


def cut_answer(environ: Environ, start: Any, application: Application) -> Iterable[bytes]:
    """Breaks the connection within the download."""
    body = b"".join(application(environ, start))
    yield body[: len(body) // 2]
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionError("cut for a test")


def lose_answer(environ: Environ, start: Any, application: Application) -> Iterable[bytes]:
    """Does what is asked, and breaks the connection before the answer."""
    b"".join(application(environ, lambda *_: None))
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionError("cut for a test")


def change_bytes(environ: Environ, start: Any, application: Application) -> Iterable[bytes]:
    """Returns other bytes of the same length."""
    body = b"".join(application(environ, start))
    return [bytes([body[0] ^ 1]) + body[1:]]


class S3Server:
    """The mock, on a free port. Requests that match a fault meet it, as often as it says."""

    def __init__(self) -> None:
        moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = 1_000  # real stores take no parts below 5 MiB
        self._application: Application = DomainDispatcherApplication(create_backend_app)
        self._faults: list[tuple[str, str, Fault]] = []
        self._lock = threading.Lock()
        self.requests: list[str] = []
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self._server.port}"

    def break_next(self, method: str, part: str, fault: Fault, times: int = 1) -> None:
        """Let the next requests of that method, with `part` in their path and query, meet a fault."""
        with self._lock:
            self._faults += [(method, part, fault)] * times

    def stop(self) -> None:
        """End it."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _serve(self, environ: Environ, start: Any) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append(request)
        if fault := self._due(environ["REQUEST_METHOD"], request):
            return fault(environ, start, self._application)
        return self._application(environ, start)

    def _due(self, method: str, request: str) -> Fault | None:
        with self._lock:
            for number, (wanted, part, fault) in enumerate(self._faults):
                if wanted == method and part in request:
                    del self._faults[number]
                    return fault
        return None


class Bucket:
    """A fresh bucket on the mock, in the environment that S3 clients read."""

    def __init__(self, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.name = f"test-{uuid.uuid4().hex[:12]}"
        self.url = f"s3://{self.name}/edgesplit"
        self.variables = {
            "AWS_ENDPOINT_URL_S3": server.endpoint, "AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "s3cr3t",
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "us-east-1",
        }  # fmt: skip
        for name, value in self.variables.items():
            monkeypatch.setenv(name, value)
        server.requests.clear()
        self._client = make_client()
        self.store().call("create_bucket")

    def store(self, path: str = "edgesplit") -> ObjectStore:
        """Objects in the bucket; retries do not wait."""
        return ObjectStore(ObjectUrl(self.name, path), self._client, pause=lambda _: None)

    def names(self) -> list[str]:
        """Keys of all objects."""
        return sorted(entry.name for entry in self.store("").objects())

    def uploads(self) -> list[str]:
        """Keys of the uploads that were neither completed nor aborted."""
        return sorted(upload["Key"] for upload in self.store("").call("list_multipart_uploads").get("Uploads", ()))
