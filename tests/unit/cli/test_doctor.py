"""`edgectl doctor`: what ails a controller is found from where an operator stands, and comes with what to do."""

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


def found() -> dict[str, Finding]:
    """By name, the last of each."""
    return {one.name: one for one in doctor.examine(Path("/data"), now=NOW)}


def test_a_controller_that_is_well_is_found_well(controller: Controller) -> None:
    """Everything is looked at."""
    seen = found()
    assert {one.level for one in seen.values()} == {"good"}
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
def test_what_is_wrong_is_found_and_comes_with_what_to_do(
    controller: Controller, path: str, change: dict[str, Any], name: str, level: str
) -> None:
    """Each by itself, and nothing else is."""
    controller.answers[path].update(change)
    seen = found()
    assert seen[name].level == level and seen[name].todo
    assert [one.name for one in seen.values() if one.level != "good"] == [name]


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
def test_a_part_that_is_not_well_is_told_in_the_controllers_words(
    controller: Controller, said: dict[str, str], name: str, level: str
) -> None:
    """As the dashboard and `edgectl fleet` tell it; what only devices depend on is no fault of the controller."""
    parts = {one["name"]: one for one in controller.answers["/v1/components"]}
    controller.answers["/v1/components"] = list({**parts, said["name"]: said}.values())
    seen = found()
    assert seen[name].level == level and (seen[name].said, seen[name].todo) == (said["text"], said["remedy"])
    assert [one.name for one in seen.values() if one.level != "good"] == [name]


def test_what_cannot_be_asked_is_left_out(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a way there is no access, without credentials no way: one finding says what to do first."""
    controller.answers["/v1/session"] = UsageError("this token is not known")
    assert list(found()) == ["credentials", "controller", "access"]
    controller.ways["controller"] = bad("controller", "no connection", "is it running?")
    assert list(found()) == ["credentials", "controller"]

    def nobody(data: Path) -> Credentials:
        raise UsageError("no controller runs there")

    monkeypatch.setattr(doctor.credentials, "from_data_folder", nobody)
    assert found()["credentials"].level == "bad" and len(found()) == 1


def test_credentials_that_end_soon_are_told(controller: Controller) -> None:
    """Before nobody is let in."""
    controller.held = Credentials(
        url="https://hub", operator="ada", token="t", ca_pem="", certificate_pem="", key_pem="", expires=NOW + 86_400
    )
    assert found()["credentials"].level == "warning"


def test_its_exit_code_says_whether_something_is_bad(controller: Controller) -> None:
    """A warning is none."""
    controller.answers["/v1/keys"]["notices"] = ["due"]
    assert CliRunner().invoke(cli, ["doctor"]).exit_code == 0
    controller.answers["/v1/components"] = [part("broker", "bad")]
    done = CliRunner().invoke(cli, ["doctor", "--json"])
    assert done.exit_code == 1 and json.loads(done.output)["healthy"] is False


def test_a_controller_tells_what_waits_in_it() -> None:
    """And where devices are told to go; how its parts are stands elsewhere, once."""
    told = ProcessStatus(lambda: {"heavy": 2.0, "broker": 1.0}, {"broker": "hub:8883"}).to_dict()
    assert told["waiting"] == {"heavy": 2.0} and told["addresses"] == {"broker": "hub:8883"}
