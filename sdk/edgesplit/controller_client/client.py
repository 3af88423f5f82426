"""`ControllerClient`: the controller's HTTP API for Python programs, with JSON values in and out, and typed errors.

The address, the CA certificate, an operator's certificate and token come from a credentials file, or from the data
folder of a controller on this machine.
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

ERROR_BY_STATUS: dict[int, type[EdgeError]] = {401: UsageError, 403: UsageError, 413: UsageError}
"""Error class by HTTP status, for error responses that name no kind."""
ERROR_BY_KIND = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, EdgeError)
}
"""Error class by the name in the `kind` field of an error response."""
BLOCK = 1 << 20
TIMEOUT_S = 600.0
"""Default bound of each wait for the network; a plan of a large model takes minutes."""


class ControllerClient:
    """Calls the HTTP API of one controller over mutual TLS, with an operator's rights. Thread-safe: each call has its
    own connection.

        from edgesplit.controller_client.client import ControllerClient

        controller = ControllerClient.connect()
        stale = [d for d in controller.get_all("/v1/devices", group="shop-7") if d["state"] != "online"]
        for device in stale:
            print(device["name"], device["state"], device["last_seen"])
            controller.patch(f"/v1/devices/{device['name']}", {"labels": {"check": "yes"}})

    Paths and bodies are those of `GET /v1/openapi.json` (docs/openapi.json). Keyword arguments become query parameters:
    None is left out, a list is repeated. Every call raises LinkError if the controller does not answer (it may succeed
    later), and otherwise the error that the controller's response names: NotFound, UsageError (also for missing
    rights), Busy and so on, all of them EdgeErrors.
    """

    def __init__(self, url: str, token: str, tls: ssl.SSLContext, timeout_s: float = TIMEOUT_S) -> None:
        """`url` is https://host:port, `token` the operator's bearer token, `tls` a context with the operator's
        certificate and the controller's CA. `timeout_s` bounds each wait for the network. Most programs use `connect`.
        """
        self.url = url
        self._token = token
        self._timeout_s = timeout_s
        self._tls = tls

    @classmethod
    def connect(
        cls, data: Path | None = None, file: Path | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> ControllerClient:
        """A client of the controller that the credentials file `file` names; without `file`, of the controller that
        runs on the data folder `data` (default: $EDGESPLIT_DATA or the user's); without one there, of the last `edgectl
        login`.

        Nothing is sent yet. UsageError if no credentials are found, or if they have expired.
        """
        data = data or settings.default_data_folder()
        file = file or settings.credentials_file(data)
        chosen = credentials.read(file) if file else credentials.from_data_folder(data)
        return cls.from_credentials(chosen, timeout_s=timeout_s)

    @classmethod
    def from_credentials(cls, operator: Credentials, *, timeout_s: float = TIMEOUT_S) -> ControllerClient:
        """A client of the controller that these credentials are for. Nothing is sent yet."""
        return cls(operator.url, operator.token, operator.client_context(), timeout_s)

    def get(self, path: str, **query: Any) -> Any:
        """GET `path`; returns the decoded JSON."""
        return self._json("GET", path, query, None, {})

    def get_all(self, path: str, **query: Any) -> list[Any]:
        """GET a paginated list, following its `Link` headers (RFC 8288); returns the items of all pages."""
        items: list[Any] = []
        next_path: str | None = path
        while next_path is not None:
            with self._open_response("GET", next_path, query, None, {}) as response:
                items += self._parse_json(self._read_body(response))
                next_path, query = _next_page_path(response.headers.get("Link", "")), {}
        return items

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> Any:
        """POST `body` as JSON; returns the decoded JSON of the response."""
        return self._json("POST", path, query, json.dumps(body or {}).encode(), {"Content-Type": "application/json"})

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """PATCH with `body` as JSON; returns the decoded JSON of the response."""
        return self._json("PATCH", path, {}, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def get_lines(self, path: str) -> Iterator[bytes]:
        """GET `path`; yields the response line by line as it arrives, for exports too large for memory."""
        with self._open_response("GET", path, {}, None, {}) as response:
            yield from response

    def delete(self, path: str) -> Any:
        """DELETE `path`; returns the decoded JSON of the response, None if it is empty."""
        return self._json("DELETE", path, {}, None, {})

    def upload(self, path: str, file: IO[bytes], size: int, progress: Any = None, **query: Any) -> Any:
        """POST the `size` bytes of `file`; returns the decoded JSON. `progress(bytes_sent, size)` is called after each
        block."""
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        return self._json("POST", path, query, _file_blocks(file, size, progress), headers)

    def download(self, path: str, **query: Any) -> bytes:
        """GET `path`; returns the body's bytes."""
        return self._exchange("GET", path, query, None, {})

    def _json(self, method: str, path: str, query: Mapping[str, Any], body: Any, headers: Mapping[str, str]) -> Any:
        return self._parse_json(self._exchange(method, path, query, body, headers))

    def _parse_json(self, raw: bytes) -> Any:
        try:
            return json.loads(raw) if raw else None
        except ValueError as error:
            raise LinkError(f"{self.url} answered something that is not JSON") from error

    def _exchange(
        self, method: str, path: str, query: Mapping[str, Any], body: Any, headers: Mapping[str, str]
    ) -> bytes:
        with self._open_response(method, path, query, body, headers) as response:
            return self._read_body(response)

    def _read_body(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._link_error(error) from error

    @contextmanager
    def _open_response(
        self, method: str, path: str, query: Mapping[str, Any], body: Any, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request; yields the response, its body unread. Raises the error that an error response names."""
        address = urlsplit(self.url)
        query_string = urlencode([(key, value) for key, value in query.items() if value is not None], doseq=True)
        host, port = address.hostname or "", address.port
        connection = http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls)
        try:
            all_headers = {"Authorization": f"Bearer {self._token}", **headers}
            try:
                target = f"{path}?{query_string}" if query_string else path
                connection.request(method, target, body=body, headers=all_headers)
                response = connection.getresponse()
                error_body = response.read() if response.status >= 400 else b""
            except (OSError, http.client.HTTPException) as error:
                raise self._link_error(error) from error
            if response.status >= 400:
                raise _error_from(response.status, error_body)
            yield response
        finally:
            connection.close()

    def _link_error(self, error: Exception) -> LinkError:
        return LinkError(f"the controller at {self.url} does not answer ({error}): is `edgectl up` running?")


def _next_page_path(link: str) -> str | None:
    """Path of a list's next page from the `Link` header (RFC 8288), which must be on the same server; None on the last
    page."""
    match = re.fullmatch(r'<(/[^>]{0,2000})>; rel="next"', link)
    return match[1] if match else None


def _file_blocks(file: IO[bytes], size: int, progress: Any) -> Iterator[bytes]:
    sent = 0
    while block := file.read(BLOCK):
        yield block
        sent += len(block)
        if progress is not None:
            progress(sent, size)


def _error_from(status: int, raw: bytes) -> EdgeError:
    """The error for an error response of the API."""
    try:
        message = json.loads(raw)
        text = str(message.get("error") or message.get("detail") or message)
        error_type = ERROR_BY_KIND.get(str(message.get("kind")))
    except (ValueError, AttributeError):
        text, error_type = raw[:200].decode("utf-8", "replace"), None
    return (error_type or ERROR_BY_STATUS.get(status) or EdgeError)(text)
