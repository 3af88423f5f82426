"""`ControllerClient`: the controller's HTTP API for Python programs, with JSON values in and out, and typed errors.

The address, the CA certificate, an operator's certificate and token come from a credentials file, or from the data
folder of a controller on this machine.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlencode, urlsplit

from edgesplit import errors
from edgesplit.controller_client import credentials, settings
from edgesplit.controller_client.credentials import Credentials
from edgesplit.errors import EdgeError, LinkError, UsageError
from edgesplit.limits import LIMITS
from edgesplit.mqtt.remote_inference import too_large
from edgesplit.oip import protocol as oip
from edgesplit.oip.options import NONE, InferOptions, to_parameters

ERROR_BY_STATUS: dict[int, type[EdgeError]] = {401: UsageError, 403: UsageError, 413: UsageError}
"""Error class by HTTP status, for error responses that name no kind."""
URL_CHARACTERS = "/?#[]@!$&'()*+,;=:%~"
"""What has a meaning in a URL (RFC 3986, section 2.2); anything else outside letters and digits is percent-encoded."""
BLOCK = 1 << 20
MAX_EVENT_BYTES = 2 * LIMITS.remote_inference_bytes
"""Longest line of an event: the largest answer as base64, and its JSON."""
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

    def infer(
        self,
        device: str,
        model: str,
        inputs: Mapping[str, oip.Tensor | bytes],
        *,
        deadline_s: float = 5.0,
        outputs: Sequence[str] = (),
        options: InferOptions = NONE,
        on_progress: Callable[[str], None] = lambda state: None,
    ) -> oip.InferResponse:
        """Run `model` (`name` or `name@version`) on a device, through controller and broker, within `deadline_s`
        seconds.

        A `bytes` input, such as a JPEG, is one UINT8 tensor; `outputs` names the outputs to return (empty: all);
        of `options` the device heeds what answers may be given, and neither streams nor stale answers.
        Requests and answers have at most `LIMITS.remote_inference_bytes`. `on_progress` is called with `sent`,
        `waiting` and `running`. Raises UsageError if the device is offline or refuses, Busy, DeadlineExceeded, and
        LinkError if the device was lost: the model may have run. Nothing is sent twice.
        """
        tensors = {name: oip.to_tensor(name, value) for name, value in inputs.items()}
        buffers, json_bytes = oip.encode_request(
            oip.InferRequest(tensors, tuple(outputs), parameters=to_parameters(options))
        )
        body = b"".join(buffers)
        if len(body) > LIMITS.remote_inference_bytes:
            raise UsageError(too_large("a request", len(body)))
        headers = {"Content-Type": "application/octet-stream", oip.HEADER_LENGTH: str(json_bytes)}
        path, query = f"/v1/devices/{quote(device, safe='')}/infer", {"model": model, "deadline_s": deadline_s}
        with self._open_response("POST", path, query, body, headers) as response:
            for kind, content in self._events(response):
                if kind == "progress":
                    on_progress(str(content.get("state")))
                elif kind == "error":
                    raise errors.of_kind(str(content.get("kind")))(str(content.get("error")))
                elif kind == "answer":
                    return oip.decode_response(base64.b64decode(content["body"]), content["json_bytes"])
        raise LinkError(f"the controller at {self.url} ended before the answer of {device} came; it may have run")

    def _events(self, response: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
        """Server-sent events as they arrive: kind and content."""
        kind = ""
        try:
            while line := response.readline(MAX_EVENT_BYTES):
                name, _, text = line.decode().rstrip("\n").partition(": ")
                if name == "event":
                    kind = text
                elif name == "data":
                    yield kind, json.loads(text)
        except (OSError, http.client.HTTPException) as error:
            raise self._link_error(error) from error
        except (ValueError, AttributeError) as error:
            raise LinkError(f"{self.url} answered something that is no event") from error

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
                target = quote(f"{path}?{query_string}" if query_string else path, safe=URL_CHARACTERS)
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
        kind = str(message.get("kind"))
    except (ValueError, AttributeError):
        text, kind = raw[:200].decode("utf-8", "replace"), ""
    return errors.of_kind(kind, ERROR_BY_STATUS.get(status, EdgeError))(text)
