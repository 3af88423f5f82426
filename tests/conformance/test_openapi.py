"""The API against its own description: docs/openapi.json is current, valid, and what the API really does.

Schemathesis makes requests of the description, good ones and bad ones, and holds the answers to it: no 5xx, no status
and no answer that it does not name, no bad request that is accepted. Against the app in this process (only TLS and the
socket are left out), seeded; EDGESPLIT_OPENAPI_EXAMPLES says how many a route, for `make soak`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from openapi_spec_validator import validate
from schemathesis.checks import CHECKS

from edgesplit_controller.api.access_reference import declared_routes
from edgesplit_controller.api.app import ROUTERS
from edgesplit_controller.api.openapi import document_of_routers
from edgesplit_controller.storage.tables.core import TelemetryRow
from support import REPOSITORY
from support.controller_api import ApiHarness, Person
from support.registry_harness import a_model

PAGE = REPOSITORY / "docs" / "openapi.json"
EXAMPLES = int(os.environ.get("EDGESPLIT_OPENAPI_EXAMPLES", "3"))
SEED = int(os.environ.get("EDGESPLIT_SEED", "6"))
HELD_TO = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
HEAVY = {"/v1/plans", "/v1/models/{reference}/profile", "/v1/models/{reference}/costs"}
KNOWN = {"name": "cam-1", "number": 1, "reference": "real@1", "profile": "raspberrypi4"}
DESCRIPTION = document_of_routers(ROUTERS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiHarness]:
    with ExitStack() as stack:
        world = ApiHarness(tmp_path_factory.mktemp("openapi"), stack)
        world.device("cam-1", "doors", room="hall")
        world.device("cam-2", "lab")
        assert world.call("POST", "/v1/models", a_model(), by=world.owner, query=b"name=real").status == 200
        world.rollout(1, ["cam-1"])
        world.rollout(2, ["cam-2"])
        with world.database.write() as session:
            session.add(TelemetryRow(device="cam-1", at=1.0, stored=1.0, session=1, sequence=0, content={"rtt_s": 1.0}))
        yield world


def test_openapi_json_is_current() -> None:
    """Run `python -m edgesplit_controller.api.reference openapi > docs/openapi.json` after a change of the API."""
    assert json.loads(PAGE.read_text("utf-8")) == DESCRIPTION


def test_openapi_description_is_valid() -> None:
    """OpenAPI 3.1, by its own schema; every route is in it, each under a name of its own."""
    validate(DESCRIPTION)
    assert DESCRIPTION["openapi"].startswith("3.1.")
    there = {(method.upper(), path) for path, operations in DESCRIPTION["paths"].items() for method in operations}
    every = {(one.method, one.path) for router in ROUTERS for one in declared_routes(list(router.routes))}
    assert there == {(method, path) for method, path in every if path.startswith("/v1/")}  # the rest are pages
    names = [one["operationId"] for operations in DESCRIPTION["paths"].values() for one in operations.values()]
    assert len(names) == len(set(names))


def test_openapi_description_needs_a_token(world: ApiHarness) -> None:
    """It names every route, which strangers need not know; what is answered is what is committed."""
    assert world.call("GET", "/v1/openapi.json").status == 401
    assert world.call("GET", "/openapi.json").status == 404
    assert world.call("GET", "/v1/openapi.json", by=world.owner).json == DESCRIPTION


SCHEMA = schemathesis.openapi.from_dict(DESCRIPTION)


def held_to_its_description(world: ApiHarness, by: Person | None, case: Any) -> None:
    """Call it, and compare the answer."""
    kwargs = case.as_transport_kwargs(base_url="https://hub.test")
    names = ("method", "url", "json", "data", "params")
    prepared = requests.Request(**{name: kwargs.get(name) for name in names}).prepare()
    path, _, query = prepared.path_url.partition("?")
    raw = prepared.body if isinstance(prepared.body, bytes) else (prepared.body or "").encode()
    kind = (kwargs.get("headers") or {}).get("Content-Type") or prepared.headers.get("Content-Type") or ""
    answer = world.call(
        prepared.method or "GET", unquote_to_bytes(path), raw, by=by, query=query.encode("ascii", "replace"),
        headers={"content-type": str(kind)},
    )  # fmt: skip
    headers = {name: [value] for name, value in answer.headers.items()}
    found = schemathesis.Response(answer.status, headers, answer.body, prepared, elapsed=0.0, verify=True)
    case.validate_response(found, checks=[CHECKS.get_one(name) for name in HELD_TO])


@pytest.mark.parametrize("who", ["owner", "doors-operator", "nobody"])
def test_the_api_conforms_to_its_openapi_description(world: ApiHarness, who: str) -> None:
    """Each route, by each kind of caller."""
    known = {"owner": world.owner, "nobody": None}
    role = who.rpartition("-")[2]
    by = known[who] if who in known else world.person(who, role, *(["doors"] if who != role else []))
    for result in SCHEMA.get_all_operations():
        operation = result.ok()
        if operation.path not in HEAVY or who == "owner":
            tried(world, by, operation)


def tried(world: ApiHarness, by: Person | None, operation: Any) -> None:
    """So many examples of one route."""
    there = operation.path not in HEAVY or EXAMPLES > 10

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(), known=st.booleans())
    def one(case: Any, known: bool) -> None:
        if known and there and case.path_parameters:  # what is there, for half of them
            case.path_parameters = {name: KNOWN.get(name, value) for name, value in case.path_parameters.items()}
        held_to_its_description(world, by, case)

    one()
