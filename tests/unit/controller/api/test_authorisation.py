"""Access control: every route of the real app, by each role, for own and other groups, and with a browser session."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from edgesplit_controller.api.access_reference import DeclaredRoute, declared_routes, render_page
from edgesplit_controller.api.app import ROUTERS
from edgesplit_controller.api.authorisation import Authentication
from edgesplit_controller.caller import Role
from edgesplit_controller.storage.database import record_event
from edgesplit_controller.storage.tables.core import TelemetryRow
from support import REPOSITORY
from support.controller_api import HOST, ApiHarness, Person

PAGE = REPOSITORY / "docs" / "access.md"
OPEN = {
    ("GET", "/"),
    ("GET", "/favicon.svg"),
    ("GET", "/assets/{name}"),
    ("GET", "/v1/health"),
    ("POST", "/v1/enrol"),
    ("POST", "/v1/renew"),
    ("POST", "/v1/gateway/certificate"),
    ("POST", "/v1/gateway/crl"),
    ("POST", "/v1/session"),
}
"""What lets in without an operator. A device's certificate, a claim or a login code is asked for inside."""
OURS, THEIRS = "doors-cam", "lab-secret"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiHarness]:
    with ExitStack() as stack:
        world = ApiHarness(tmp_path_factory.mktemp("access"), stack)
        world.device(OURS, "doors", room="hall")
        world.device(THEIRS, "lab", room="cellar-secret")
        yield world


@pytest.fixture(scope="module")
def people(world: ApiHarness) -> dict[str, Person]:
    """One of each role, over everything and over the group `doors`."""
    roles = {role.word: world.person(f"all-{role.word}", role.word) for role in Role}
    return roles | {f"doors-{role.word}": world.person(f"doors-{role.word}", role.word, "doors") for role in Role}


def routes(world: ApiHarness) -> list[DeclaredRoute]:
    return list(declared_routes(world.app.router.routes))


def filled(path: str, device: str) -> str:
    """The path with names in it that lead to that device where they can."""
    known = {"name": device, "reference": "nothing@1", "id": "1"}
    return re.sub(r"\{(\w+)[^}]*\}", lambda found: known.get(found[1], "1"), path)


def test_every_route_declares_its_access(world: ApiHarness) -> None:
    """Deny by default: a route that was not made by `access`, or is open and not on this page's list, fails here."""
    everything = routes(world)
    assert len(everything) > 30
    assert [route for route in everything if route.needs is None] == []
    assert {(route.method, route.path) for route in everything if route.needs and route.needs.role is None} == OPEN


def test_access_page_matches_the_declared_routes() -> None:
    """Run `python -m edgesplit_controller.api.reference access > docs/access.md` after a change of routes."""
    assert PAGE.read_text("utf-8") == render_page([route for router in ROUTERS for route in router.routes])


def test_callers_without_operator_credentials_are_refused_on_every_route(world: ApiHarness) -> None:
    """Without a certificate, with a device's, with a token alone: 401 on every route that is not open."""
    from edgesplit_controller.access.tls_peer import Peer

    device = Peer(OURS, 7)
    for route in routes(world):
        if route.needs is not None and route.needs.role is not None:
            for peer, headers in ((None, {}), (device, {}), (device, world.owner.headers), (None, world.owner.headers)):
                answer = world.call(route.method, filled(route.path, OURS), {}, peer=peer, headers=headers)
                assert answer.status in (401, 429), (route, peer, answer.body)


@pytest.mark.parametrize("scope", ["", "doors-"])
@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.word)
def test_each_role_is_admitted_exactly_where_declared(
    world: ApiHarness, people: dict[str, Person], role: Role, scope: str
) -> None:
    """Every route as every role, over all groups and over one: 403 exactly where the declaration says so. Bodies are
    empty, so that what is let in stops at its own checks."""
    person = people[f"{scope}{role.word}"]
    for route in routes(world):
        needs = route.needs
        if needs is None or needs.role is None or (route.method, route.path) == ("POST", "/v1/operator/token"):
            continue
        may = role >= needs.role and not (needs.everywhere and scope)
        headers = {"content-length": "0"} if route.path == "/v1/models" else {}
        answer = world.call(route.method, filled(route.path, "no-such-thing"), {}, by=person, headers=headers)
        assert answer.status not in (401, *range(500, 600)), (route, answer.body)
        assert (answer.status == 403) != may, (route, person.name, answer.status, answer.body)


def test_a_browser_session_is_refused_where_a_certificate_is_required(
    world: ApiHarness, people: dict[str, Person]
) -> None:
    """An admin's session, everywhere: keys, operators, model files and what brings code in are not for it."""
    secret, csrf = world.log_in(people["admin"])
    for route in routes(world):
        if route.needs is None or route.needs.role is None or route.path == "/v1/session":
            continue
        answer = world.call(
            route.method, filled(route.path, "no-such-thing"), {}, cookie=secret, headers={"x-csrf-token": csrf}
        )
        assert (answer.status == 403) == (route.needs.authentication is Authentication.CERTIFICATE), (
            route,
            answer.status,
            answer.body,
        )
    for secret_route in ("/v1/keys/change", "/v1/operators", "/v1/models", "/v1/session/codes"):
        assert {
            route.needs.authentication
            for route in routes(world)
            if route.path == secret_route and route.method == "POST" and route.needs
        } == {Authentication.CERTIFICATE}


def test_a_browser_session_claims_new_devices_only_and_for_an_hour(
    world: ApiHarness, people: dict[str, Person]
) -> None:
    """A stolen session could else take over a device's name, or keep claims that outlive it."""
    secret, csrf = world.log_in(people["operator"])
    claim: dict[str, Any] = {"device": "by-page", "device_class": "raspberrypi4", "expires_s": 3_600}

    def ask(**more: object) -> int:
        headers = {"x-csrf-token": csrf}
        return world.call("POST", "/v1/devices/claims", {**claim, **more}, cookie=secret, headers=headers).status

    assert ask() == 200
    for more in ({"replace": True}, {"gateway": "10.0.0.9:8500"}, {"expires_s": 3_601}):
        assert ask(**more) == 403, more
    viewer, csrf = world.log_in(people["viewer"])
    answer = world.call("POST", "/v1/devices/claims", claim, cookie=viewer, headers={"x-csrf-token": csrf})
    assert answer.status == 403


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PATCH"])
def test_devices_of_other_groups_answer_as_unknown(world: ApiHarness, people: dict[str, Person], method: str) -> None:
    """Every route with another group's device in its path, for an operator and an admin of one group: the answer is
    that for an unknown name, and names no device of the other group."""
    for person in (people["doors-operator"], people["doors-admin"]):
        for route in routes(world):
            if route.method == method and "{name}" in route.path and "operators" not in route.path:
                theirs = world.call(method, filled(route.path, THEIRS), {}, by=person)
                nobodys = world.call(method, filled(route.path, "lab-nobody"), {}, by=person)
                assert theirs.status == nobodys.status == 404, (route, theirs.body)
                assert theirs.json["error"].replace(THEIRS, "X") == nobodys.json["error"].replace("lab-nobody", "X")
    assert world.call("GET", f"/v1/devices/{THEIRS}", by=people["viewer"]).status == 200


def test_no_response_contains_data_of_other_groups(world: ApiHarness, people: dict[str, Person]) -> None:
    """Every GET, for viewer, operator and admin of one group, where the other group's device has a deployment, events,
    telemetry and a claim: its name, its labels and its group are in no answer. A new route is tried as well."""
    for number, devices in enumerate(([THEIRS], [OURS, THEIRS]), 1):
        world.deployment(number, devices, targets=["group=lab", *devices])
    with world.database.write() as session:
        session.add(TelemetryRow(device=THEIRS, at=1.0, stored=1.0, session=1, sequence=0, content={"rtt_s": 1.0}))
        for name in (OURS, THEIRS):
            record_event(session, 1.0, name, "device.born", name)
        record_event(session, 1.0, "operator", "deployment.made", "1", devices=[THEIRS])
    body = {"device": "lab-to-come", "device_class": "raspberrypi4", "group": "lab"}
    assert world.call("POST", "/v1/devices/claims", body, by=world.owner).status == 200

    seen: dict[str, list[int]] = {}
    for who in ("doors-viewer", "doors-operator", "doors-admin"):
        for route in routes(world):
            if route.method == "GET" and route.needs is not None:
                answer = world.call("GET", filled(route.path, OURS), by=people[who])
                assert answer.status < 500, (route, answer.body)
                for secret in (THEIRS, "cellar-secret", "lab"):
                    said = re.search(rf"\b{secret}\b".encode(), answer.body)
                    assert not said, (route, who, answer.body[:2000])
                seen.setdefault(route.path, []).append(answer.status)
    assert seen["/v1/devices"] == seen["/v1/events"] == seen["/v1/deployments"] == [200] * 3
    assert [device["name"] for device in world.call("GET", "/v1/devices", by=people["doors-viewer"]).json] == [OURS]
    assert [
        deployment["devices"] for deployment in world.call("GET", "/v1/deployments", by=people["doors-viewer"]).json
    ] == [[OURS]]


def test_a_rollout_with_devices_of_other_groups_is_not_visible(world: ApiHarness, people: dict[str, Person]) -> None:
    """For an operator of one group: it is not listed, not found by its number, and cannot be aborted; a rollout of
    the group's own devices only is listed with its devices and can be paused."""
    for number, devices in ((11, [THEIRS]), (12, [OURS, THEIRS]), (13, [OURS])):
        world.rollout(number, devices)
    me = people["doors-operator"]
    assert [rollout["id"] for rollout in world.call("GET", "/v1/rollouts", by=me).json] == [13]
    assert [rollout["id"] for rollout in world.call("GET", "/v1/rollouts", by=people["viewer"]).json] == [11, 12, 13]
    for number in (11, 12):
        for method, path in (("GET", ""), ("GET", "/devices"), ("POST", "/abort"), ("POST", "/rollback")):
            answer = world.call(method, f"/v1/rollouts/{number}{path}", by=me)
            assert answer.status == 404 and THEIRS not in answer.body.decode(), (number, path, answer.body)
    assert [row["device"] for row in world.call("GET", "/v1/rollouts/13/devices", by=me).json] == [OURS]
    assert world.call("POST", "/v1/rollouts/13/abort", by=people["doors-viewer"]).status == 403
    assert world.call("POST", "/v1/rollouts/13/abort", by=me).status == 200


def test_group_scoped_operators_label_and_move_only_their_devices(world: ApiHarness, people: dict[str, Person]) -> None:
    """A device cannot be moved into another operator's group, nor taken from it."""
    world.device("moved", "doors", a="1", b="2")
    both = world.person("both-op", "operator", "doors", "attic")
    answer = world.call("PATCH", "/v1/devices/moved", {"group": "attic", "labels": {"a": None, "c": "3"}}, by=both)
    assert answer.json == {"device": "moved", "group": "attic", "labels": {"b": "2", "c": "3"}}
    assert world.call("GET", "/v1/devices/moved", by=people["doors-viewer"]).status == 404
    assert world.call("PATCH", "/v1/devices/moved", {"group": "lab"}, by=both).status == 403
    assert world.call("PATCH", f"/v1/devices/{THEIRS}", {"group": "doors"}, by=people["doors-operator"]).status == 404
    assert world.call("PATCH", "/v1/devices/moved", {"labels": {"all": "x"}}, by=both).status == 400


def test_targets_resolve_within_the_operators_groups(world: ApiHarness, people: dict[str, Person]) -> None:
    """The targets `all`, a label that other groups use, and another group's name."""
    within = world.controller.scoped_to(frozenset({"doors"}))
    assert [device.name for device in within.devices.select(["all"])] == [OURS]
    assert [device.name for device in within.devices.select(["room=hall"])] == [OURS]
    for target in ("room=cellar-secret", "group=lab", THEIRS):
        body = {"devices": [target], "gateway": "none"}
        answer = world.call("POST", "/v1/devices/gateway", body, by=people["doors-operator"])
        assert answer.status == 404 and THEIRS not in answer.json["error"].replace(target, ""), answer.body
        assert world.call("POST", "/v1/devices/gateway", body, by=people["operator"]).status == 200


def test_a_device_name_of_another_group_cannot_be_claimed(world: ApiHarness, people: dict[str, Person]) -> None:
    """A claim, also with `replace`, for a name that another group has, had, or has an open claim for: refused, and in
    words that do not say which; a claim for another group likewise. For a new name it is of the one own group."""
    world.device("lab-gone", "lab")
    with world.database.write() as session:
        from edgesplit_controller.storage.tables.core import Device

        session.get_one(Device, "lab-gone").revoked = 1.0
    claim: dict[str, Any] = {"device_class": "raspberrypi4", "replace": True}
    world.call("POST", "/v1/devices/claims", {**claim, "device": "lab-later", "group": "lab"}, by=world.owner)
    for name in (THEIRS, "lab-gone", "lab-later"):
        answer = world.call("POST", "/v1/devices/claims", {**claim, "device": name}, by=people["doors-operator"])
        assert answer.status == 409 and answer.json["error"] == f"the name {name!r} is taken: choose another"
    foreign = {**claim, "device": "new", "group": "lab"}
    assert world.call("POST", "/v1/devices/claims", foreign, by=people["doors-operator"]).status == 403
    mine = world.call("POST", "/v1/devices/claims", {**claim, "device": "new"}, by=people["doors-operator"])
    assert mine.status == 200
    assert world.call("GET", "/v1/devices/new", by=people["doors-viewer"]).json["group"] == "doors"


def test_a_gateway_of_another_group_is_unknown_to_scoped_operators(
    world: ApiHarness, people: dict[str, Person]
) -> None:
    """The gateway of another group is as unknown as one that is not there."""
    body = {"devices": [OURS], "gateway": THEIRS}
    theirs = world.call("POST", "/v1/devices/gateway", body, by=people["doors-operator"])
    nobodys = world.call("POST", "/v1/devices/gateway", {**body, "gateway": "nobody"}, by=people["doors-operator"])
    assert theirs.status == nobodys.status == 404
    assert theirs.json["error"].replace(THEIRS, "X") == nobodys.json["error"].replace("nobody", "X")


def test_a_group_admin_manages_operators_of_that_group_only(world: ApiHarness, people: dict[str, Person]) -> None:
    """Operators of all groups cannot be created, and operators of other groups are unknown to the admin."""
    me = people["doors-admin"]
    made = {"name": "helper", "role": "operator", "groups": ["doors"]}
    assert world.call("POST", "/v1/operators", made, by=me).status == 200
    for groups in ([], ["lab"], ["doors", "lab"]):
        body = {"name": "too-much", "role": "viewer", "groups": groups}
        assert world.call("POST", "/v1/operators", body, by=me).status == 403
    names = {operator["name"] for operator in world.call("GET", "/v1/operators", by=me).json}
    assert "helper" in names and not any(name.startswith("all-") or name == "operator" for name in names)
    for method, path in (("DELETE", "/v1/operators/all-viewer"), ("POST", "/v1/operators/all-admin/rotate")):
        answer = world.call(method, path, {}, by=me)
        assert answer.status == 404 and not re.search("all-(?!viewer'|admin')", answer.json["error"])
    assert world.call("DELETE", "/v1/operators/helper", by=me).status == 200
    assert HOST and world.call("DELETE", "/v1/operators/operator", by=world.owner).status == 409
