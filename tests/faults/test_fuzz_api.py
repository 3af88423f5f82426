"""Spoiled requests to the controller's API, in this process: a 2xx or a 4xx in JSON, never a 5xx, never a stack trace.

The app is the real one over a real database, repository and authority; only TLS and the socket are left out, which are
uvicorn's. Model files are pushed through the same way, spoiled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from edgesplit.errors import EdgeError
from edgesplit.trust.identity import certificate_request, load_or_make_key
from edgesplit_partitioner.onnx_format.validate import read_model as read_onnx
from edgesplit_partitioner.tflite_format.flatbuffer import read_model as read_tflite
from support.controller_api import OWNER_TOKEN, ApiHarness
from support.fuzzing import JSON, fuzzed, spoiled
from support.registry_harness import a_model
from support.tflite_models import chain

BODIES: dict[str, dict[str, Any]] = {
    "/v1/devices/claims": {"device": "cam-1", "device_class": "raspberrypi4", "labels": {"a": "b"}, "expires_s": 60},
    "/v1/enrol": {"token": "t", "csr_pem": "csr"},
    "/v1/renew": {"certificate_pem": "c", "csr_pem": "csr", "signature": "YWJj"},
    "/v1/plans": {"model": "m@1", "device": "raspberrypi4", "link": "8mbit/40ms", "limits": {"latency": "5ms"}},
    "/v1/deployments": {"model": "m@1", "to": ["all"], "partition": "auto", "codecs": ["int8"], "objective": "energy"},
    "/v1/models/m@1/samples": {"samples": [{"frame": "YWJj", "label": 3}]},
    "/v1/models/m@1/profile": {"on": "local", "codecs": True, "device": "raspberrypi4"},
}
GETS = ["/v1/models", "/v1/models/m@1", "/v1/models/m/file", "/v1/models/m@1/costs", "/v1/devices", "/v1/devices/cam-1",
        "/v1/telemetry/cam-1", "/v1/events", "/v1/releases", "/v1/deployments", "/v1/health", "/nothing"]  # fmt: skip
QUERIES = [
    b"",
    b"newest=3",
    b"newest=-1",
    b"newest=99999999999999999999",
    b"device=raspberrypi4&tier=edge=x",
    b"name=a",
]


class Api:
    """The app, called as a server would call it, by its owner unless said otherwise."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.world = ApiHarness(folder, stack)
        self.good_csr = certificate_request(load_or_make_key(folder / "key"), "cam-1").decode()

    def call(self, method: str, path: bytes, query: bytes, body: bytes, *headers: tuple[bytes, bytes]) -> int:
        """The status; AssertionError for a 5xx or for what is no JSON."""
        answer = self.world.call(
            method, path, body, query=query, headers={"content-type": "application/json"}, more=headers,
            peer=self.world.owner.peer,
        )  # fmt: skip
        assert answer.status < 500, (answer.status, answer.body[:300])
        if path.startswith(b"/v1/"):  # beside the API there are the dashboard's pages
            json.loads(answer.body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        return answer.status


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with ExitStack() as stack:
        yield Api(tmp_path_factory.mktemp("api"), stack)


OPERATOR = (b"authorization", f"Bearer {OWNER_TOKEN}".encode())


@pytest.mark.parametrize("path", BODIES)
def test_a_spoiled_body_is_refused(api: Api, path: str) -> None:
    """D13: garbage, deep nests and spoiled JSON in the place of each body, by who has the operator's token."""

    @fuzzed(spoiled([msgspec.json.encode(BODIES[path])]), share=0.5)
    def tried(raw: bytes) -> None:
        api.call("POST", path.encode(), b"", raw, OPERATOR)

    tried()


@pytest.mark.parametrize("path", BODIES)
def test_a_body_of_wrong_values_is_refused(api: Api, path: str) -> None:
    """Each field in turn holds any value that JSON has, and fields are missing or too many."""
    names = [*BODIES[path], "another"]

    @fuzzed(st.dictionaries(st.sampled_from(names), JSON, max_size=4), st.sets(st.sampled_from(names)), share=0.5)
    def tried(changed: dict[str, Any], dropped: set[str]) -> None:
        body = {name: value for name, value in {**BODIES[path], **changed}.items() if name not in dropped}
        api.call("POST", path.encode(), b"", json.dumps(body).encode(), OPERATOR)

    tried()


def test_spoiled_paths_and_queries_are_refused(api: Api) -> None:
    """Names with zeros, dots and slashes, numbers beyond all numbers, in path and query, by all methods."""
    methods = st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD2"])

    @fuzzed(methods, spoiled([path.encode() for path in GETS]), spoiled(QUERIES))
    def tried(method: str, path: bytes, query: bytes) -> None:
        api.call(method, b"/" + path.lstrip(b"/"), query, b"", OPERATOR)

    tried()


def test_a_non_ascii_query_was_an_internal_server_error(api: Api) -> None:
    """Bytes above 127 in a query ended in a 500 without a body; a path with a slash too many in a redirect."""
    assert api.call("GET", b"/v1/models", b"name=\x80", b"", OPERATOR) == 400
    assert api.call("GET", b"/v1/models/", b"", b"", OPERATOR) == 404


def test_without_a_token_only_enrolment_and_health_are_open(api: Api) -> None:
    """D10: any spoiled token, and none, on each route: 401, or 429 after some, and no more."""

    @fuzzed(spoiled([OPERATOR[1]]), st.sampled_from([*GETS[:-2], *(set(BODIES) - {"/v1/enrol", "/v1/renew"})]))
    def tried(token: bytes, path: str) -> None:
        if token.partition(b" ")[2].strip() == OWNER_TOKEN.encode():
            return
        body = msgspec.json.encode(BODIES[path]) if path in BODIES else b""
        status = api.call("POST" if body else "GET", path.encode(), b"", body, (b"authorization", token))
        assert status in (401, 429) or b"\n" in token

    tried()


def test_a_spoiled_certificate_request_in_an_enrolment_is_refused(api: Api) -> None:
    """The one body that strangers may send, with a token of their own invention."""

    @fuzzed(spoiled([api.good_csr.encode()]))
    def tried(raw: bytes) -> None:
        body = {"token": "x", "csr_pem": raw.decode("latin-1"), "signature": "YWJj", "certificate_pem": api.good_csr}
        for path, names in (("/v1/enrol", ("token", "csr_pem")), ("/v1/renew", ("certificate_pem", "csr_pem"))):
            sent = {name: body[name] for name in (*names, *(["signature"] if "renew" in path else []))}
            api.call("POST", path.encode(), b"", json.dumps(sent).encode())

    tried()


def test_a_spoiled_model_file_is_refused_over_the_api(api: Api) -> None:
    """An ONNX or a TFLite file with accidents, pushed as an operator pushes it: kept, or refused with a reason."""

    @fuzzed(spoiled([a_model(), chain()]), share=0.06)
    def tried(raw: bytes) -> None:
        api.call("POST", b"/v1/models", b"name=spoiled", raw, OPERATOR)

    tried()


@pytest.mark.parametrize(("read", "good"), [(read_onnx, a_model()), (read_tflite, chain())], ids=["onnx", "tflite"])
def test_a_spoiled_model_file_is_read_or_refused(read: Any, good: bytes) -> None:
    """The readers of both formats alone, many more times."""

    @fuzzed(spoiled([good]))
    def tried(raw: bytes) -> None:
        try:
            read(raw)
        except EdgeError:
            return

    tried()
