"""The commands for drift, proposals and replanning policies, and their output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgesplit_cli.commands import replan
from edgesplit_cli.commands.replan import set_policy
from edgesplit_cli.main import cli

DRIFT: dict[str, Any] = {
    "model": "digits@1",
    "device_class": "raspberrypi4",
    "devices": ["a", "b"],
    "measured_devices": 2,
    "basis": "emulated",
    "policy": "propose",
    "note": "",
    "reason": "another table saves 12% (half of the devices 10% to 14%)",
    "drift": [
        {"quantity": "uplink", "unit": "bytes/s", "assumed": 2e6, "measured": 1e6, "factor": 0.5},
        {"quantity": "sent by remote", "unit": "bytes", "assumed": 4096.0, "measured": 8192.0, "factor": 2.0},
        {
            "quantity": "server overhead beside the layers",
            "unit": "s",
            "assumed": 0.0,
            "measured": 0.002,
            "factor": None,
        },
    ],
}
PROPOSAL: dict[str, Any] = {
    "id": 7,
    "state": "open",
    "model": "digits@1",
    "device_class": "raspberrypi4",
    "group": "roof",
    "devices": ["a", "b"],
    "basis": "emulated",
    "reason": DRIFT["reason"],
    "seconds": {"now": 0.1, "then": 0.088},
    "rows": [{"name": "remote", "split_after": ""}],
    "proposed_rows": [{"name": "cut-1", "split_after": "conv"}, {"name": "local", "split_after": "softmax"}],
    "created": 0.0,
    "result": "ab" * 32,
}
POLICY = {
    "model": "digits", "group": None, "mode": "auto", "least_devices": 2, "least_gain": 0.15, "observe_s": 7_200.0,
    "cool_down_s": 86_400.0,
}  # fmt: skip


class Controller:
    """Answers as the API does, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def get(self, path: str, **query: Any) -> Any:
        self.asked.append((path, query))
        return {"/v1/drift": [DRIFT], "/v1/proposals": [PROPOSAL], "/v1/replan-policies": [POLICY]}[path]

    def post(self, path: str, body: Any) -> Any:
        self.asked.append((path, body))
        return [POLICY] if path == "/v1/replan-policies" else [] if path.endswith("look") else PROPOSAL


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    made = Controller()
    monkeypatch.setattr(replan, "connect", lambda _data: made)
    return made


def typed(*words: str) -> str:
    done = CliRunner().invoke(cli, list(words), obj=Path("nowhere"), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_drift_is_shown_beside_the_planned_values(controller: Controller) -> None:
    """With factors, units, the kind of devices, and the proposed change."""
    said = typed("model", "drift", "digits")
    assert controller.asked == [("/v1/drift", {"model": "digits"})]
    for text in ("2 of them measured, emulated", "16 Mbit/s", "8 Mbit/s", "×0.50", "8.0 KiB", "2.0 ms", "saves 12%"):
        assert text in said, said
    typed("model", "drift", "--look")
    assert ("/v1/drift/inspect", {}) in controller.asked


def test_proposals_are_listed_with_prediction_and_devices(controller: Controller) -> None:
    """They are accepted or dismissed by their number."""
    said = typed("rollout", "proposals")
    assert controller.asked[0] == ("/v1/proposals", {"open": "true"})
    for text in ("7  open", "2 raspberrypi4 of group roof", "predicted (emulated devices)", "100.0 ms", "after conv"):
        assert text in said, said
    assert "abababababababab" in typed("rollout", "accept", "7") and "dismissed" in typed("rollout", "dismiss", "7")
    assert [path for path, _ in controller.asked[1:]] == ["/v1/proposals/7/accept", "/v1/proposals/7/dismiss"]


def test_policy_options_change_only_the_given_fields(controller: Controller) -> None:
    """Without an option the policy is only printed; `all` is every model."""
    words = ("auto", "--group", "roof", "--devices", "2", "--gain", "15%", "--observe", "2h", "--cool-down", "1d")
    said = typed("model", "replan-policy", "digits", *words)
    assert controller.asked[0] == (
        "/v1/replan-policies",
        {
            "model": "digits", "groups": ["roof"], "mode": "auto", "least_devices": 2, "least_gain": 0.15,
            "observe_s": 7_200.0, "cool_down_s": 86_400.0,
        },
    )  # fmt: skip
    assert "15.00%" in said and "2h" in said and "1d" in said
    typed("model", "replan-policy", "all", "off")
    assert controller.asked[1] == ("/v1/replan-policies", {"model": "", "groups": [], "mode": "off"})
    typed("model", "replan-policy")
    assert controller.asked[2] == ("/v1/replan-policies", {})


@pytest.mark.parametrize("words", [("--gain", "300%"), ("--observe", "soon"), ("perhaps",), ("--devices", "0")])
def test_an_invalid_policy_is_not_sent(words: tuple[str, ...], controller: Controller) -> None:
    """The command line refuses it by itself."""
    done = CliRunner().invoke(cli, ["model", "replan-policy", "digits", *words], obj=Path("nowhere"))
    assert done.exit_code == 2 and not controller.asked


@pytest.mark.parametrize(
    ("targets", "groups"),
    [(["all"], [[]]), (["group=roof", "group=hall"], [["roof", "hall"]]), (["group=roof", "cam-1"], [["roof"], []])],
)
def test_deploy_stores_a_policy_for_its_target_groups(
    targets: list[str], groups: list[list[str]], controller: Controller
) -> None:
    """For every device where the target is anything else."""
    set_policy(controller, "digits", targets, "auto")  # type: ignore[arg-type]
    assert [body["groups"] for _, body in controller.asked] == groups
    assert {body["mode"] for _, body in controller.asked} == {"auto"}
