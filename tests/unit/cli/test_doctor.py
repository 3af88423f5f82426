"""`edgectl doctor`: problems of a controller are found from the operator's side, each with advice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import edgesplit
from edgesplit.controller_client.credentials import Credentials
from edgesplit.errors import UsageError
from edgesplit.observability.doctor_findings import Finding, bad, good
from edgesplit_cli import doctor
from edgesplit_cli.main import cli
from edgesplit_controller.status import ProcessStatus

NOW = 1_800_000_000.0


def part(name: str, state: str = "good", subject: str = "") -> dict[str, str]:
    """As the controller shows one."""
    return {"name": name, "subject": subject, "state": state, "text": f"{name} is {state}", "remedy": f"see to {name}"}


WELL: dict[str, Any] = {
    "/v1/session": {"operator": "ada", "role": "admin", "groups": None},
    "/v1/status": {
        "version": edgesplit.__version__,
        "addresses": {"broker": "hub:8883", "offload": "https://hub:8500"},
    },
    "/v1/components": [
        part(name) for name in ("broker", "database", "disk", "histories", "offload server", "processes")
    ],
    "/v1/keys": {"notices": []},
    "/v1/fleet": {"devices": {"online": 3, "offline": 1, "revoked": 0}},
}


class Controller:
    """What a controller would answer; a test spoils it."""

    def __init__(self) -> None:
        self.answers = json.loads(json.dumps(WELL))
        self.held = Credentials(url="https://hub", operator="ada", token="t", ca_pem="", certificate_pem="", key_pem="")
        self.ways: dict[str, Finding] = {}

    def get(self, path: str) -> Any:
        if isinstance(self.answers[path], Exception):
            raise self.answers[path]
        return self.answers[path]

    def reach(self, name: str, url: str, *_: object, **__: object) -> Iterator[Finding]:
        yield self.ways.get(name, good(name, url))


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    """One that is well."""
    made = Controller()
    monkeypatch.setattr(doctor, "chosen_credentials", lambda data: None)
    monkeypatch.setattr(doctor.credentials, "from_data_folder", lambda data: made.held)
    monkeypatch.setattr(doctor.ControllerClient, "from_credentials", lambda held: made)
    monkeypatch.setattr(doctor, "check_server", made.reach)
    return made


def findings() -> dict[str, Finding]:
    """By name, the last of each."""
    return {finding.name: finding for finding in doctor.examine(Path("/data"), now=NOW)}


def test_a_healthy_controller_passes_every_check(controller: Controller) -> None:
    """Every check runs."""
    seen = findings()
    assert {finding.level for finding in seen.values()} == {"good"}
    assert list(seen) == [
        "credentials", "controller", "access", "version", "broker", "offload", "database", "disk", "histories",
        "processes", "keys", "devices",
    ]  # fmt: skip
    assert seen["devices"].said == "3 online, 1 offline"


@pytest.mark.parametrize(
    ("path", "change", "name", "level"),
    [
        ("/v1/status", {"version": "9.9"}, "version", "warning"),
        ("/v1/keys", {"notices": ["the root key is stored on this controller"]}, "keys", "warning"),
    ],
)
def test_each_problem_is_found_with_advice(
    controller: Controller, path: str, change: dict[str, Any], name: str, level: str
) -> None:
    """Each by itself, and no other is reported."""
    controller.answers[path].update(change)
    seen = findings()
    assert seen[name].level == level and seen[name].todo
    assert [finding.name for finding in seen.values() if finding.level != "good"] == [name]


@pytest.mark.parametrize(
    ("said", "name", "level"),
    [
        (part("broker", "bad"), "broker", "bad"),
        (part("offload server", "bad"), "offload server", "bad"),
        (part("offload server", "unknown"), "offload server", "warning"),
        (part("database", "bad"), "database", "bad"),
        (part("disk", "bad"), "disk", "bad"),
        (part("gateway", "bad", "hub-1"), "gateway hub-1", "warning"),
    ],
)
def test_an_unhealthy_component_is_reported_in_the_controllers_words(
    controller: Controller, said: dict[str, str], name: str, level: str
) -> None:
    """As in the dashboard and `edgectl fleet`; a problem that concerns only devices is no fault of the controller."""
    parts = {part["name"]: part for part in controller.answers["/v1/components"]}
    controller.answers["/v1/components"] = list({**parts, said["name"]: said}.values())
    seen = findings()
    assert seen[name].level == level and (seen[name].said, seen[name].todo) == (said["text"], said["remedy"])
    assert [finding.name for finding in seen.values() if finding.level != "good"] == [name]


def test_checks_with_a_failed_precondition_are_skipped(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a connection the access is not checked, without credentials the connection is not: one finding has the
    first advice."""
    controller.answers["/v1/session"] = UsageError("this token is not known")
    assert list(findings()) == ["credentials", "controller", "access"]
    controller.ways["controller"] = bad("controller", "no connection", "is it running?")
    assert list(findings()) == ["credentials", "controller"]

    def nobody(data: Path) -> Credentials:
        raise UsageError("no controller runs there")

    monkeypatch.setattr(doctor.credentials, "from_data_folder", nobody)
    assert findings()["credentials"].level == "bad" and len(findings()) == 1


def test_expiring_credentials_are_reported(controller: Controller) -> None:
    """Before they are refused."""
    controller.held = Credentials(
        url="https://hub", operator="ada", token="t", ca_pem="", certificate_pem="", key_pem="", expires=NOW + 86_400
    )
    assert findings()["credentials"].level == "warning"


def test_doctor_exits_with_1_only_for_a_bad_finding(controller: Controller) -> None:
    """A warning leaves it 0."""
    controller.answers["/v1/keys"]["notices"] = ["due"]
    assert CliRunner().invoke(cli, ["doctor"]).exit_code == 0
    controller.answers["/v1/components"] = [part("broker", "bad")]
    done = CliRunner().invoke(cli, ["doctor", "--json"])
    assert done.exit_code == 1 and json.loads(done.output)["healthy"] is False


def test_the_controllers_queues_are_reported() -> None:
    """And the host that is advertised to devices; the state of its components is listed elsewhere, once."""
    told = ProcessStatus(lambda: {"heavy": 2.0, "broker": 1.0}, {"broker": "hub:8883"}).to_dict()
    assert told["waiting"] == {"heavy": 2.0} and told["addresses"] == {"broker": "hub:8883"}
