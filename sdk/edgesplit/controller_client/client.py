"""The controller's HTTP API as the command line sees it: JSON in, JSON out, our errors back.

The address, the CA, an operator's certificate and token come from a file of credentials, or from the data folder that
`edgectl up` keeps.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode, urlsplit

from edgesplit import errors
from edgesplit.controller_client import credentials, settings
from edgesplit.controller_client.credentials import Credentials
from edgesplit.errors import EdgeError, LinkError, UsageError

ERRORS: dict[int, type[EdgeError]] = {401: UsageError, 403: UsageError, 413: UsageError}
"""For answers that do not name their kind."""
KINDS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, EdgeError)}
BLOCK = 1 << 20


class ControllerClient:
    """One controller."""

    def __init__(self, url: str, token: str, tls: ssl.SSLContext, timeout_s: float = 600.0) -> None:
        self.url = url
        self._token = token
        self._timeout_s = timeout_s
        self._tls = tls

    @classmethod
    def connect(cls, data: Path | None = None, file: Path | None = None) -> ControllerClient:
        """A client of the controller that a credentials file names; without one, of the controller that runs on the
        folder `data`; without that, of the last `edgectl login`. Nothing is sent yet."""
        data = data or settings.default_data_folder()
        file = file or settings.credentials_file(data)
        return cls.by(credentials.read(file) if file else credentials.of_folder(data))

    @classmethod
    def by(cls, held: Credentials) -> ControllerClient:
        """The controller that these credentials are for."""
        return cls(held.url, held.token, held.client_context())

    def get(self, path: str, **query: Any) -> Any:
        """GET; the decoded JSON."""
        return self._json("GET", path, query, None, {})

    def pages(self, path: str, **query: Any) -> list[Any]:
        """GET of a list that comes in pages; all of it."""
        found: list[Any] = []
        onward: str | None = path
        while onward is not None:
            with self._answered("GET", onward, query, None, {}) as response:
                found += self._decoded(self._whole(response))
                onward, query = _next(response.headers.get("Link", "")), {}
        return found

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> Any:
        """POST of JSON; the decoded JSON."""
        return self._json("POST", path, query, json.dumps(body or {}).encode(), {"Content-Type": "application/json"})

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """PATCH of JSON; the decoded JSON."""
        return self._json("PATCH", path, {}, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def lines(self, path: str) -> Iterator[bytes]:
        """GET; the answer line by line, as it comes."""
        with self._answered("GET", path, {}, None, {}) as response:
            yield from response

    def delete(self, path: str) -> Any:
        """DELETE; the decoded JSON."""
        return self._json("DELETE", path, {}, None, {})

    def upload(self, path: str, file: IO[bytes], size: int, progress: Any = None, **query: Any) -> Any:
        """POST of a file's bytes, reporting bytes sent to `progress(done, total)`."""
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        return self._json("POST", path, query, _blocks(file, size, progress), headers)

    def download(self, path: str, **query: Any) -> bytes:
        """GET; the raw bytes."""
        return self._exchange("GET", path, query, None, {})

    def _json(self, method: str, path: str, query: Mapping[str, Any], body: Any, headers: Mapping[str, str]) -> Any:
        return self._decoded(self._exchange(method, path, query, body, headers))

    def _decoded(self, raw: bytes) -> Any:
        try:
            return json.loads(raw) if raw else None
        except ValueError as error:
            raise LinkError(f"{self.url} answered something that is not JSON") from error

    def _exchange(
        self, method: str, path: str, query: Mapping[str, Any], body: Any, headers: Mapping[str, str]
    ) -> bytes:
        with self._answered(method, path, query, body, headers) as response:
            return self._whole(response)

    def _whole(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error

    @contextmanager
    def _answered(
        self, method: str, path: str, query: Mapping[str, Any], body: Any, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        """An answer that is no error, to be read."""
        address = urlsplit(self.url)
        wanted = urlencode([(key, value) for key, value in query.items() if value is not None], doseq=True)
        connection = http.client.HTTPSConnection(
            address.hostname or "", address.port, timeout=self._timeout_s, context=self._tls
        )
        try:
            everything = {"Authorization": f"Bearer {self._token}", **headers}
            try:
                connection.request(method, f"{path}?{wanted}" if wanted else path, body=body, headers=everything)
                response = connection.getresponse()
                refused = response.read() if response.status >= 400 else b""
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error) from error
            if response.status >= 400:
                raise _error(response.status, refused)
            yield response
        finally:
            connection.close()

    def _lost(self, error: Exception) -> LinkError:
        return LinkError(f"the controller at {self.url} does not answer ({error}): is `edgectl up` running?")


def _next(link: str) -> str | None:
    """Where a list goes on, by the header that says so (RFC 8288); only ever on the same server."""
    found = re.fullmatch(r'<(/[^>]{0,2000})>; rel="next"', link)
    return found[1] if found else None


def _blocks(file: IO[bytes], size: int, progress: Any) -> Iterator[bytes]:
    done = 0
    while block := file.read(BLOCK):
        yield block
        done += len(block)
        if progress is not None:
            progress(done, size)


def _error(status: int, raw: bytes) -> EdgeError:
    """The error that the API's answer stands for."""
    try:
        answer = json.loads(raw)
        text = str(answer.get("error") or answer.get("detail") or answer)
        kind = KINDS.get(str(answer.get("kind")))
    except (ValueError, AttributeError):
        text, kind = raw[:200].decode("utf-8", "replace"), None
    return (kind or ERRORS.get(status) or EdgeError)(text)
